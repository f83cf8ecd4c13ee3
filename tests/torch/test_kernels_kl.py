"""`linear_kl` launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_torch_bridge import launch_with, linear_kl
from tests.torch import problem as p
from tests.torch.as_gpu import Program, emulated

H, G = 128, 192


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


def draw(T: int, V: int) -> list[torch.Tensor]:
    """Both heads, the student's first."""
    return [x for seed, size in ((0, H), (1, G)) for x in p.draw(T, size, V, torch.bfloat16, seed)[:2]]


def evaluate(heads: list[torch.Tensor], seed: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The divergence and both gradients."""
    leaves = [x.clone().requires_grad_() for x in heads[:2]]
    kl = linear_kl(*leaves, *heads[2:], **options)
    return [kl.detach(), *torch.autograd.grad((seed * kl).sum(), leaves)]


def check(programs: list[Any], heads: list[torch.Tensor], **options: Any) -> None:
    """Divergence and gradients are those of XLA's implementation."""
    seed = torch.randn(len(heads[0]), generator=torch.Generator().manual_seed(3))
    kl, *grads = evaluate(heads, seed, **options)
    assert programs
    launch_with("jax")
    want, *wanted = evaluate(heads, seed, **{**options, "cache_bytes": 0}, implementation="xla")
    launch_with("direct")
    assert p.value_error(kl, want) < 2e-5
    assert max(map(p.relative_norm, grads, wanted)) < 5e-3  # bfloat16 rounds by 2⁻⁹


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_plain(programs: list[Any], direction: str) -> None:
    check(programs, draw(9, 520), direction=direction)
