"""Direct launches without a GPU: CPU tensors count as those of an H200, each kernel runs in Pallas's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lce_jax import launch_lists
from lce_torch_bridge import launch_with
from lce_torch_bridge.launched_directly import _launcher, _plan_cache, _way
from lce_torch_bridge.tensors import _device, _padding
from tests import emulated_launches
from tests.mosaic_interpreter import afresh

H200 = launch_lists.Device("gpu", "NVIDIA H200", "9.0", 132)
SMALL = launch_lists.Device("gpu", "NVIDIA H200", "9.0", 2)  # with few multiprocessors: small calls have several waves


def as_gpu(monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any], device: launch_lists.Device = H200) -> None:
    """CPU tensors count as those of a GPU, on which programs are what ``load`` makes of them."""
    monkeypatch.setattr(_plan_cache, "_plans", {})
    monkeypatch.setattr(_device, "device_of", lambda _: device)
    monkeypatch.setattr(_device, "why_not", lambda _: None)
    monkeypatch.setattr(_way, "on_gpu", lambda _: True)
    monkeypatch.setattr(_device, "current_device", lambda: -1)
    monkeypatch.setattr(_device, "current_stream", lambda _: 0)
    monkeypatch.setattr(_device, "empty", torch._C._dynamo.guards._empty_strided_cpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch_lists.LaunchList, "load", lambda program, _: load(program))
    monkeypatch.setattr(_launcher, "_compiled", _launcher._compiled.__wrapped__)


def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[launch_lists.LaunchList]]:
    """Calls are launched directly, or raise. Yields all programs that are loaded."""
    loaded: list[launch_lists.LaunchList] = []

    def load(program: launch_lists.LaunchList) -> Any:
        loaded.append(program)
        return emulated_launches.loaded(program)

    as_gpu(monkeypatch, load, SMALL)
    afresh()
    monkeypatch.setattr(_padding, "SMALLEST", 128)
    # A kernel touches the rows that are there. What emulates it copies as many as its program may have.
    empty, usable, in_rows = _device.empty, _device.usable, _launcher.in_rows
    monkeypatch.setattr(_device, "usable", lambda x: with_slack(usable(x)))
    monkeypatch.setattr(_device, "empty", lambda shape, strides, dtype: with_slack(empty(shape, strides, dtype)))
    monkeypatch.setattr(_launcher, "in_rows", lambda x: with_slack(in_rows(x)))
    launch_with("direct")
    yield loaded
    launch_with(None)


def with_slack(x: torch.Tensor) -> torch.Tensor:
    """A copy, in memory of many more rows."""
    slack = torch.full((2 * x.numel() + 1024 * math.prod(x.shape[1:]),), 77).to(x.dtype)
    slack[: x.numel()] = x.reshape(-1)
    return slack[: x.numel()].view(x.shape)
