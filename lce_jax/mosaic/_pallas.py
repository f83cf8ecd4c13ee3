"""The kernel language, Pallas on Mosaic GPU: the one importer of its names, public and private (JAX 0.11.2, 0.12.0).

Importing it takes half a second, which only programs with a kernel should pay, and JAX before 0.11.2 lacks some of it.
So `pl` and `plgpu` import it when one of their names is first used.
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

from lce_jax.types import _jax


class Language:
    """A module of the kernel language."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """A name of it, which the first use imports."""
        return getattr(importlib.import_module(self._name), name)


pl: Any = Language("jax.experimental.pallas")
plgpu: Any = Language("jax.experimental.pallas.mosaic_gpu")

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)
_lowered_for: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("lowered_for", default=None)
TRACED_FOR = "lce_traced_for"  # metadata of a kernel's launch: a compute capability
_notes: contextvars.ContextVar[list[Note] | None] = contextvars.ContextVar("notes", default=None)


class Note(NamedTuple):
    """A kernel that was traced."""

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    updated: Mapping[int, int]  # an operand to the result in its place


@contextlib.contextmanager
def interpreting(parameters: Any) -> Iterator[None]:
    """Within it, kernels are traced for the interpreter on the CPU: ``plgpu.InterpretGPUParams``.

    A function traced outside keeps its kernels, so trace a fresh one inside.
    """
    token = _interpret.set(parameters)
    try:
        yield
    finally:
        _interpret.reset(token)


@contextlib.contextmanager
def lowering_for(compute_capability: str, unless_told: bool = False) -> Iterator[None]:
    """Within it, kernels are lowered for GPUs of this compute capability, which need not be there.

    Mosaic asks JAX's default device, and its first local device how much shared memory it has, which would start JAX on
    the GPU. So what it asks is replaced, once: from then on it answers for the context that it is called in. A kernel
    that is traced within it is lowered so later too. ``unless_told``: not inside another, nor where the default device
    is such a GPU.
    """
    answer = _answer_by_context()
    major, minor = map(int, compute_capability.split("."))
    if unless_told and (_lowered_for.get() or answer() == (major, minor)):
        yield
        return
    token = _lowered_for.set((major, minor))
    try:
        yield
    finally:
        _lowered_for.reset(token)


@functools.cache
def _answer_by_context() -> Callable[[], tuple[int, ...]]:
    """What says which GPU JAX itself would lower for."""
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
    """JAX as Mosaic's lowering sees it."""

    def __getattr__(self, name: str) -> Any:
        """A name of JAX's."""
        return getattr(jax, name)

    def local_devices(self) -> list[Any]:
        """None that is known where kernels are lowered for a device that need not be there: Mosaic takes Hopper's."""
        return [None] if _lowered_for.get() else jax.local_devices()


@contextlib.contextmanager
def noting() -> Iterator[list[Note]]:
    """The kernels that are traced within it, as they are."""
    notes: list[Note] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def kernel(body: Callable[..., None], *, updated: Mapping[int, int] | None = None, **kwargs: Any) -> Callable[..., Any]:
    """``plgpu.kernel``, whose outputs vary over every manual axis that an operand varies over.

    JAX's own are typed as replicated whatever ``out_type`` says (0.11.2, 0.12.0). Under ``check_vma=True`` a shard's
    cotangents would then be summed over the axes that split its tokens. ``updated`` maps the index of
    an operand to that of the output which updates it in place.
    """
    kwargs["interpret"] = _interpret.get()
    run = _updating_kernel(body, updated, **kwargs) if updated else plgpu.kernel(body, **kwargs)

    def typed(*operands: Any) -> Any:
        told = _lowered_for.get()
        marked = set_xla_metadata(**{TRACED_FOR: "{}.{}".format(*told)}) if told else contextlib.nullcontext()
        with jax.enable_x64(False), marked:  # the kernels count in int32, also if the caller has x64 on
            results = _jax.vary_like(run(*operands), operands)
        notes = _notes.get()
        if notes is not None:
            notes.append(Note(operands, tuple(results), updated or {}))
        return results

    return typed


def load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """Returns what ``ref`` holds, in registers of this ``layout``.

    ``plgpu.load`` with a layout would do the same by a cast, whose operand Mosaic's search for layouts has to guess.
    Each guess reduces the equations of the whole kernel again: 409 of them took 13 s in a kernel of `linear_kl`.
    """
    values = plgpu.load(ref, optimized=optimized)
    if _interpret.get() is not None:
        return values
    return _inline(_return, layout, values.shape, values.dtype, layout)(values)


def broadcast(values: Any, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
    """Returns one number per row (``dimension`` 0) or per column (1), repeated over an array of registers.

    ``layout`` is that of the result. `load` says why it is declared.
    """
    if _interpret.get() is not None:
        return jax.lax.broadcast_in_dim(values, shape, (dimension,))
    repeat = _broadcasting(shape, dimension, layout)
    return _inline(repeat, layout.reduce(1 - dimension), shape, values.dtype, layout)(values)


@functools.cache
def _inline(function: Callable[..., Any], operand: Any, shape: tuple[int, ...], dtype: Any, result: Any) -> Any:
    """Returns ``function`` of Mosaic's arrays in registers as an operation of the kernel, with declared layouts."""
    return plgpu.inline_mgpu(arg_types=(operand,), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=result))(
        function
    )


def _return(_: Any, values: Any) -> Any:
    return values


@functools.cache
def _broadcasting(shape: tuple[int, ...], dimension: int, layout: Any) -> Callable[..., Any]:
    return lambda _, values: values.broadcast_in_dim(shape, (dimension,), layout.to_mgpu())


def store(ref: Any, value: Any) -> None:
    """``ref[...] = value`` in global memory, also where lanes write parts of sectors.

    JAX 0.12 refuses that unless it is told, 0.11.2 cannot be told.
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
    """``plgpu.kernel`` with operands that are updated in place, which it has no argument for (0.11.2, 0.12.0)."""
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
