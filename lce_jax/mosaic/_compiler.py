"""Compiles a kernel for a host other than JAX, with private names of JAX (0.11.2 to 0.12.0).

* The module lowers for CUDA without a JAX client on the GPU; JAX's default device is a CPU meanwhile.
* It calls Mosaic's compiler, a C function in the library of JAX's CUDA plugin, and launches the compiled kernel.

`why_not` says which private name is missing. JAX's own `plgpu.as_torch_kernel` is not used, because it starts a client
on the GPU to lower for the default device, and launches on the default stream.
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
from lce_jax.mosaic._host import fill_operands
from lce_jax.types import _jax
from lce_jax.types._types import Device

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = 8  # the number of threads that compile

type Bind = Callable[[int, int], Callable[[], None]]  # (handle of a stream, address of the arguments) -> launch()
type Lower = Callable[[Kernel, Device], bytes]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel for arrays of certain shapes.

    Attributes:
        name: the name of the function in `lce_jax.mosaic.common` that launches the kernel.
        function: takes the arrays, and calls the function ``name`` with them.
        arrays: the shapes and dtypes of the arrays.
        operands: the indices in ``arrays`` of the kernel's operands, in the kernel's order.
        results: the shapes and dtypes of the kernel's results.
        updated: maps a result to the operand that it updates in place.
        returned: the indices of the results that the function returns, in the order in which it returns them.
        tree: the structure of the returned results.
        launch: the function that launches the kernel, and the tree and leaves of its operands.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    operands: tuple[int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    updated: dict[int, int]
    returned: tuple[int, ...]
    tree: Any
    launch: tuple[Callable[..., Any], Any, tuple[Any, ...]]


@functools.lru_cache(maxsize=4096)
def traced(launch: Callable[..., Any], tree: Any, leaves: tuple[Any, ...]) -> Kernel:
    """Traces ``launch`` with a ``tree`` of ``leaves``, and returns its one kernel. Array leaves are shape and dtype."""
    arrays, name = tuple(x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)), launch.__name__
    trace: list[Any] = []

    def function(*arrays: Any) -> Any:
        return launch(*fill_operands(tree, leaves, arrays))

    def record(*arrays: Any) -> None:
        # Tracing needs a GPU's compute capability. Any will do, because the order of the operands is always the same.
        with _pallas.noting() as notes, _pallas.lowering_for("9.0"):
            out = function(*arrays)
        trace.extend((notes, list(map(id, arrays)), out))

    jax.eval_shape(record, *arrays)
    notes, ids, out = trace
    if len(notes) != 1:
        raise ValueError(f"{len(notes)} kernels in {name}")
    (note,), (of_function, out_tree) = notes, jax.tree.flatten(out)
    results = list(map(id, note.results))
    try:
        operands, returned = [ids.index(id(x)) for x in note.operands], [results.index(id(x)) for x in of_function]
    except ValueError:
        raise ValueError(f"{name} computes something besides its kernel") from None
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in note.results)
    updated = {result: operand for operand, result in note.updated.items()}
    of_launch = launch, tree, leaves
    return Kernel(name, function, arrays, tuple(operands), structs, updated, tuple(returned), out_tree, of_launch)


def compiled(kernels: Sequence[Kernel], device: Device, number: int, lower: Lower | None = None) -> list[Bind]:
    """Compiles kernels for the current CUDA device ``number``. Returns functions that bind them to their arguments.

    Lowering runs in Python, and takes about as long as compilation. So threads compile kernels while others are still
    lowered. Kernels with the largest arrays come first, because these are products and take longest. A kernel is never
    unloaded.

    Args:
        kernels: the kernels. Only those that are new to this process are compiled.
        device: the device that the kernels are lowered for.
        number: CUDA's number of the current device.
        lower: returns a kernel's module. If it is None, `module` does.

    Raises:
        RuntimeError: Mosaic cannot compile a kernel; the process's standard error has the reason.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if (kernel, number) not in _binds]
    if missing:
        importlib.import_module("jax.experimental.mosaic.gpu")  # this sets environment variables for the compiler
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(context))
        with ThreadPoolExecutor(COMPILERS, "lce_compiler", driver.cuCtxSetCurrent, (context,)) as pool:
            missing.sort(key=lambda each: -sum(x.size * x.dtype.itemsize for x in each.arrays))
            jobs = {each: pool.submit(_compiled, (lower or module)(each, device), number) for each in missing}
            _binds.update({(each, number): job.result() for each, job in jobs.items()})
    return [_binds[kernel, number] for kernel in kernels]


_binds: dict[tuple[Kernel, int], Bind] = {}


@functools.lru_cache(maxsize=4096)
def module(kernel: Kernel, device: Device) -> bytes:
    """Lowers a kernel to the module that Mosaic compiles."""
    with _trace_on_cpu(), _pallas.lowering_for(device.compute_capability):
        # A new function, because JAX caches traces by function, also across devices.
        traced = jax.jit(lambda *x: kernel.function(*x), keep_unused=True).trace(*kernel.arrays)
        lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    functions = [each for each in lowered.body.operations if each.operation.name == "func.func"]
    calls = [each for function in functions for each in function.regions[0].blocks[0] if _is_kernel(each)]
    if len(calls) != 1:
        raise ValueError(f"the function of one kernel has {len(calls)} kernels")
    module: bytes = calls[0].attributes["mhlo.backend_config"]["module"].value_bytes
    return module


def _is_kernel(operation: Any) -> bool:
    attributes = operation.attributes
    return "call_target_name" in attributes and attributes["call_target_name"].value.startswith("mosaic_gpu")


def _trace_on_cpu() -> contextlib.ExitStack:
    """In this context, JAX's default device is a CPU of a separate client, and functions are jitted."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.default_device(_cpu()))
    stack.enter_context(jax.disable_jit(False))
    return stack


_cpu = functools.cache(lambda: _jax.make_cpu_client().local_devices()[0])


@functools.cache
def why_not() -> str | None:
    """Says which private name this version of JAX lacks; None if none is missing."""
    try:
        with _trace_on_cpu(), _pallas.lowering_for("9.0"):
            jax.jit(lambda x: x).trace(jax.ShapeDtypeStruct((1,), "float32")).lower(lowering_platforms=("cuda",))
        _compiler()
        _takes_device()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _compiler() -> Any:
    """Opens the library of JAX's CUDA plugin without starting a client."""
    for name in PLUGINS:
        with contextlib.suppress(ImportError):
            library = ctypes.CDLL(str(importlib.import_module(name)._get_library_path()))
            library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
            library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
            return library
    raise ImportError(f"none of {', '.join(PLUGINS)} is installed, but they have the compiler of the kernels")


@functools.cache
def _takes_device() -> bool:
    """Whether a launch takes the kernel first and the device last, which it does since JAX 0.12."""
    core = importlib.import_module("jax.experimental.mosaic.gpu.core")
    if not hasattr(core, "_compile_as_torch_gpu_kernel"):
        raise AttributeError("this version of JAX launches Mosaic kernels differently")
    return bool(getattr(core, "_ABI_V2", False))


def _compiled(module: bytes, number: int) -> Bind:
    """Compiles a module, and returns its `Bind`, whose arguments are C types, because conversion takes host time."""
    addresses = _compiler().MosaicGpuCompile(module, len(module))
    if not addresses:
        raise RuntimeError("Mosaic cannot compile a kernel: standard error has the reason")
    pointer, launch = ctypes.c_void_p, ctypes.CFUNCTYPE(None)(addresses[1])
    function, kernel, device = (
        pointer(addresses[0]),
        pointer(addresses[2] if _takes_device() else None),
        ctypes.c_int(number),
    )
    if _takes_device():
        return lambda stream, at: functools.partial(launch, kernel, function, pointer(stream), pointer(at), device)
    return lambda stream, at: functools.partial(launch, function, pointer(stream), pointer(at))
