"""Deferred logits against the same code with stored ones: what shares memory, grad mode, hooks, or changes between."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import defer_logits

F = torch.nn.functional

B, S, H, V = 2, 4, 8, 11
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 10]])
OTHER = torch.linspace(-1, 1, B * S * V).view(B, S, V)
Head = torch.nn.Linear
type Case = Callable[[Head, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def loss(logits: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, V), ids.reshape(-1))


def pick(x: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return x.gather(-1, ids[..., None])


def add_with_alpha(head: Head, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.add(OTHER * t, head(x), alpha=2.0),)


def lse_without_gradient(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    with torch.no_grad():
        lse = z.logsumexp(-1, keepdim=True)
    return (pick(z - lse),)


def stored_minus_lse(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    return ((z - z.logsumexp(-1, keepdim=True)).sin(),)


def detached_probabilities(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lp = head(x).log_softmax(-1)
    return (-(lp.exp().detach() * lp).sum(-1),)


def detached_entropy(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    lp = z.log_softmax(-1).detach()
    return loss(z), z.logsumexp(-1), -(lp.exp() * lp).sum(-1), z[:, 1:].detach().logsumexp(-1)


def detached_temperature(head: Head, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return loss(head(x).detach() / t), loss(head(x).detach() + OTHER[0, 0] * t)


def written_unseen(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z, y = head(x), head(x)
    rows, copied, others = z[:, 1:], z.double(), y[:, 1:]
    z.data[..., 0] = -5.0
    y.view_as(OTHER)[..., 0] = -5.0
    return loss(rows, IDS[:, 1:]), copied.sin(), loss(others, IDS[:, 1:])


def written_row(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = head(x)
    row, copied = z[torch.tensor(1)], z.double()
    row[..., 0] = -5.0
    return copied.sin(), loss(z)


def written_lse(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        z = head(x).detach()
        lse = z.logsumexp(-1, keepdim=True)
        lse.add_(1)
        return pick(z - lse), z.logsumexp(-1)


def checkpointed(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    steps = (loss, lambda z: z.logsumexp(-1), lambda z: pick(z.log_softmax(-1)), torch.sin)
    return tuple(checkpoint(step, head(x), use_reentrant=False) for step in steps)


def pickled(head: Head, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = pickle.loads(pickle.dumps(head))
    with defer_logits(same):
        return (loss(same(x)),)


CASES: list[Case] = [
    add_with_alpha, lse_without_gradient, stored_minus_lse, detached_probabilities, detached_entropy,
    detached_temperature, written_unseen, written_row, written_lse, checkpointed, pickled,
]  # fmt: skip


def run(case: Case, head: Head) -> tuple[list[Any], list[Any]]:
    """Results, and the gradients of their sum."""
    x = torch.linspace(-2, 2, B * S * H).view(B, S, H).requires_grad_()
    t = torch.tensor(1.7, requires_grad=True)
    found = case(head, x * 1, t)
    recorded = [each.sum() * (i + 1) for i, each in enumerate(found) if each.requires_grad]
    if recorded:
        torch.stack([each.float() for each in recorded]).sum().backward()
    return list(found), [x.grad, t.grad, head.weight.grad]


def make_head() -> Head:
    torch.manual_seed(0)
    return torch.nn.Linear(H, V, bias=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_is_as_with_stored_logits(case: Case) -> None:
    head = make_head()
    expected, gradients = run(case, copy.deepcopy(head))
    defer_logits(head)
    found, own = run(case, head)
    assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
    torch.testing.assert_close([x.detach() for x in found], [x.detach() for x in expected], rtol=3e-5, atol=3e-5)
    for ours, stock in zip(own, gradients, strict=True):
        assert (ours is None) == (stock is None)
        if ours is not None:
            torch.testing.assert_close(ours, stock, rtol=3e-5, atol=3e-5)


def step_fused(head: Head, _: torch.Tensor) -> None:
    head.weight.grad = torch.ones_like(head.weight)
    torch.optim.AdamW(head.parameters(), fused=True).step()


@torch.no_grad()
def write(which: str, head: Head, x: torch.Tensor) -> None:
    (head.weight if which == "weight" else x).mul_(2)


CHANGES = {
    "weight": (functools.partial(write, "weight"), r"weight \(11, 8\) was written into in place"),
    "hidden": (functools.partial(write, "hidden"), r"hidden \(2, 4, 8\) was written into in place"),
    "frozen": (lambda head, _: head.weight.requires_grad_(False), "was given requires_grad=False"),
    "stepped": (step_fused, "an optimizer has made a step"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_since_the_head_is_refused(name: str) -> None:
    change, words = CHANGES[name]
    head, x = make_head(), torch.ones(B, S, H).requires_grad_()
    defer_logits(head)
    hidden = x * 1
    logits, kept = head(hidden), head(hidden)
    values = kept.compute()
    expected = values.detach().clone()
    change(head, hidden)
    for use in (loss, torch.sin, lambda z: z.argmax(-1)):
        with pytest.raises(RuntimeError, match=words):
            use(logits)
    torch.testing.assert_close(kept.sin(), expected.sin())  # as the message says


def test_a_gradient_of_logits_that_a_loss_does_not_have_is_refused() -> None:
    head = make_head()
    defer_logits(head)
    logits = head(torch.ones(B, S, H))
    logits.retain_grad()
    loss(logits).backward()
    assert logits.grad is not None
    logits = head(torch.ones(B, S, H))
    rows = logits[:, 1:]
    for ask in (
        logits.retain_grad,
        lambda: logits.register_hook(print),
        lambda: torch.autograd.grad(loss(rows, IDS[:, 1:]), rows),
    ):
        with pytest.raises(RuntimeError, match=r"logits\.compute\(\)"):
            ask()
