"""A kernel, compiled for a host other than JAX, and the private names of JAX that this needs (JAX 0.11.2 to 0.12.0).

* Lowering for CUDA without a client of JAX's on the GPU: its default device is a CPU then.
* Mosaic's compiler, a C function of the library in JAX's CUDA plugin, and how its result is launched.

`why_not` says which of them is missing. JAX's own `plgpu.as_torch_kernel` lowers for its default device, which starts a
client on the GPU, and launches on the default stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from lce_jax.mosaic import _pallas
from lce_jax.types import _jax
from lce_jax.types._types import Device

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = 8  # threads

type Bind = Callable[[int, int], Callable[[], None]]  # (the handle of a stream, where the addresses are) -> launch()


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel for arrays of certain shapes.

    Attributes:
        name: that of the function in `lce_jax.mosaic.common` which launches it.
        function: what is given the arrays and calls that.
        arrays: their shapes and dtypes.
        operands: which of the arrays the kernel is given, in its order.
        results: the shapes and dtypes of its results.
        updated: a result to the operand in whose place it is.
        returned: which of its results the function returns, in order.
        tree: their structure.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    operands: tuple[int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    updated: dict[int, int]
    returned: tuple[int, ...]
    tree: Any


@functools.lru_cache(maxsize=4096)
def traced(launch: Callable[..., Any], tree: Any, leaves: tuple[Any, ...]) -> Kernel:
    """The kernel that ``launch`` launches, given a tree of these leaves, of which the arrays are shapes and dtypes."""
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    arrays, name = tuple(leaves[place] for place in places), launch.__name__
    found: list[Any] = []

    def function(*arrays: Any) -> Any:
        given = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        return launch(*jax.tree.unflatten(tree, given))

    def noted(*arrays: Any) -> None:
        # A pipeline asks for which GPU. For any, the operands have the same order.
        with _pallas.noting() as notes, _pallas.lowering_for("9.0"):
            out = function(*arrays)
        found.extend((notes, list(map(id, arrays)), out))

    jax.eval_shape(noted, *arrays)
    notes, given, out = found
    if len(notes) != 1:
        raise ValueError(f"{len(notes)} kernels in {name}")
    (note,), (of_function, out_tree) = notes, jax.tree.flatten(out)
    results = list(map(id, note.results))
    try:
        operands, returned = [given.index(id(x)) for x in note.operands], [results.index(id(x)) for x in of_function]
    except ValueError:
        raise ValueError(f"what stands beside the kernel in {name}") from None
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in note.results)
    updated = {result: operand for operand, result in note.updated.items()}
    return Kernel(name, function, arrays, tuple(operands), structs, updated, tuple(returned), out_tree)


def compiled(kernels: Sequence[Kernel], device: Device, number: int) -> list[Bind]:
    """What binds each kernel to the addresses of its operands and results, on the current CUDA device ``number``.

    Lowering is Python's work, and takes about as long as compiling. So threads compile what is lowered already, those
    on the largest arrays first: they hold the products, and take longest. A kernel is never unloaded.

    Raises:
        RuntimeError: Mosaic does not compile one; the reason is in the process's standard error.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if (kernel, number) not in _binds]
    if missing:
        importlib.import_module("jax.experimental.mosaic.gpu")  # sets what the compiler reads from the environment
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(context))
        with ThreadPoolExecutor(COMPILERS, "lce_compiler", driver.cuCtxSetCurrent, (context,)) as pool:
            missing.sort(key=lambda each: -sum(x.size * x.dtype.itemsize for x in each.arrays))
            jobs = {each: pool.submit(_compiled, module(each, device), number) for each in missing}
            _binds.update({(each, number): job.result() for each, job in jobs.items()})
    return [_binds[kernel, number] for kernel in kernels]


_binds: dict[tuple[Kernel, int], Bind] = {}


@functools.lru_cache(maxsize=4096)
def module(kernel: Kernel, device: Device) -> bytes:
    """The kernel as Mosaic compiles it."""
    with _on_cpu(), _pallas.lowering_for(device.compute_capability):
        # A fresh function: JAX remembers traces by function, also those for another device.
        traced = jax.jit(lambda *x: kernel.function(*x), keep_unused=True).trace(*kernel.arrays)
        lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    functions = [each for each in lowered.body.operations if each.operation.name == "func.func"]
    calls = [each for function in functions for each in function.regions[0].blocks[0] if _is_kernel(each)]
    if len(calls) != 1:
        raise ValueError(f"{len(calls)} kernels in a function of one")
    found: bytes = calls[0].attributes["mhlo.backend_config"]["module"].value_bytes
    return found


def _is_kernel(operation: Any) -> bool:
    attributes = operation.attributes
    return "call_target_name" in attributes and attributes["call_target_name"].value.startswith("mosaic_gpu")


def _on_cpu() -> contextlib.ExitStack:
    """Inside, JAX's default device is a CPU of a client of its own, and functions are compiled."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.default_device(_cpu()))
    stack.enter_context(jax.disable_jit(False))
    return stack


_cpu = functools.cache(lambda: _jax.make_cpu_client().local_devices()[0])


@functools.cache
def why_not() -> str | None:
    """Which private name this version of JAX lacks; None if all are there."""
    try:
        with _on_cpu(), _pallas.lowering_for("9.0"):
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
    raise ImportError(f"none of {', '.join(PLUGINS)} is installed, which hold the compiler of the kernels")


@functools.cache
def _takes_device() -> bool:
    """Whether a compiled kernel is launched with itself first and the device last, as from JAX 0.12 on."""
    core = importlib.import_module("jax.experimental.mosaic.gpu.core")
    if not hasattr(core, "_compile_as_torch_gpu_kernel"):
        raise AttributeError("JAX launches Mosaic kernels in another way than it did")
    return bool(getattr(core, "_ABI_V2", False))


def _compiled(module: bytes, number: int) -> Bind:
    """What makes launches of a kernel, whose arguments are C's already: it costs the host time to convert them."""
    found = _compiler().MosaicGpuCompile(module, len(module))
    if not found:
        raise RuntimeError("Mosaic did not compile a kernel; standard error says why")
    pointer, launch = ctypes.c_void_p, ctypes.CFUNCTYPE(None)(found[1])
    function, kernel, device = pointer(found[0]), pointer(found[2] if _takes_device() else None), ctypes.c_int(number)
    if _takes_device():
        return lambda stream, at: functools.partial(launch, kernel, function, pointer(stream), pointer(at), device)
    return lambda stream, at: functools.partial(launch, function, pointer(stream), pointer(at))
