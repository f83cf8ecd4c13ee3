"""Kernels that need a GPU, and what replaces them elsewhere: chosen at lowering, when the platform is known.

What ``jit`` traces may be lowered for any platform, whatever JAX's default device is: for the CPU if that holds the
operands, or for several platforms at once by ``jax.export``. (`jax.lax.platform_dependent` would put a conditional
around the kernels.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from lce_jax import _compat
from lce_jax._types import UnsupportedError


def by_platform(on_gpu: Callable[..., Any], elsewhere: Callable[..., Any] | None, *operands: Any) -> Any:
    """``on_gpu(*operands)`` where the program is lowered for CUDA, else ``elsewhere(*operands)``.

    ``elsewhere`` returns the same arrays up to their dtypes. If it is None, lowering for another platform raises
    `UnsupportedError`.
    """
    flat, tree = jax.tree.leaves(operands), _structure(operands)
    kernels, shapes = jax.make_jaxpr(lambda *flat: on_gpu(*tree.unflatten(flat)), return_shape=True)(*flat)

    def as_on_gpu(*flat: Any) -> Any:
        assert elsewhere is not None
        results = jax.tree.map(lambda shape, x: x.astype(shape.dtype), shapes, elsewhere(*tree.unflatten(flat)))
        return _compat.vary_like(results, flat)

    other = None if elsewhere is None else jax.make_jaxpr(as_on_gpu)(*flat)

    bind = jax.custom_batching.sequential_vmap(
        lambda *flat: _by_platform_p.bind(*flat, on_gpu=kernels, elsewhere=other)
    )

    return _structure(shapes).unflatten(bind(*flat))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


_by_platform_p = Primitive("lce_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_abstract_eval(lambda *_, on_gpu, **__: on_gpu.out_avals)
_by_platform_p.def_impl(lambda *operands, **jaxprs: jax.jit(lambda *x: _by_platform_p.bind(*x, **jaxprs))(*operands))


def _lower_kernels(context: Any, *operands: Any, on_gpu: Any, elsewhere: Any) -> Any:
    del elsewhere
    return mlir.lower_fun(jaxpr_as_fun(on_gpu), multiple_results=True)(context, *operands)


def _lower_elsewhere(context: Any, *operands: Any, on_gpu: Any, elsewhere: Any) -> Any:
    del on_gpu
    if elsewhere is None:
        platforms = ", ".join(context.module_context.platforms)
        raise UnsupportedError(
            f"the kernels for NVIDIA GPUs were asked for by name, and the program is lowered for {platforms}: leave "
            'implementation out, or give implementation=("mosaic_gpu", "xla")'
        )
    return mlir.lower_fun(jaxpr_as_fun(elsewhere), multiple_results=True)(context, *operands)


mlir.register_lowering(_by_platform_p, _lower_elsewhere)
mlir.register_lowering(_by_platform_p, _lower_kernels, platform="cuda")
