"""Converts torch's tensors to JAX's arrays and back, through DLPack.

Tensor and array share their memory, in stream order, without waiting for a GPU. This needs three rules:

* Import a tensor anew for every call, and keep no JAX array over torch's memory: torch may free, move or refill it.
* Export at least one output of every program that reads torch's memory. The export makes torch's stream wait for the
  program. Without it, a write in place right after the call overwrites what the program still reads.
* Do not donate an imported buffer, because it belongs to torch.

JAX reuses an array's memory as soon as nothing holds the array, even if torch's streams have yet to read it. So this
module holds each array that JAX lends to torch on a GPU until torch has dropped the tensor. The memory goes back to JAX
only in `_runtime.enter_device`, before the next program's tensors are imported. Every program that JAX runs for torch,
even one that makes zeros, has an import that waits for all streams on which JAX's memory was exported. Only one thread
at a time goes from `enter_device` to the program's launch, so memory that other threads drop meanwhile is still held.
If yet another stream reads a gradient, copy the gradient on that stream first, because ``record_stream`` does not reach
JAX's allocator.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import jax
import torch
from torch.multiprocessing.reductions import StorageWeakRef

CPU_ALIGNMENT = 64  # bytes; XLA silently copies a CPU buffer with less alignment
GPU_ALIGNMENT = 16  # bytes; a GPU buffer with less alignment is imported, but then the program fails
LEGACY_STREAM = 1  # CUDA's default stream in DLPack
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool)


def to_jax(x: torch.Tensor, *, wait: bool = True) -> jax.Array:
    """Returns ``x`` as a JAX array over the same memory, or over a copy if XLA cannot use its layout.

    The program that takes the array waits for everything queued on torch's stream so far. Each wait takes time on the
    host. With ``wait=False``, the import of another array of the same program must wait, and the program must use that
    array (``jax.jit`` drops unused arrays).

    Raises:
        TypeError: JAX would convert the dtype: int64 wraps modulo 2³², float64 loses half its digits.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.through_jax._dlpack import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32)).tolist()
        [0, 1, 2]
    """
    x = _make_importable(x)
    with torch.cuda.device(x.get_device()):  # torch exports only from its current device, which JAX may have changed
        take = _quick_import(x.device)
        return jax.dlpack.from_dlpack(x) if take is None else take(x, wait=wait)


class _Import(Protocol):
    def __call__(self, x: torch.Tensor, *, wait: bool) -> jax.Array: ...


@functools.cache
def _quick_import(device: torch.device) -> _Import | None:
    """Returns a fast import that uses the private function behind ``jax.dlpack.from_dlpack``; None if JAX lacks it.

    ``from_dlpack`` itself takes more time on the host than a program, and waits for torch's stream for every tensor.
    """
    probe = torch.zeros(1, dtype=torch.float32, device=device)
    place, kind = jax.dlpack.from_dlpack(probe).device, int(probe.__dlpack_device__()[0])

    def take(x: torch.Tensor, *, wait: bool) -> jax.Array:
        stream = place.get_stream_for_external_ready_events() if wait and x.is_cuda else None
        if stream is not None:
            _make_wait(stream, x.device)
        return to_buffer(to_dlpack(x), place, stream, None, kind)

    try:
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        to_buffer, to_dlpack = _jax.dlpack_managed_tensor_to_buffer, torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]
        take(probe, wait=True)
    except (ImportError, AttributeError, TypeError):
        return None
    return take


class _Events(threading.local):
    """One event per device and thread. Two threads that share an event would wait for each other's streams."""

    def __init__(self) -> None:
        self.by_device: defaultdict[torch.device, torch.cuda.Event] = defaultdict(torch.cuda.Event)


_events = _Events()
_external = functools.cache(torch.cuda.ExternalStream)
_readers: defaultdict[torch.device, dict[int, torch.cuda.Stream]] = defaultdict(dict)  # reading streams, by handle
lent: list[tuple[StorageWeakRef, jax.Array]] = []  # each GPU array that is lent to torch, with torch's storage of it
launch_lock = threading.RLock()  # locked from `take_back` to the launch of a program that may reuse the memory


def _make_wait(stream: int, device: torch.device) -> None:
    """Makes ``stream`` wait for everything queued so far on torch's current stream and on all streams in `_readers`.

    ``torch.Tensor.__dlpack__`` waits only for one stream, with a new event each time, which takes 50 µs on the host.
    """
    event, current = _events.by_device[device], torch.cuda.current_stream(device)
    for reader in ({current.cuda_stream: current} | _readers[device]).values():
        event.record(reader)
        _external(stream, device).wait_event(event)


def _make_importable(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, or a copy of it, in a layout that XLA can import."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{x.dtype} does not pass to JAX unchanged; known: {', '.join(map(str, DTYPES))}")
    x = x.detach().contiguous()
    if x.data_ptr() % (GPU_ALIGNMENT if x.is_cuda else CPU_ALIGNMENT) or (not x.is_cuda and x.is_pinned()):
        x = x.clone()
    return x


def to_torch(x: jax.Array) -> torch.Tensor:
    """Returns ``x`` as a tensor over the same memory, which JAX keeps for it, ready on torch's current stream."""
    return to_torch_all([x])[0]


def to_torch_all(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Returns arrays of one device as tensors, like `to_torch`."""
    stream = None
    if arrays and arrays[0].platform() == "gpu":
        device = arrays[0].__dlpack_device__()[1]  # type: ignore[attr-defined]  # explicit, because JAX may have changed the current device
        current = torch.cuda.current_stream(device)
        _readers[current.device][current.cuda_stream] = current
        stream = current.cuda_stream or LEGACY_STREAM
    tensors = [torch.utils.dlpack.from_dlpack(x.__dlpack__(stream=stream)) for x in arrays]  # type: ignore[call-arg]
    if stream is not None:
        with launch_lock:
            lent.extend((StorageWeakRef(x.untyped_storage()), array) for x, array in zip(tensors, arrays, strict=True))
    return tensors


def take_back() -> None:
    """Drops the lent arrays whose tensors torch has dropped."""
    with launch_lock:
        lent[:] = [(storage, array) for storage, array in lent if not storage.expired()]


def forget_clients() -> None:
    """Prepares the end of JAX's clients: waits until torch has read JAX's memory, and clears caches about clients."""
    for device in _readers:
        torch.cuda.synchronize(device)
    _readers.clear()
    take_back()
    _external.cache_clear()
    _quick_import.cache_clear()
