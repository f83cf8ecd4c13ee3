"""JAX in a process that belongs to PyTorch: its memory, its devices, its start and its end.

`start` starts JAX before the first call. `init` starts it earlier, with options. `release` gives JAX's memory back to
the driver, for example between training and generation: JAX's clients end, and the next call makes new ones. Importing
this module changes nothing: the environment variables that JAX reads are set when JAX starts. `enter_device` surrounds
the launch of each program; `_dlpack` says why only one thread at a time may be in it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.extend
import numpy as np
import torch

from lce_jax.run import kernels
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.through_jax import _dlpack

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
NUM_SHOWN = 3  # how many arrays a message names
PATIENCE = 1.0  # seconds to wait for JAX's threads, which drop operands some time after results are ready

_started_in: int | None = None  # the id of the process in which JAX has started


def init(
    *, allocator: Literal["bfc", "platform", "cuda_async"] | None = None, mem_fraction: float | None = None
) -> None:
    """Starts JAX now, on the devices that PyTorch uses.

    Without `init`, the first call of this package starts JAX with the defaults.

    JAX alone would allocate 75 % of each GPU's memory at once. When this package starts JAX, JAX allocates memory as it
    needs it, and keeps it in its own pool.

    Args:
        allocator: "bfc" (JAX's default) pools memory and keeps it until `release`. "platform" returns each buffer to
            the driver at once, which takes the least memory and is slower. "cuda_async" is the driver's own pool. None:
            the value of ``XLA_PYTHON_CLIENT_ALLOCATOR`` if it is set, else "bfc".
        mem_fraction: the largest size of JAX's pool, as a fraction of the GPU's memory in (0, 1]. None: the value of
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` if it is set, else JAX's default of 0.75.

    Raises:
        RuntimeError: JAX has already started, so that the allocator cannot be changed; or ``JAX_PLATFORMS`` keeps JAX
            from starting.
        ValueError: an argument has an invalid value.

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
    """Starts JAX unless it has started. PyTorch's current device does not change.

    Raises:
        RuntimeError: this process was forked from a process that had started JAX; or ``JAX_PLATFORMS`` keeps JAX from
            starting.
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
    atexit.register(_finish)  # exit handlers run in reverse order, so this one runs before JAX's own
    _started_in = os.getpid()


def _finish() -> None:
    """Waits for the GPUs and frees lent arrays when Python exits.

    The process would abort if Python ended before JAX has freed buffers that torch has dropped. It would also abort
    while a GPU runs a program, because JAX drops torch's tensors on its own thread after the program.
    """
    if torch.cuda.is_initialized() and _has_jax_started():
        for device in jax.local_devices():
            if device.platform == "gpu":
                torch.cuda.synchronize(device.local_hardware_id)
    _dlpack.lent.clear()
    gc.collect()


def _devices() -> list[jax.Device]:
    """Returns all devices of JAX. Restores torch's current GPU, because JAX's start makes the last GPU current."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        return jax.devices()
    except Exception as error:  # such as an AssertionError without a message if JAX finds no platform
        if not jax.config.jax_platforms:
            raise
        raise RuntimeError(f"JAX does not start; {_remedy(cuda=current is not None)}") from error
    finally:
        if current is not None:
            torch.cuda.set_device(current)


def _remedy(cuda: bool) -> str:
    """Returns advice on JAX_PLATFORMS. ``cuda`` says whether JAX needs a GPU."""
    remedy = f'JAX_PLATFORMS is {jax.config.jax_platforms!r}: leave it unset or write "cuda,cpu"'
    if cuda:
        remedy += ', and install JAX with CUDA: in the checkout, pip install ".[cuda13]"'
    return remedy


def _has_jax_started() -> bool:
    from jax._src import xla_bridge  # no public function has this information

    return xla_bridge.backends_are_initialized()


def warn_of_preallocation(devices: list[jax.Device]) -> None:
    """Warns if other code started JAX with its default, which preallocates most of a GPU's memory."""
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
    """Makes the device of ``x`` current in both libraries, because torch exports to JAX only from its current device.

    On a GPU, only one thread at a time can be inside this context. On entry, memory that torch has dropped goes back to
    JAX (see `_dlpack`). A mesh or ``jax.disable_jit`` that the caller has set for JAX has no effect inside.

    Raises:
        RuntimeError: a CUDA graph is captured, which would neither record nor replay what JAX launches.
    """
    start()  # on every call, because this process may be a fork
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "lce_torch_bridge cannot run under CUDA graph capture (torch.cuda.graph, cuda_graph_impl): leave the "
            "language-model head out of the captured region"
        )
    with (
        _dlpack.launch_lock if x.is_cuda else contextlib.nullcontext(),
        torch.cuda.device(x.get_device()),  # -1, the CPU's index, changes nothing
        jax.default_device(find_jax_device(x.device)),
        jax.disable_jit(False),
        contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(NO_MESH),
    ):
        if _dlpack.lent:
            _dlpack.take_back()
        yield


@functools.cache
def find_jax_device(device: torch.device) -> jax.Device:
    """Returns the JAX device that has the memory of ``device``. For CPU tensors it is the CPU, even if JAX has a GPU.

    Raises:
        RuntimeError: JAX has no such backend, or does not see this GPU.
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
    """Returns the result shapes of ``step(key, *inputs)``, planned for ``device``. The caller's mesh has no effect."""
    described = isinstance(device, kernels.Device)
    planned = kernels.trace_for_device(device) if described else jax.default_device(device)
    with planned, jax.sharding.use_abstract_mesh(NO_MESH.abstract_mesh):
        return jax.eval_shape(functools.partial(step, key), *inputs)


def release() -> None:
    """Gives JAX's pool of GPU memory back to the driver, for example between training and generation.

    JAX's clients end, and with them JAX's pool and compiled programs. The next call starts JAX again and recompiles its
    programs (``jax.config.update("jax_compilation_cache_dir", ...)`` saves programs on disk). You may call `init` with
    other options before that. The CUDA driver keeps about 530 MiB for the process. If JAX has not started, nothing
    happens.

    First drop all arrays in JAX's memory: gradients, which are in JAX's memory until they are summed or copied, and JAX
    arrays of your own. The function waits up to a second for arrays that JAX's own threads still hold. Afterwards, JAX
    devices and meshes from before cannot be used.

    Raises:
        RuntimeError: JAX's memory holds arrays, so that nothing was released; something holds a client of JAX, so that
            its pool remains; or this process was forked from a process that had started JAX.

    Example:
        >>> import lce_torch_bridge
        >>> optimizer.zero_grad(set_to_none=True)  # doctest: +SKIP
        >>> lce_torch_bridge.release()  # doctest: +SKIP
    """
    global _started_in
    if not _has_jax_started():
        return
    start()  # raises if this process is a fork
    clients = jax.extend.backend.backends()
    remaining = _find_remaining_arrays(clients)
    if remaining:
        some = ", ".join(f"{array.dtype}{list(array.shape)}" for array in remaining[:NUM_SHOWN])
        raise RuntimeError(
            f"JAX's memory still holds arrays, {some} ({len(remaining)} in all): drop them first; drop gradients "
            "of the model with optimizer.zero_grad(set_to_none=True)"
        )
    _dlpack.forget_clients()
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

    Arrays that those threads have dropped are freed by the next garbage collection.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        _dlpack.take_back()
        gc.collect()
        remaining = [array for client in clients.values() for array in client.live_arrays()]
        if not remaining or time.monotonic() > deadline:
            return remaining
        jax.block_until_ready(remaining)
        del remaining
        time.sleep(0.01)
