"""Direct launches without a GPU."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lce_jax import launch
from lce_jax.launch import _source
from lce_torch_bridge import _direct, _prepared, _rows, _torch
from tests import launch_emulator

H200 = launch.Device("gpu", "NVIDIA H200", "9.0", 132)


def as_gpu(monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any]) -> None:
    """CPU tensors count as those of an H200, on which programs are what ``load`` makes of them."""
    monkeypatch.setattr(_direct, "_programs", {})
    monkeypatch.setattr(_prepared, "_plans", {})
    monkeypatch.setattr(_direct, "device_of", lambda _: H200)
    monkeypatch.setattr(_direct, "why_not", lambda _: None)
    monkeypatch.setattr(_direct, "on_gpu", lambda _: True)
    monkeypatch.setattr(_torch, "current_device", lambda: -1)
    monkeypatch.setattr(_torch, "current_stream", lambda _: 0)
    monkeypatch.setattr(_torch, "empty", torch._C._dynamo.guards._empty_strided_cpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch.Program, "load", lambda program, _: load(program))


def emulated(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, forward_rows: int) -> list[launch.Program]:
    """Direct launches run on the CPU, the forward in pieces of so many rows and the backward in twice as many.

    Returns all programs that are loaded.
    """
    programs: list[launch.Program] = []

    def load(program: launch.Program) -> Any:
        programs.append(program)
        own = folder / str(len(programs))
        own.mkdir()
        return launch_emulator.loaded(program, own)

    monkeypatch.setattr(_source, "THREADS", launch_emulator.THREADS)
    monkeypatch.setattr(launch_emulator, "PADDED_TOKENS", 2 * forward_rows)
    monkeypatch.setattr(_rows, "FORWARD_ROWS", forward_rows)
    monkeypatch.setattr(_rows, "SMALLEST", forward_rows // 2)
    as_gpu(monkeypatch, load)
    return programs
