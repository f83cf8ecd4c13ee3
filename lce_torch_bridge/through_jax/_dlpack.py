"""Tensors to JAX arrays and back through DLPack: the same memory, in stream order, without waiting for a GPU.

Three rules, each with its reason:

* Import afresh for every call and keep no JAX array that aliases torch's memory: torch may free, move or refill it.
* Export at least one output of every program that read torch's memory. The export makes torch's stream wait for the
  program; without it a write in place right after the call overwrites what the program still reads.
* Do not donate an imported buffer: it is torch's.

Memory of JAX that torch drops goes back to JAX at once, even if a GPU has yet to read it. So every program that JAX
runs for torch, be it one that makes zeros, takes an import that waits for all streams on which JAX's memory was
exported. A gradient that still another stream reads must be copied there first, because ``record_stream`` does not
reach JAX's allocator.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import jax
import torch

CPU_ALIGNMENT = 64  # bytes; XLA copies a less aligned CPU buffer silently
GPU_ALIGNMENT = 16  # bytes; a less aligned GPU buffer imports and then fails when the program runs
LEGACY_STREAM = 1  # how DLPack calls CUDA's default stream
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool)


def to_jax(x: torch.Tensor, *, wait: bool = True) -> jax.Array:
    """``x`` as a JAX array over the same memory, or over a copy if XLA cannot use its layout.

    The program that takes the array waits for everything queued on torch's stream so far. Each wait costs the host
    time: ``wait=False`` leaves it to another array of the same program, one that is certain to be used (``jax.jit``
    drops the others).

    Raises:
        TypeError: for dtypes that JAX would convert: int64 wraps modulo 2³², float64 loses half its digits.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.through_jax._dlpack import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32)).tolist()
        [0, 1, 2]
    """
    x = _usable(x)
    with torch.cuda.device(x.get_device()):  # torch exports from its current device only, and JAX may have changed it
        take = _direct_import(x.device)
        return jax.dlpack.from_dlpack(x) if take is None else take(x, wait=wait)


class _Import(Protocol):
    def __call__(self, x: torch.Tensor, *, wait: bool) -> jax.Array: ...


@functools.cache
def _direct_import(device: torch.device) -> _Import | None:
    """The function under ``jax.dlpack.from_dlpack``, for a device; None if this version of JAX has another.

    ``from_dlpack`` itself costs the host more time than a program, and waits for torch's stream with every tensor.
    """
    probe = torch.zeros(1, dtype=torch.float32, device=device)
    place, kind = jax.dlpack.from_dlpack(probe).device, int(probe.__dlpack_device__()[0])

    def take(x: torch.Tensor, *, wait: bool) -> jax.Array:
        stream = place.get_stream_for_external_ready_events() if wait and x.is_cuda else None
        if stream is not None:
            _let_wait(stream, x.device)
        return to_buffer(to_dlpack(x), place, stream, None, kind)

    try:
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        to_buffer, to_dlpack = _jax.dlpack_managed_tensor_to_buffer, torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]
        take(probe, wait=True)
    except (ImportError, AttributeError, TypeError):
        return None
    return take


class _Events(threading.local):
    """One event per device and thread: two threads that share one would wait for each other's streams."""

    def __init__(self) -> None:
        self.of: defaultdict[torch.device, torch.cuda.Event] = defaultdict(torch.cuda.Event)


_events = _Events()
_external = functools.cache(torch.cuda.ExternalStream)
_readers: defaultdict[torch.device, dict[int, torch.cuda.Stream]] = defaultdict(dict)  # streams exported on, by handle


def _let_wait(stream: int, device: torch.device) -> None:
    """``stream`` waits for everything queued so far on torch's current stream and on all readers.

    ``torch.Tensor.__dlpack__`` does so for one stream, with a new event each time, which costs the host 50 µs.
    """
    event, current = _events.of[device], torch.cuda.current_stream(device)
    for reader in ({current.cuda_stream: current} | _readers[device]).values():
        event.record(reader)
        _external(stream, device).wait_event(event)


def _usable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a layout that XLA takes."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{x.dtype} does not pass to JAX unchanged; known: {', '.join(map(str, DTYPES))}")
    x = x.detach().contiguous()
    if x.data_ptr() % (GPU_ALIGNMENT if x.is_cuda else CPU_ALIGNMENT) or (not x.is_cuda and x.is_pinned()):
        x = x.clone()
    return x


def to_torch(x: jax.Array) -> torch.Tensor:
    """``x`` as a tensor over the same memory, ready in torch's current stream; JAX frees it when torch drops it."""
    return to_torch_all([x])[0]


def to_torch_all(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """`to_torch` of arrays of one device."""
    stream = None
    if arrays and arrays[0].platform() == "gpu":
        device = arrays[0].__dlpack_device__()[1]  # type: ignore[attr-defined]  # not the current one: JAX may have changed it
        current = torch.cuda.current_stream(device)
        _readers[current.device][current.cuda_stream] = current
        stream = current.cuda_stream or LEGACY_STREAM
    return [torch.utils.dlpack.from_dlpack(x.__dlpack__(stream=stream)) for x in arrays]  # type: ignore[call-arg]


def forget() -> None:
    """Before JAX's clients end: waits until torch has read their memory, and drops what is kept about them."""
    for device in _readers:
        torch.cuda.synchronize(device)
    _readers.clear()
    _external.cache_clear()
    _direct_import.cache_clear()
