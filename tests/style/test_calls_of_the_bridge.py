"""How much of the packages a reader follows through one call: the functions and files that a warm call enters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lce_jax
import lce_torch_bridge
from lce_torch_bridge import linear_logprobs, linear_loss, linear_topk
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (lce_jax, lce_torch_bridge))


def logprobs(leaves: p.Problem) -> None:
    out = linear_logprobs(*leaves)
    torch.autograd.grad((out.logprobs + out.entropy).sum(), leaves[:2])


def loss(leaves: p.Problem) -> None:
    total, _ = linear_loss(lambda logprobs, *_: -logprobs, *leaves)
    torch.autograd.grad(total, leaves[:2])


def topk(leaves: p.Problem) -> None:
    linear_topk(*leaves[:2], 4)


def entered(call: Callable[[], None]) -> set[tuple[str, str]]:
    """The files and functions of both packages that a call enters after two others, autograd's threads included."""
    found: set[tuple[str, str]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    call()
    call()
    before = sys.getprofile()
    threading.setprofile_all_threads(watch)
    try:
        call()
    finally:
        threading.setprofile_all_threads(before)
    return found


# What the calls enter today. Less is better: lower the numbers with it.
BOUNDS = {
    "through JAX": {logprobs: (50, 20), loss: (68, 21), topk: (42, 16)},
    "directly": {logprobs: (38, 19), loss: (54, 20)},
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
    found = entered(lambda: call(leaves))
    functions, files = len(found), len({file for file, _ in found})
    with capsys.disabled():
        print(f"\n{call.__name__} {way}: {functions} functions in {files} files")
    assert functions <= BOUNDS[way][call][0], sorted(found)
    assert files <= BOUNDS[way][call][1], sorted({file for file, _ in found})
