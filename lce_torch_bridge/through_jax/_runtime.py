"""JAX in a process that belongs to PyTorch: its memory, its devices, its start and its end.

`start` runs once, before the first call; `init` runs it earlier, with choices. Importing this module changes nothing:
the environment variables that JAX reads are set when it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
import torch

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())

_started_in: int | None = None  # process id


def init(
    *, allocator: Literal["bfc", "platform", "cuda_async"] | None = None, mem_fraction: float | None = None
) -> None:
    """Starts JAX now, beside PyTorch on the same devices. Optional: the first call starts it with the defaults.

    By itself JAX would take 75 % of each GPU at once. Here it takes what it needs, and keeps it in its own pool.

    Args:
        allocator: "bfc" (JAX's default) pools memory and keeps it until `release`. "platform" returns each
            buffer to the driver at once: the least memory, and slower. "cuda_async" is the driver's own pool. None:
            what ``XLA_PYTHON_CLIENT_ALLOCATOR`` says, else "bfc".
        mem_fraction: the most that JAX's pool may grow to, as a share of the GPU in (0, 1]. None: what
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says, else JAX's own default of 0.75.

    Raises:
        RuntimeError: JAX has already started, with its allocator chosen; or ``JAX_PLATFORMS`` keeps it from starting.
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
        if _jax_has_started():
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
    """Starts JAX if it has not started, and leaves PyTorch's current device as it was.

    Raises:
        RuntimeError: in a child of ``os.fork`` whose parent had started it; or ``JAX_PLATFORMS`` keeps it from
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
    atexit.register(_finish)  # exit handlers run last in, first out: this one runs before JAX's own
    _started_in = os.getpid()


def _finish() -> None:
    """At exit. A process aborts if Python ends while JAX has yet to free buffers that torch has dropped.

    Or while a GPU still runs a program: JAX gives up torch's tensors after it, on a thread of its own.
    """
    if torch.cuda.is_initialized() and _jax_has_started():
        for device in jax.local_devices():
            if device.platform == "gpu":
                torch.cuda.synchronize(device.local_hardware_id)
    gc.collect()


def _devices() -> list[jax.Device]:
    """All devices of JAX. The first call opens every visible GPU and makes the last one current: put back."""
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
    """Which platforms are chosen, and which should be. ``cuda``: JAX is to use GPUs."""
    remedy = f'JAX_PLATFORMS is {jax.config.jax_platforms!r}: leave it unset or write "cuda,cpu"'
    if cuda:
        remedy += ', and install JAX with CUDA: pip install "lce-jax[cuda13]", or cuda12'
    return remedy


def _jax_has_started() -> bool:
    from jax._src import xla_bridge  # no public function tells

    return xla_bridge.backends_are_initialized()


def forget() -> None:
    """After JAX's clients have ended: the next call starts it again."""
    global _started_in
    _started_in = None
    jax_device.cache_clear()


def warn_of_preallocation(devices: list[jax.Device]) -> None:
    """Warns if JAX, started by other code, has preallocated most of a GPU without being told to."""
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
def beside(x: torch.Tensor) -> Iterator[None]:
    """Makes the device of ``x`` current in both libraries: torch exports to JAX from its current device only.

    What the caller has set for arrays of JAX does not reach torch's tensors: a mesh, ``jax.disable_jit``.

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
        torch.cuda.device(x.get_device()),  # -1, the CPU's, changes nothing
        jax.default_device(jax_device(x.device)),
        jax.disable_jit(False),
        contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(NO_MESH),
    ):
        yield


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """The JAX device with the memory of ``device``: for CPU tensors the CPU, even beside a GPU.

    Raises:
        RuntimeError: JAX has no such backend, or does not see that GPU.
    """
    start()
    if device.type == "meta":  # only shapes are asked for
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
