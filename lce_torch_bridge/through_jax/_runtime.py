"""JAX in a process that belongs to PyTorch: its memory, its devices, its start and its end.

`start` starts JAX before the first call. `init` starts it earlier, with options. `release` gives JAX's memory back to
the driver, for example between training and generation: JAX's clients end, and the next call makes new ones. Importing
this module changes nothing: the environment variables that JAX reads are set when it starts.

Tensors become JAX's arrays, and JAX's arrays become tensors, through DLPack: both share the memory, in stream order,
without waiting for a GPU. This needs three rules:

* Import a tensor anew for every call, and keep no JAX array over torch's memory: torch may free, move or refill it.
* Export at least one output of every program that reads torch's memory. The export makes torch's stream wait for the
  program. Without it, a write in place right after the call overwrites what the program still reads.
* Do not donate an imported buffer, because it is torch's.

JAX reuses an array's memory as soon as nothing holds the array, even if torch's streams have yet to read it. So this
module holds each array that JAX lends to torch on a GPU until torch has dropped it. The memory goes back to JAX only in
`enter_device`, before the imports of the next program. Every program that JAX runs for torch, even one that makes
zeros, has an import that waits for all streams on which JAX's memory was exported. Only one thread at a time goes from
`enter_device` to the program's launch, so what other threads drop meanwhile stays held. If yet another stream reads a
gradient, copy the gradient on that stream first, because ``record_stream`` does not reach JAX's allocator.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.extend
import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lce_jax.run import kernels
from lce_torch_bridge.tensors import _device

CPU_ALIGNMENT = 64  # bytes; XLA copies a less aligned CPU buffer silently
GPU_ALIGNMENT = 16  # bytes; a less aligned GPU buffer imports and then fails when the program runs
LEGACY_STREAM = 1  # DLPack's number of CUDA's default stream
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool)


def to_jax(x: torch.Tensor, *, wait: bool = True) -> jax.Array:
    """Returns ``x`` as a JAX array over the same memory, or over a copy if XLA cannot use its layout.

    The program that takes the array waits for everything queued on torch's stream so far. Each wait costs the host
    time. ``wait=False`` leaves the wait to another array of the same program, which the program must use (``jax.jit``
    drops unused arrays).

    Raises:
        TypeError: for dtypes that JAX would convert: int64 wraps modulo 2³², float64 loses half its digits.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.through_jax._runtime import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32)).tolist()
        [0, 1, 2]
    """
    x = _make_importable(x)
    with torch.cuda.device(x.get_device()):  # torch exports from its current device only, and JAX may have changed it
        take = _quick_import(x.device)
        return jax.dlpack.from_dlpack(x) if take is None else take(x, wait=wait)


class _Import(Protocol):
    def __call__(self, x: torch.Tensor, *, wait: bool) -> jax.Array: ...


@functools.cache
def _quick_import(device: torch.device) -> _Import | None:
    """Returns the private function that ``jax.dlpack.from_dlpack`` calls; None if this version of JAX has another.

    ``from_dlpack`` itself costs the host more time than a program, and waits for torch's stream with every tensor.
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
_lent: list[tuple[StorageWeakRef, jax.Array]] = []  # torch's storage of each array of a GPU that is lent to torch
_launch_lock = threading.RLock()  # held from `_take_back` to the launch of a program that may reuse the memory


def _make_wait(stream: int, device: torch.device) -> None:
    """Makes ``stream`` wait for everything queued so far on torch's current stream and on all readers.

    ``torch.Tensor.__dlpack__`` waits for one stream, with a new event each time, which costs the host 50 µs.
    """
    event, current = _events.by_device[device], torch.cuda.current_stream(device)
    for reader in ({current.cuda_stream: current} | _readers[device]).values():
        event.record(reader)
        _external(stream, device).wait_event(event)


def _make_importable(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, or a copy of it, in a layout that XLA takes."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{x.dtype} does not pass to JAX unchanged; known: {', '.join(map(str, DTYPES))}")
    x = x.detach().contiguous()
    if x.data_ptr() % (GPU_ALIGNMENT if x.is_cuda else CPU_ALIGNMENT) or (not x.is_cuda and x.is_pinned()):
        x = x.clone()
    return x


def to_torch(x: jax.Array) -> torch.Tensor:
    """Returns ``x`` as a tensor over the same memory, ready in torch's current stream. JAX frees it after torch has."""
    return to_torch_all([x])[0]


def to_torch_all(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Returns `to_torch` of arrays of one device."""
    stream = None
    if arrays and arrays[0].platform() == "gpu":
        device = arrays[0].__dlpack_device__()[1]  # type: ignore[attr-defined]  # not the current one: JAX may have changed it
        current = torch.cuda.current_stream(device)
        _readers[current.device][current.cuda_stream] = current
        stream = current.cuda_stream or LEGACY_STREAM
    tensors = [torch.utils.dlpack.from_dlpack(x.__dlpack__(stream=stream)) for x in arrays]  # type: ignore[call-arg]
    if stream is not None:
        with _launch_lock:
            _lent.extend((StorageWeakRef(x.untyped_storage()), array) for x, array in zip(tensors, arrays, strict=True))
    return tensors


def _take_back() -> None:
    """Drops the lent arrays that torch has dropped."""
    with _launch_lock:
        _lent[:] = [(storage, array) for storage, array in _lent if not storage.expired()]


def forget() -> None:
    """Waits until torch has read JAX's memory, and drops what is cached about JAX's clients, before they end."""
    for device in _readers:
        torch.cuda.synchronize(device)
    _readers.clear()
    _take_back()
    _external.cache_clear()
    _quick_import.cache_clear()


# Start and end of JAX

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
NUM_SHOWN = 3  # arrays that a message names
PATIENCE = 1.0  # seconds for JAX's threads: they drop a program's operands some time after its results are ready

_started_in: int | None = None  # process id


def init(
    *, allocator: Literal["bfc", "platform", "cuda_async"] | None = None, mem_fraction: float | None = None
) -> None:
    """Starts JAX now, on the devices that PyTorch uses. Optional: the first call starts it with the defaults.

    By default JAX would take 75 % of each GPU's memory at once. Started here, it takes what it needs, and keeps it in
    its own pool.

    Args:
        allocator: "bfc" (JAX's default) pools memory and keeps it until `release`. "platform" returns each buffer to
            the driver at once, which takes the least memory and is slower. "cuda_async" is the driver's own pool. None:
            the value of ``XLA_PYTHON_CLIENT_ALLOCATOR``, else "bfc".
        mem_fraction: the largest size of JAX's pool, as a fraction of the GPU's memory in (0, 1]. None: the value of
            ``XLA_PYTHON_CLIENT_MEM_FRACTION``, else JAX's own default of 0.75.

    Raises:
        RuntimeError: JAX has already started with an allocator; or ``JAX_PLATFORMS`` keeps it from starting.
        ValueError: an argument has another value.

    Example:
        >>> import lce_torch_bridge
        >>> lce_torch_bridge.init(allocator="platform", mem_fraction=0.3)  # doctest: +SKIP
    """
    if allocator not in (None, "bfc", "platform", "cuda_async"):
        raise ValueError(f'allocator must be "bfc", "platform", "cuda_async" or None, got {allocator!r}')
    if mem_fraction is not None and not 0 < mem_fraction <= 1:
        raise ValueError(f"mem_fraction must lie in (0, 1], got {mem_fraction!r}")
    if (allocator, mem_fraction) != (None, None):
        if _has_jax_started():
            raise RuntimeError(
                "JAX has already started, with its allocator chosen: call lce_torch_bridge.init() before anything that "
                f"uses JAX, or set {ALLOCATOR} and {MEM_FRACTION} in the environment"
            )
        if allocator is not None:
            os.environ[ALLOCATOR] = allocator
        if mem_fraction is not None:
            os.environ[MEM_FRACTION] = str(mem_fraction)
    start()


def start() -> None:
    """Starts JAX if it has not started. PyTorch's current device does not change.

    Raises:
        RuntimeError: the process is a child of ``os.fork`` whose parent had started JAX; or ``JAX_PLATFORMS`` keeps it
            from starting.
    """
    global _started_in
    if _started_in == os.getpid():
        return
    if _started_in is not None:
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {_started_in} after JAX had started there, and would "
            'deadlock: start such processes with the "spawn" method (torch.multiprocessing, DataLoader: '
            'multiprocessing_context="spawn")'
        )
    os.environ.setdefault(PREALLOCATE, "false")
    devices = _devices()
    warn_of_preallocation(devices)
    atexit.register(_finish)  # exit handlers run last in, first out: this one runs before JAX's own
    _started_in = os.getpid()


def _finish() -> None:
    """Waits for the GPUs and frees lent arrays when Python exits.

    The process would abort if Python ended before JAX has freed buffers that torch has dropped. It would also abort
    while a GPU runs a program: JAX drops torch's tensors after the program, on a thread of its own.
    """
    if torch.cuda.is_initialized() and _has_jax_started():
        for device in jax.local_devices():
            if device.platform == "gpu":
                torch.cuda.synchronize(device.local_hardware_id)
    _lent.clear()
    gc.collect()


def _devices() -> list[jax.Device]:
    """Returns all devices of JAX. The first call makes the last GPU current; this restores torch's current GPU."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        return jax.devices()
    except Exception as error:  # an AssertionError without a message if no platform is found
        if not jax.config.jax_platforms:
            raise
        raise RuntimeError(f"JAX does not start; {_remedy(cuda=current is not None)}") from error
    finally:
        if current is not None:
            torch.cuda.set_device(current)


def _remedy(cuda: bool) -> str:
    """Returns advice: which platforms are chosen, and which should be. With ``cuda``, JAX is to use GPUs."""
    remedy = f'JAX_PLATFORMS is {jax.config.jax_platforms!r}: leave it unset or write "cuda,cpu"'
    if cuda:
        remedy += ', and install JAX with CUDA: in the checkout, pip install ".[cuda13]"'
    return remedy


def _has_jax_started() -> bool:
    from jax._src import xla_bridge  # no public function has this information

    return xla_bridge.backends_are_initialized()


def warn_of_preallocation(devices: list[jax.Device]) -> None:
    """Warns if JAX, started by other code, has preallocated most of a GPU's memory by default."""
    for device in devices:
        stats = device.memory_stats() if device.platform == "gpu" else None
        pool, limit = (stats or {}).get("pool_bytes", 0), (stats or {}).get("bytes_limit", 0)
        if limit and pool > limit / 2 and os.environ.get(PREALLOCATE) != "true":
            warnings.warn(
                f"JAX holds {pool / 2**30:.0f} GiB of {device}, because it was started before lce_torch_bridge: set "
                f'{PREALLOCATE}="false" in the environment, or ="true" if that is what you want',
                stacklevel=2,
            )


@contextlib.contextmanager
def enter_device(x: torch.Tensor) -> Iterator[None]:
    """Makes the device of ``x`` current in both libraries, because torch exports to JAX from its current device only.

    On a GPU, one thread at a time is inside, after memory that torch has dropped went back to JAX (see the module's
    docstring). A mesh or ``jax.disable_jit`` that the caller has set for arrays of JAX has no effect inside.

    Raises:
        RuntimeError: under CUDA graph capture, which would neither record nor replay what JAX launches.
    """
    start()  # each time: this process may be a fork
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "lce_torch_bridge cannot run under CUDA graph capture (torch.cuda.graph, cuda_graph_impl): leave the "
            "language-model head out of the captured region"
        )
    with (
        _launch_lock if x.is_cuda else contextlib.nullcontext(),
        torch.cuda.device(x.get_device()),  # -1, the CPU's, changes nothing
        jax.default_device(find_jax_device(x.device)),
        jax.disable_jit(False),
        contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(NO_MESH),
    ):
        if _lent:
            _take_back()
        yield


@functools.cache
def find_jax_device(device: torch.device) -> jax.Device:
    """Returns the JAX device with the memory of ``device``: for CPU tensors the CPU, even if JAX has a GPU.

    Raises:
        RuntimeError: JAX has no such backend, or does not see that GPU.
    """
    start()
    if device.type == "meta":  # only shapes are needed
        return jax.local_devices()[0]
    backend = "cuda" if device.type == "cuda" else "cpu"
    try:
        candidates = jax.local_devices(backend=backend)
    except RuntimeError as error:
        raise RuntimeError(
            f"{device} tensors need JAX's {backend} backend, which does not start; {_remedy(cuda=backend == 'cuda')}"
        ) from error
    if backend == "cpu":
        return candidates[0]
    index = torch.cuda.current_device() if device.index is None else device.index
    for candidate in candidates:
        if candidate.local_hardware_id == index:
            return candidate
    raise RuntimeError(
        f"JAX sees GPUs {[c.local_hardware_id for c in candidates]}, not {device}: set CUDA_VISIBLE_DEVICES before "
        "either library starts, and leave jax_cuda_visible_devices unset"
    )


def find_planning_device(device: torch.device) -> jax.Device | kernels.Device:
    """Returns the device for which programs over tensors on ``device`` are planned."""
    described = _device.describe_device(device)
    return find_jax_device(device) if described is None else described


@functools.cache
def infer_shapes(
    device: jax.Device | kernels.Device, step: Callable[..., Any], key: Any, *inputs: jax.ShapeDtypeStruct | None
) -> Any:
    """Returns the shapes of ``step(key, *inputs)``, planned for ``device``. The caller's mesh has no effect."""
    described = isinstance(device, kernels.Device)
    planned = kernels.trace_for_device(device) if described else jax.default_device(device)
    with planned, jax.sharding.use_abstract_mesh(NO_MESH.abstract_mesh):
        return jax.eval_shape(functools.partial(step, key), *inputs)


def release() -> None:
    """Gives JAX's pool of GPU memory back to the driver, for example between training and generation.

    JAX's clients end, and with them its pool and its compiled programs. The next call starts JAX again and compiles
    what it runs (``jax.config.update("jax_compilation_cache_dir", ...)`` saves programs on disk). `init` may set other
    options before that. The CUDA driver keeps about 530 MiB for the process. If JAX has not started, nothing happens.

    JAX's memory must hold no arrays: no gradients, which are in JAX's memory until they are summed or copied, and no
    JAX arrays of your own. The function waits up to a second for arrays that JAX's own threads still hold. Afterwards,
    devices and meshes of JAX that you hold cannot be used.

    Raises:
        RuntimeError: JAX's memory holds arrays, and nothing is released; something holds a client of JAX, and its pool
            remains; or the process is a child of ``os.fork`` whose parent had started JAX.

    Example:
        >>> import lce_torch_bridge
        >>> optimizer.zero_grad(set_to_none=True)  # doctest: +SKIP
        >>> lce_torch_bridge.release()  # doctest: +SKIP
    """
    global _started_in
    if not _has_jax_started():
        return
    start()  # raises in a fork
    clients = jax.extend.backend.backends()
    remaining = _find_remaining_arrays(clients)
    if remaining:
        some = ", ".join(f"{array.dtype}{list(array.shape)}" for array in remaining[:NUM_SHOWN])
        raise RuntimeError(
            f"JAX's memory still holds arrays, {some} ({len(remaining)} in all): drop them first; drop gradients "
            "of the model with optimizer.zero_grad(set_to_none=True)"
        )
    forget()
    ended = {name: weakref.ref(client) for name, client in clients.items()}
    del clients, remaining
    _started_in = None
    find_jax_device.cache_clear()
    infer_shapes.cache_clear()
    jax.extend.backend.clear_backends()
    gc.collect()
    alive = [name for name, client in ended.items() if client() is not None]
    if alive:
        raise RuntimeError(
            f"JAX's memory is not given back, because something holds its {', '.join(alive)} client: drop devices, "
            "meshes, shardings and compiled functions of JAX before release()"
        )


def _find_remaining_arrays(clients: dict[str, Any]) -> list[jax.Array]:
    """Returns the arrays in JAX's memory after its work is done and its threads have dropped their operands.

    A thread's arrays are freed by the next garbage collection.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        _take_back()
        gc.collect()
        remaining = [array for client in clients.values() for array in client.live_arrays()]
        if not remaining or time.monotonic() > deadline:
            return remaining
        jax.block_until_ready(remaining)
        del remaining
        time.sleep(0.01)
