"""A head with deferred logits beside the same head without: values and all gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lce_torch_bridge import defer_logits
from tests.torch import problem as p

B, S, H, V = 2, 6, 16, 50
T = B * S
NEAR = 2e-6  # float32 beside float32: the programs of the tests compute in float64

type Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Run:
    """What a function of logits returns, and the gradients of hidden and of the head's parameters."""

    value: torch.Tensor
    gradients: list[torch.Tensor | None]


def make_head(dtype: torch.dtype = torch.float32, bias: bool = False, columns: int = V) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(H, columns, bias=bias, dtype=dtype)


def make_hidden(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    hidden = torch.randn(*shape, H, generator=torch.Generator().manual_seed(2))
    return hidden.to(dtype).requires_grad_()


def make_labels(*shape: int, columns: int = V) -> torch.Tensor:
    return torch.randint(0, columns, shape, generator=torch.Generator().manual_seed(3))


def run_head(head: Any, loss: Loss, shape: tuple[int, ...] = (B, S)) -> Run:
    hidden = make_hidden(*shape, dtype=head.weight.dtype)
    head.zero_grad()
    value = loss(head(hidden), make_labels(*shape, columns=head.out_features))
    seed = torch.randn(value.shape, generator=torch.Generator().manual_seed(4))
    if value.requires_grad:
        (value.float() * seed).sum().backward()
    return Run(value.detach(), [x.grad for x in (hidden, *head.parameters())])


def compare(loss: Loss, *, strict: bool = False, shape: tuple[int, ...] = (B, S), **of_head: Any) -> Any:
    """The handle, after a run that is equal to that of stored logits."""
    head = make_head(**of_head)
    deferred = copy.deepcopy(head)
    handle = defer_logits(deferred, strict=strict)
    want, got = run_head(head, loss, shape), run_head(deferred, loss, shape)
    assert (got.value.dtype, got.value.shape) == (want.value.dtype, want.value.shape)
    if head.weight.dtype == torch.float32:
        check_near(got, want, NEAR)
    else:
        check_near_exact(got, want, run_head(head.double(), lambda z, labels: loss(z, labels), shape))
    return handle


def check_near(got: Run, want: Run, bound: float) -> None:
    torch.testing.assert_close(got.value, want.value, rtol=bound, atol=bound, equal_nan=True)
    for x, y in zip(got.gradients, want.gradients, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or p.relative_norm(x, y) < 5 * bound


def check_near_exact(got: Run, want: Run, exact: Run) -> None:
    """No further from float64 than twice what stored logits of 16 bits are."""
    values = zip(*([x.value, *(y for y in x.gradients if y is not None)] for x in (got, want, exact)), strict=True)
    for ours, stock, right in values:
        assert p.relative_norm(ours, right) <= 2 * p.relative_norm(stock, right) + torch.finfo(torch.bfloat16).eps
