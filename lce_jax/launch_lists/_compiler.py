"""A kernel of a list, compiled, and the private names of JAX that this needs (JAX 0.11.2 to 0.12.0).

* Lowering for CUDA without a client of JAX's on the GPU: a client for the CPU stands in where JAX asks for a device.
* Mosaic's compiler, a C function of the library in JAX's CUDA plugin, and how its result is launched.

`why_not` says which of them is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from lce_jax import _dispatch
from lce_jax import mosaic as implementation
from lce_jax._types import Device
from lce_jax.launch_lists import _driver
from lce_jax.launch_lists._recorder import Kernel
from lce_jax.launch_lists._refusal import UnservedError

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = 8  # threads

type Step = Callable[[int, int], Callable[[], None]]  # (stream, where the addresses are) -> launch()

_lock = threading.Lock()
_lowering = threading.local()


def compiled(kernels: Sequence[Kernel], device: Device, number: int) -> list[Step]:
    """What makes launches of each kernel on the current CUDA device, whose number is ``number``.

    Lowering is Python's work, and takes about as long as compiling. So threads compile what is lowered already, those
    on the largest arrays first: they hold the products, and take longest.

    Raises:
        RuntimeError: Mosaic does not compile one; the reason is in the process's standard error.
    """
    mosaic()  # sets what the compiler reads from the environment
    context = _driver.current_context()

    def compile_there(module: bytes) -> Step:
        _driver.enter(context)
        return _compiled(module, number)

    with ThreadPoolExecutor(COMPILERS, "lce_compiler") as pool:
        longest_first = sorted(kernels, key=lambda each: -sum(x.size * x.dtype.itemsize for x in each.arrays))
        jobs = {each: pool.submit(compile_there, module(each, device)) for each in longest_first}
        return [jobs[each].result() for each in kernels]


@functools.lru_cache(maxsize=4096)
def module(kernel: Kernel, device: Device) -> bytes:
    """The kernel as Mosaic compiles it."""
    with _stand_in(), _dispatch.for_device(device), implementation.lowering_for(device):
        # A fresh function: JAX remembers traces by function, also those for another device.
        traced = jax.jit(lambda *x: kernel.function(*x), keep_unused=True).trace(*kernel.arrays)
        lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    functions = [each for each in lowered.body.operations if each.operation.name == "func.func"]
    calls = [each for function in functions for each in function.regions[0].blocks[0] if _is_kernel(each)]
    if len(calls) != 1:
        raise UnservedError(f"{len(calls)} kernels in a function of one")
    found: bytes = calls[0].attributes["mhlo.backend_config"]["module"].value_bytes
    return found


def _is_kernel(operation: Any) -> bool:
    attributes = operation.attributes
    return "call_target_name" in attributes and attributes["call_target_name"].value.startswith("mosaic_gpu")


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Inside, this thread's lowering finds a CPU where JAX looks for its first device, and starts no other client."""
    original = jax.local_devices
    device = _cpu()

    def local_devices(*args: Any, **kwargs: Any) -> list[Any]:
        return [device] if getattr(_lowering, "active", False) else original(*args, **kwargs)

    with _lock, jax.default_device(device), jax.disable_jit(False):
        jax.local_devices = local_devices
        _lowering.active = True
        try:
            yield
        finally:
            _lowering.active = False
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
        with _stand_in():
            jax.jit(lambda x: x).trace(jax.ShapeDtypeStruct((1,), "float32")).lower(lowering_platforms=("cuda",))
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
    core = importlib.import_module("jax.experimental.mosaic.gpu.core")
    if not hasattr(core, "_compile_as_torch_gpu_kernel"):
        raise UnservedError("JAX launches Mosaic kernels in another way than it did")
    return bool(getattr(core, "_ABI_V2", False))


@functools.cache
def _compiled(module: bytes, number: int) -> Step:
    """What makes launches of a kernel, which is never unloaded.

    It is given the addresses of operands and results. All arguments are C's already: it costs the host time to convert
    them.
    """
    found = _compiler().MosaicGpuCompile(module, len(module))
    if not found:
        raise RuntimeError("Mosaic did not compile a kernel; standard error says why")
    pointer, launch = ctypes.c_void_p, ctypes.CFUNCTYPE(None)(found[1])
    function, kernel = pointer(found[0]), pointer(found[2] if _takes_device() else None)
    if _takes_device():
        device = ctypes.c_int(number)
        return lambda stream, at: functools.partial(launch, kernel, function, pointer(stream), pointer(at), device)
    return lambda stream, at: functools.partial(launch, function, pointer(stream), pointer(at))
