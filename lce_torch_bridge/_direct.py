"""Programs launched directly: kernels on torch's current stream, all memory from torch's allocator, no client of JAX's.

What the way through JAX needs does not happen here: no stream waits for another, and no array has two owners. A call
can be captured in a CUDA graph once it has run outside of one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_jax import launch
from lce_torch_bridge import _torch

ALIGNMENT = 16  # bytes, of what TMA reads
SERVED = "9.0"  # the compute capability that the kernels are written for

_lock = threading.Lock()
_programs: dict[Any, Loaded | str] = {}


class Loaded(NamedTuple):
    """A program on a device."""

    run: Callable[[int, int, Sequence[int], Sequence[int]], None]
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    workspace_bytes: int


def device_of(device: torch.device) -> launch.Device | None:
    """``device`` as `lce_jax` describes it; None for what is no CUDA device, or is none of this machine's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _described(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _described(index: int) -> launch.Device:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return launch.Device("gpu", properties.name, capability, properties.multi_processor_count)


def why_not(device: torch.device) -> str | None:
    """Why nothing is launched directly on ``device``; None if programs may be."""
    described = device_of(device)
    if described is None:
        return f"{device} is no CUDA device of this machine"
    if described.compute_capability != SERVED:
        return f"{described.kind} has compute capability {described.compute_capability}, the kernels need {SERVED}"
    return launch.why_not()


def program(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor | None], updated: Sequence[int]
) -> Loaded | str:
    """``function`` compiled for inputs like these, or why it is not launched directly.

    It may overwrite the inputs with the indices ``updated``, the same ones for each function.
    """
    first = next(x for x in inputs if x is not None)
    key = (function, first.get_device(), *(None if x is None else (x.shape, x.dtype) for x in inputs))

    def plan(device: launch.Device) -> launch.Program:
        structs = [None if x is None else struct(x) for x in inputs]
        donated = [sum(x is not None for x in inputs[:i]) for i in updated]
        return launch.program(function, structs, device, donated)

    return loaded(key, first, plan)


def loaded(key: Any, x: torch.Tensor, plan: Callable[[launch.Device], launch.Program]) -> Loaded | str:
    """What was made for this key before; else the program that ``plan`` makes, or why it is not launched directly.

    It runs on the device of ``x``.

    Raises:
        RuntimeError: it is not compiled yet and a CUDA graph is being captured.
    """
    found = _programs.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "lce_torch_bridge compiles kernels for this call, which a CUDA graph cannot capture: make the call "
                "once before the capture, with tensors of the same shapes, and its backward"
            )
        with _lock:
            found = _programs.get(key) or _load(x, plan)
            _programs[key] = found
    return found


def _load(x: torch.Tensor, plan: Callable[[launch.Device], launch.Program]) -> Loaded | str:
    reason = why_not(x.device)
    if reason is not None:
        return reason
    description = device_of(x.device)
    assert description is not None
    try:
        planned = plan(description)
        with torch.cuda.device(x.get_device()):
            run = planned.load(torch.cuda.current_device())
    except launch.UnservedError as error:
        return _told(error)
    outputs = [(output.shape, getattr(torch, output.dtype.name)) for output in planned.outputs]
    return Loaded(run, outputs, planned.workspace_bytes)


def refusal(function: Callable[..., Any], structs: Sequence[Any], device: torch.device) -> str | None:
    """Why ``function`` is not launched directly on a device that could; None if it is. It is not compiled."""
    description = device_of(device)
    assert description is not None
    try:
        launch.program(function, structs, description)
    except launch.UnservedError as error:
        return _told(error)
    return None


def _told(error: launch.UnservedError) -> str:
    return f"only XLA runs {error}"


def struct(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a tensor."""
    return jax.ShapeDtypeStruct(tuple(map(int, x.shape)), str(x.dtype).removeprefix("torch."))


def run(
    loaded: Loaded, inputs: Sequence[torch.Tensor | None], updated: Mapping[int, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The program's results, computed on torch's current stream; not those that update a tensor of the inputs."""
    updated = updated or {}
    given = [usable(x) for x in inputs if x is not None]
    device = given[0].device
    outputs = [
        updated[i] if i in updated else torch.empty(shape, dtype=dtype, device=device)
        for i, (shape, dtype) in enumerate(loaded.outputs)
    ]
    with torch.cuda.device(device) if device.index != _torch.current_device() else contextlib.nullcontext():
        workspace = _torch.empty((loaded.workspace_bytes,), (1,), torch.uint8)  # torch reuses it in the stream's order
        addresses = [x.data_ptr() for x in (*outputs, *given)]
        loaded.run(_torch.current_stream(given[0].get_device()), workspace.data_ptr(), (), addresses)
    return [output for i, output in enumerate(outputs) if i not in updated] if updated else outputs


def on_gpu(x: torch.Tensor) -> bool:
    """Whether ``x`` is in a GPU's memory."""
    return x.is_cuda


def usable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the kernels read it: contiguous and aligned."""
    return x if is_usable(x) else x.clone(memory_format=torch.contiguous_format)


def is_usable(x: torch.Tensor) -> bool:
    """Whether kernels can read and write ``x`` where it is."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
