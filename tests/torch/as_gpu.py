"""Direct launches without a GPU: CPU tensors count as those of an H200, each kernel runs in Pallas's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lce_jax.run import kernels
from lce_jax.run.kernels import Device, Kernel
from lce_torch_bridge import launch_with
from lce_torch_bridge.launched_directly import _launch_with, _launches, _passes
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from tests import emulated_launches
from tests.devices import H200
from tests.mosaic_interpreter import afresh

SMALL = Device("gpu", "NVIDIA H200", "9.0", 2)  # with few multiprocessors: small calls have several waves

type Program = list[Kernel]  # of a plan


def nothing(program: Program) -> list[Callable[..., Any]]:
    """Launches that do nothing."""
    return [lambda *_: lambda: None for _ in program]


def as_gpu(
    monkeypatch: pytest.MonkeyPatch,
    compiled: Callable[[Program], list[Any]] = nothing,
    device: Device = H200,
) -> list[Program]:
    """CPU tensors count as those of a GPU, where ``compiled`` launches kernels. Returns those of all plans."""
    programs: list[Program] = []

    def noted(program: Sequence[Kernel], *_: Any) -> list[Any]:
        programs.append(list(program))
        return compiled(programs[-1])

    monkeypatch.setattr(_launches, "_plans", {})
    monkeypatch.setattr(_device, "describe_device", lambda _: device)
    monkeypatch.setattr(_device, "launch_refusal", lambda _: None)
    monkeypatch.setattr(_launch_with, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(_device, "current_device", lambda: -1)
    monkeypatch.setattr(_device, "current_stream", lambda _: 0)
    monkeypatch.setattr(_device, "empty", torch._C._dynamo.guards._empty_strided_cpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels, "compiled", noted)
    return programs


def emulated(monkeypatch: pytest.MonkeyPatch, device: Device = SMALL) -> Iterator[list[Program]]:
    """Calls are launched directly, or raise. Yields the kernels of all plans."""
    programs = as_gpu(monkeypatch, emulated_launches.compiled, device)
    afresh()
    monkeypatch.setattr(_padding, "SMALLEST", 128)
    # A kernel touches the rows that are there. What emulates it copies as many as its program may have.
    empty, usable, in_rows, call = _device.empty, _device.make_usable, _passes.pad_tokens, _launches.Tape.call

    def with_room(tape: _launches.Tape, function: Any, *told: Any) -> Any:
        return call(tape, lambda *given: [with_slack(x) for x in function(*given)], *told)

    monkeypatch.setattr(_launches.Tape, "call", with_room)
    monkeypatch.setattr(_device, "make_usable", lambda x: with_slack(usable(x)))
    monkeypatch.setattr(_device, "empty", lambda shape, strides, dtype: with_slack(empty(shape, strides, dtype)))
    monkeypatch.setattr(_passes, "pad_tokens", lambda *told: with_slack(in_rows(*told)))
    launch_with("direct")
    yield programs
    launch_with(None)


def with_slack(x: torch.Tensor) -> torch.Tensor:
    """A copy, in memory of many more rows."""
    slack = torch.full((2 * x.numel() + 1024 * math.prod(x.shape[1:]),), 77).to(x.dtype)
    slack[: x.numel()] = x.reshape(-1)
    return slack[: x.numel()].view(x.shape)


class Ranks:
    """What each rank sent in the last round is what all receive in the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.rank, self.size = 0, size
        self.gathered: dict[tuple[int, torch.Size], torch.Tensor] = {}  # by rank and shape
        self.summed: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(_tensor_parallel, "size_and_rank", lambda name: (size, self.rank) if name else (1, 0))
        monkeypatch.setattr(_tensor_parallel, "check", lambda *_: None)
        monkeypatch.setattr(_tensor_parallel, "compare_options", lambda *_, **__: None)
        monkeypatch.setattr(_tensor_parallel, "gather", self._gather)
        monkeypatch.setattr(_tensor_parallel, "all_reduce", self._all_reduce)

    def _gather(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.gathered.setdefault((self.rank, x.shape), x.clone())
        return torch.stack([self.gathered.get((rank, x.shape), x) for rank in range(self.size)])

    def _all_reduce(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.summed[self.rank] = x.clone()
        return sum(self.summed.values(), torch.zeros_like(x))
