"""How much of the packages a reader follows through one call: the functions and files that a warm call enters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lce_jax
import lce_torch_bridge
from lce_torch_bridge import linear_logprobs, linear_loss, linear_topk
from tests.entered import entered
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu


def logprobs(leaves: p.Problem) -> None:
    out = linear_logprobs(*leaves)
    torch.autograd.grad((out.logprobs + out.entropy).sum(), leaves[:2])


def loss(leaves: p.Problem) -> None:
    total, _ = linear_loss(lambda logprobs, *_: -logprobs, *leaves)
    torch.autograd.grad(total, leaves[:2])


def topk(leaves: p.Problem) -> None:
    linear_topk(*leaves[:2], 4)


# What the calls enter today. Less is better: lower the numbers with it.
BOUNDS = {
    "through JAX": {logprobs: (50, 20), loss: (66, 21), topk: (42, 16)},
    "directly": {logprobs: (38, 19), loss: (52, 20)},
}


@pytest.mark.parametrize(
    ("way", "call"),
    [pytest.param(way, call, id=f"{call.__name__} {way}") for way, calls in BOUNDS.items() for call in calls],
)
def test_a_warm_call_enters_few_functions(
    way: str, call: Callable[[p.Problem], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leaves = p.draw(16, 128, 784, torch.bfloat16).leaves()
    if way == "directly":
        as_gpu(monkeypatch, lambda _: lambda *_: None)  # it launches nothing
    for _ in range(2):
        call(leaves)
    found = entered(lambda: call(leaves), lce_jax, lce_torch_bridge)
    with capsys.disabled():
        print(f"\n{call.__name__} {way}: {found}")
    assert len(found.functions) <= BOUNDS[way][call][0], found.functions
    assert len(found.files) <= BOUNDS[way][call][1], found.files
