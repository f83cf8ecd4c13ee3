"""The private names of JAX that a launch without XLA needs, in one place (JAX 0.11.2 to 0.12.0).

* Lowering for CUDA without a client of JAX's on the GPU: a client for the CPU stands in where JAX asks for a device.
* Mosaic's compiler, a C function of the library in JAX's CUDA plugin, and how its result is launched.

`why_not` says which of them is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from lce_jax import _chosen, _dispatch
from lce_jax._types import Device
from lce_jax.launch._refusal import UnservedError

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_lock = threading.Lock()
_lowering = threading.local()
ir: Any = None  # MLIR for Python; None where JAX has it no more
hlo: Any = None
passmanager: Any = None
with contextlib.suppress(ImportError, AttributeError):
    _mlir: Any = importlib.import_module("jax._src.lib").mlir
    ir, passmanager, hlo = _mlir.ir, _mlir.passmanager, importlib.import_module("jax._src.lib.mlir.dialects").hlo


def lower(function: Callable[..., Any], operands: Sequence[Any], device: Device) -> tuple[Any, list[Any]]:
    """The StableHLO module of ``function`` for ``device``, calls inlined, and the shapes of its results.

    Nothing is asked of the GPU: neither a client of JAX's nor a context of CUDA's is made.
    """
    with _stand_in(), _dispatch.for_device(device):
        # A fresh function, not jitted inside: JAX remembers traces by function, also those for another device.
        plain = inspect.unwrap(function)
        traced = jax.jit(lambda *x: plain(*x), keep_unused=True).trace(*operands)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mosaic().dialect.register_inliner_extensions(module.context)
        passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})").run(module.operation)
    return module, jax.tree.leaves(traced.out_info)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Inside, this thread's lowering finds a CPU where JAX looks for its first device, and starts no other client."""
    original = jax.local_devices
    device = _cpu()

    def local_devices(*args: Any, **kwargs: Any) -> list[Any]:
        return [device] if getattr(_lowering, "active", False) else original(*args, **kwargs)

    with _lock, jax.default_device(device):
        jax.local_devices = local_devices
        _lowering.active, token = True, _chosen.at_once.set(True)
        try:
            yield
        finally:
            _lowering.active = False
            _chosen.at_once.reset(token)
            jax.local_devices = original


@functools.cache
def _cpu() -> Any:
    from jax._src import xla_bridge

    return xla_bridge.make_cpu_client().local_devices()[0]


def mosaic() -> Any:
    """The package, which takes a while to import."""
    return importlib.import_module("jax.experimental.mosaic.gpu")


@functools.cache
def why_not() -> str | None:
    """Which private name this version of JAX lacks; None if all are there."""
    try:
        if hlo is None:
            raise UnservedError("jax._src.lib.mlir, MLIR for Python, is not where it was")
        lower(lambda x: x, [jax.ShapeDtypeStruct((1,), "float32")], Device())
        _compiler()
        _takes_device()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _compiler() -> Any:
    """The library of JAX's CUDA plugin, opened without making a client."""
    for name in PLUGINS:
        with contextlib.suppress(ImportError):
            library = ctypes.CDLL(str(importlib.import_module(name)._get_library_path()))
            library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
            library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
            return library
    raise UnservedError(f"none of {', '.join(PLUGINS)} is installed, which hold the compiler of the kernels")


@functools.cache
def _takes_device() -> bool:
    """Whether a compiled kernel is launched with itself first and the device last, as from JAX 0.12 on."""
    from jax.experimental.mosaic.gpu import core

    if not hasattr(core, "_compile_as_torch_gpu_kernel"):
        raise UnservedError("JAX launches Mosaic kernels in another way than it did")
    return bool(getattr(core, "_ABI_V2", False))


type Step = Callable[[int, int], Callable[[], None]]  # (stream, where the addresses are) -> launch()


def compile_kernel(module: bytes, device: int) -> Step:
    """What makes launches of a Mosaic kernel on the current CUDA device, whose number is ``device``.

    It is given the addresses of operands and results. All arguments are C's already: it costs the host time to convert
    them. The kernel is never unloaded.

    Raises:
        RuntimeError: Mosaic does not compile it; the reason is in the process's standard error.
    """
    mosaic()  # sets what the compiler reads from the environment
    with _lock:
        compiled = _compiler().MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic did not compile a kernel; standard error says why")
    pointer, launch = ctypes.c_void_p, ctypes.CFUNCTYPE(None)(compiled[1])
    function, kernel = pointer(compiled[0]), pointer(compiled[2] if _takes_device() else None)
    if _takes_device():
        number = ctypes.c_int(device)
        return lambda stream, at: functools.partial(launch, kernel, function, pointer(stream), pointer(at), number)
    return lambda stream, at: functools.partial(launch, function, pointer(stream), pointer(at))
