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

from lce_jax import _devices, _jax, mosaic
from lce_jax._types import Device, UnsupportedError
from lce_jax.mesh._custom_partitioning import warn_once


def by_platform(
    on_gpu: Callable[..., Any], elsewhere: Callable[..., Any] | None, *operands: Any, device: Device
) -> Any:
    """``on_gpu(*operands)`` where the program is lowered for GPUs as ``device`` is, else ``elsewhere(*operands)``.

    ``elsewhere`` returns the same arrays up to their dtypes. If it is None, lowering for another platform, or for GPUs
    of another compute capability, raises `UnsupportedError`.
    """
    flat, tree = jax.tree.leaves(operands), _structure(operands)
    kernels, shapes = jax.make_jaxpr(lambda *flat: on_gpu(*tree.unflatten(flat)), return_shape=True)(*flat)

    def as_on_gpu(*flat: Any) -> Any:
        assert elsewhere is not None
        results = jax.tree.map(lambda shape, x: x.astype(shape.dtype), shapes, elsewhere(*tree.unflatten(flat)))
        return _jax.vary_like(results, flat)

    other = None if elsewhere is None else jax.make_jaxpr(as_on_gpu)(*flat)

    bind = jax.custom_batching.sequential_vmap(
        lambda *flat: _by_platform_p.bind(*flat, on_gpu=kernels, elsewhere=other, device=device)
    )

    return _structure(shapes).unflatten(bind(*flat))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


_by_platform_p = Primitive("lce_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_abstract_eval(lambda *_, on_gpu, **__: on_gpu.out_avals)
_by_platform_p.def_impl(lambda *operands, **given: jax.jit(lambda *x: _by_platform_p.bind(*x, **given))(*operands))


def _lower_kernels(context: Any, *operands: Any, on_gpu: Any, elsewhere: Any, device: Device) -> Any:
    chosen, advice = on_gpu, "call it under jax.set_mesh(mesh), with a mesh of the devices that it is for"
    backend = context.module_context.backend
    there = device if backend is None or backend.platform == "cpu" else _devices.of(backend.devices()[0])
    if device.compute_capability and device.compute_capability != there.compute_capability:
        message = f"a program that is traced for {device.kind} is lowered for {there.kind}"
        if elsewhere is None:
            raise UnsupportedError(f"{message}, and the kernels were asked for by name: {advice}")
        warn_once(f"{message}, without kernels: {advice}")
        chosen = elsewhere
    elif (count := getattr(context.module_context.axis_context, "num_devices", 1)) > 1:
        warn_once(
            f"each of {count} devices will run the kernels of the whole call, whose split they do not see: {advice}"
        )
    with mosaic.lowering_for(there):
        return mlir.lower_fun(jaxpr_as_fun(chosen), multiple_results=True)(context, *operands)


def _lower_elsewhere(context: Any, *operands: Any, on_gpu: Any, elsewhere: Any, device: Device) -> Any:
    del on_gpu, device
    if elsewhere is None:
        platforms = ", ".join(context.module_context.platforms)
        raise UnsupportedError(
            f"the kernels for NVIDIA GPUs were asked for by name, and the program is lowered for {platforms}: leave "
            'implementation out, or give implementation=("mosaic_gpu", "xla")'
        )
    return mlir.lower_fun(jaxpr_as_fun(elsewhere), multiple_results=True)(context, *operands)


mlir.register_lowering(_by_platform_p, _lower_elsewhere)
mlir.register_lowering(_by_platform_p, _lower_kernels, platform="cuda")
