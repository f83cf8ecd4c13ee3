"""The kernel language, Pallas on Mosaic GPU. Only this module imports its names (JAX 0.11.2, 0.12.0).

The import takes half a second, which only programs with a kernel should pay, and JAX before 0.11.2 lacks some names. So
`pl` and `plgpu` import it at the first use of a name.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from lce_jax.mosaic._equal_variables import group_without_sorting
from lce_jax.types import _jax


class Language:
    """A module of the kernel language, imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Returns a name of the module."""
        return getattr(importlib.import_module(self._name), name)


pl: Any = Language("jax.experimental.pallas")
plgpu: Any = Language("jax.experimental.pallas.mosaic_gpu")

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)
_lowered_for: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("lowered_for", default=None)
TRACED_FOR = "lce_traced_for"  # metadata of a kernel's launch: the compute capability that it is traced for
_notes: contextvars.ContextVar[list[Note] | None] = contextvars.ContextVar("notes", default=None)


class Note(NamedTuple):
    """A traced kernel."""

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    updated: Mapping[int, int]  # maps an operand to the result that updates it in place


@contextlib.contextmanager
def interpreting(parameters: Any) -> Iterator[None]:
    """In this context, kernels are traced for the interpreter on the CPU, with ``plgpu.InterpretGPUParams``.

    A function that was traced before keeps its kernels, so trace a new function in the context.
    """
    token = _interpret.set(parameters)
    try:
        yield
    finally:
        _interpret.reset(token)


@contextlib.contextmanager
def lowering_for(compute_capability: str, as_default: bool = False) -> Iterator[None]:
    """In this context, kernels are lowered for GPUs of this compute capability, which may be absent.

    Mosaic asks JAX's default device for its architecture, and the first local device for its shared memory. That would
    start a JAX client on the GPU, so the functions that Mosaic asks are replaced, once, by ones that answer by context.
    A kernel that is traced in the context is lowered for this capability even after the context. With ``as_default``,
    an outer context has precedence, and a default device of this capability needs no replacement.
    """
    answer = _answer_by_context()
    major, minor = map(int, compute_capability.split("."))
    if as_default and (_lowered_for.get() or answer() == (major, minor)):
        yield
        return
    token = _lowered_for.set((major, minor))
    try:
        yield
    finally:
        _lowered_for.reset(token)


@functools.cache
def _answer_by_context() -> Callable[[], tuple[int, ...]]:
    """Replaces, once per process, the functions that tell Mosaic the GPU, so that they answer by `lowering_for`.

    Returns the original function, which says for which GPU JAX itself would lower.
    """
    core: Any = importlib.import_module("jax.experimental.mosaic.gpu.core")
    utils: Any = importlib.import_module("jax.experimental.mosaic.gpu.utils")
    infer_arch: Callable[[], tuple[int, ...]] = utils._infer_arch
    utils._infer_arch = lambda: _lowered_for.get() or infer_arch()
    core.jax = _Jax()
    registration: Any = importlib.import_module("jax._src.pallas.mosaic_gpu.pallas_call_registration")
    lower = registration.mpmd_map_mgpu_lowering_rule

    def lower_as_traced(context: Any, *nodes: Any, **params: Any) -> Any:
        traced_for = (getattr(context.jaxpr_eqn_ctx, "xla_metadata", None) or {}).get(TRACED_FOR)
        with lowering_for(traced_for) if traced_for else contextlib.nullcontext():
            return lower(context, *nodes, **params)

    registration.mpmd_map_mgpu_lowering_rule = lower_as_traced
    return infer_arch


class _Jax:
    """The module ``jax`` as Mosaic's lowering sees it."""

    def __getattr__(self, name: str) -> Any:
        """Returns a name of JAX."""
        return getattr(jax, name)

    def local_devices(self) -> list[Any]:
        """Returns an unknown device inside `lowering_for`. Mosaic then assumes the shared memory of Hopper."""
        return [None] if _lowered_for.get() else jax.local_devices()


def read_context() -> tuple[Any, ...]:
    """Returns what besides its operands decides how a kernel is traced.

    Inside `noting`, each result differs from all others, so that no trace is reused and every kernel is noted.
    """
    return _interpret.get(), _lowered_for.get(), None if _notes.get() is None else object()


@contextlib.contextmanager
def noting() -> Iterator[list[Note]]:
    """Yields a list of the kernels that are traced in this context."""
    notes: list[Note] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def kernel(body: Callable[..., None], *, updated: Mapping[int, int] | None = None, **kwargs: Any) -> Callable[..., Any]:
    """Makes a ``plgpu.kernel`` whose outputs vary over each manual axis over which an operand varies.

    The outputs of ``plgpu.kernel`` are always typed as replicated (JAX 0.11.2, 0.12.0). Under ``check_vma=True`` a
    shard's cotangents would then be summed over the axes that split its tokens. ``updated`` maps the index of an
    operand to the index of the output that updates the operand in place.
    """
    group_without_sorting()
    kwargs["interpret"] = _interpret.get()
    run = _updating_kernel(body, updated, **kwargs) if updated else plgpu.kernel(body, **kwargs)

    def typed(*operands: Any) -> Any:
        capability = _lowered_for.get()
        marked = (
            set_xla_metadata(**{TRACED_FOR: "{}.{}".format(*capability)}) if capability else contextlib.nullcontext()
        )
        with jax.enable_x64(False), marked:  # kernels count in int32, even if the caller enables x64
            results = _jax.vary_like(run(*operands), operands)
        notes = _notes.get()
        if notes is not None:
            notes.append(Note(operands, tuple(results), updated or {}))
        return results

    return typed


def load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """Returns what ``ref`` holds, in registers of this ``layout``.

    ``plgpu.load`` with a layout would do the same by a cast, and Mosaic would have to guess the layout of the cast's
    operand. After each guess, it reduces the equations of the whole kernel again: 409 guesses took 13 s in a kernel of
    `linear_kl`.
    """
    values = plgpu.load(ref, optimized=optimized)
    if _interpret.get() is not None:
        return values
    return _inline(_return, layout, values.shape, values.dtype, layout)(values)


def broadcast(values: Any, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
    """Returns one number per row (``dimension`` 0) or per column (1), repeated over an array of registers.

    ``layout`` is that of the result. It is declared because Mosaic would take long to guess it.
    """
    if _interpret.get() is not None:
        return jax.lax.broadcast_in_dim(values, shape, (dimension,))
    repeat = _broadcasting(shape, dimension, layout)
    return _inline(repeat, layout.reduce(1 - dimension), shape, values.dtype, layout)(values)


@functools.cache
def _inline(function: Callable[..., Any], operand: Any, shape: tuple[int, ...], dtype: Any, result: Any) -> Any:
    """Makes ``function``, of Mosaic's arrays in registers, an operation of the kernel, with declared layouts."""
    return plgpu.inline_mgpu(arg_types=(operand,), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=result))(
        function
    )


def _return(_: Any, values: Any) -> Any:
    return values


@functools.cache
def _broadcasting(shape: tuple[int, ...], dimension: int, layout: Any) -> Callable[..., Any]:
    return lambda _, values: values.broadcast_in_dim(shape, (dimension,), layout.to_mgpu())


def store(ref: Any, value: Any) -> None:
    """Stores ``value`` in global memory, even if a warp's lanes write only parts of 32-byte sectors.

    JAX 0.12 refuses such stores without ``optimized=False``, an argument that JAX 0.11.2 does not have.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _updating_kernel(
    body: Callable[..., None],
    updated: Mapping[int, int],
    out_type: Any,
    compiler_params: Any,
    interpret: Any,
    kernel_name: str,
    **mesh: Any,
) -> Callable[..., Any]:
    """Makes a kernel that updates operands in place, for which ``plgpu.kernel`` has no argument (0.11.2, 0.12.0)."""
    from jax._src.pallas import mpmd

    def run(*operands: Any) -> Any:
        with _jax.check_vma(False):
            return mpmd._mpmd_map(
                [(plgpu.Mesh(kernel_name=kernel_name, **mesh), body)],
                out_type,
                input_output_aliases=dict(updated),
                compiler_params=compiler_params,
                interpret=interpret or False,
                name=kernel_name,
            )(*operands)

    return jax.custom_batching.sequential_vmap(run)
