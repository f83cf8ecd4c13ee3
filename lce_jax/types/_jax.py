"""Names of JAX that a release may move or rename (except the kernel language), and helpers for types of manual axes.

Only three modules read private names of JAX: this one, `lce_jax.mosaic._pallas`, and `lce_jax.mosaic._compiler`, which
opens JAX's plugin. JAX 0.11.2 and 0.12.0.1 have all of these names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config
from jax._src.core import mapped_aval, unmapped_aval
from jax._src.dispatch import prim_requires_devices_during_lowering as prim_requires_devices_during_lowering
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.xla_bridge import make_cpu_client as make_cpu_client
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import mlir as mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def decode_spec(sharding: Any, mesh: Any) -> P:
    """Converts a sharding that XLA's compiler returns, which has no axis names, to a spec over ``mesh``."""
    return P(*parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0])


def list_devices(sharding: Any) -> np.ndarray[Any, Any]:
    """Returns the devices of a sharding that XLA's compiler returns, in the sharding's order."""
    return np.array(sharding._device_assignment)


def list_axes(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns ``axes`` (None, a mesh axis or several) as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def find_platform(device: Any) -> str:
    """Returns the platform of a mesh's ``AbstractDevice``.

    Before JAX 0.11 an ``AbstractDevice`` has no field for the platform. Then the name of the device's kind decides.
    """
    platform = getattr(device, "platform", None)
    if platform is not None:
        return platform
    kind = device.device_kind
    return "cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu"


def abstract_device(platform: str, kind: str, cores: int | None) -> Any:
    """Returns a description of a device for an ``AbstractMesh``. The machine need not have such a device."""
    fields: dict[str, Any] = {"device_kind": kind, "num_cores": cores, "platform": platform}
    names = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}
    return jax.sharding.AbstractDevice(**{name: value for name, value in fields.items() if name in names})


def partitions(spec: P) -> tuple[Any, ...]:
    """Returns the entries of ``spec``: the mesh axes of each dimension. Before JAX 0.11 a spec is itself a sequence."""
    return tuple(getattr(spec, "partitions", spec))


def varying_axes(tree: Any) -> frozenset[Any]:
    """Returns the manual mesh axes over which the type of some leaf varies. Empty under ``check_vma=False``."""
    return frozenset[Any]().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def tracks_varying(axis_name: Any) -> bool:
    """Whether the enclosing ``shard_map`` tracks types over ``axis_name`` (``check_vma=True``)."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def vary_like[T](tree: T, like: Any) -> T:
    """Makes the type of ``tree`` vary over every axis that a leaf of ``like`` varies over. Loop carries need this."""
    return vary_over(tree, varying_axes(like))


def vary_over[T](tree: T, axes: frozenset[Any]) -> T:
    """Makes the type of ``tree`` vary over ``axes``."""
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varying_axes(x)), to="varying"), tree)


def is_traced() -> bool:
    """Whether the caller is being traced into a program: under ``jit``, but not under ``grad`` or ``vmap`` alone."""
    return isinstance(_zero(), jax.core.Tracer)


_zero = jax.jit(lambda: jnp.zeros(()))


def has_explicit_axes(x: Any) -> bool:
    """Whether results computed from ``x`` have a mesh with Explicit axes in their type.

    That mesh is the one in the type of ``x``, even if no axis splits ``x``, or the mesh of ``jax.set_mesh``.
    """
    meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    return any(AxisType.Explicit in (mesh.axis_types or ()) for mesh in meshes)


def drop_reduced_axes(x: jax.Array) -> jax.Array:
    """Returns ``x`` without reduced axes in its type (``P(..., reduced={...})``), which request an unsummed gradient.

    Inside ``shard_map``, the result varies over these axes instead. Outside, the result's sharding does not name these
    axes. In both cases the transpose gives the gradient the type that ``x`` requests.
    """
    aval = jax.typeof(x)
    if aval.mat.reduced:
        return lax.pcast(x, tuple(sorted(aval.mat.reduced, key=str)), to="varying")
    if aval.sharding.spec.reduced:
        return jax.sharding.reshard(x, aval.sharding.update(spec=P(*partitions(aval.sharding.spec))))
    return x


def gather_dims(x: jax.Array, *dims: int) -> jax.Array:
    """Gathers ``x`` over the Explicit axes that split ``dims`` (negative indices), as a concatenation requires."""
    entries = partitions(jax.typeof(x).sharding.spec)
    gathered = (*(None if dim - x.ndim in dims else axes for dim, axes in enumerate(entries)),)
    return x if gathered == entries else jax.sharding.reshard(x, jax.typeof(x).sharding.update(spec=P(*gathered)))


def split_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Splits ``x`` over Explicit axes in the same way as the first dimensions of ``like``.

    Elementwise operations require this. ``like`` has at least as many dimensions as ``x``.
    """
    sharding = jax.typeof(like).sharding
    spec = P(*partitions(sharding.spec)[: x.ndim])
    if sharding.mesh.empty or partitions(jax.typeof(x).sharding.spec) == partitions(spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def psum_to_axes(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Sums a gradient over the axes over which its type varies, except ``axes``, over which the operand varies too."""
    extra = tuple(sorted(varying_axes(x) - axes, key=str))
    return lax.psum(x, extra) if extra else x


def primal_arrays(primals: Any) -> Any:
    """Returns the arrays in the primals that the forward rule of a ``custom_vjp`` with ``symbolic_zeros`` receives."""
    return jax.tree.map(lambda x: x.value, primals)


def cotangent_arrays(tree: Any) -> Any:
    """Returns the cotangents that a ``custom_vjp`` with ``symbolic_zeros`` receives. Symbolic zeros become arrays."""
    return jax.tree.map(lambda x: ad.instantiate_zeros(ad.Zero(x.aval)) if isinstance(x, SymbolicZero) else x, tree)


def example_type(size: int, batched: bool, x: Any) -> Any:
    """Returns the type of one example of ``x``. If ``x`` is batched, its first dimension has ``size`` examples."""
    return mapped_aval(size, 0, jax.typeof(x)) if batched else jax.typeof(x)


def make_batch_zeros(size: int, aval: Any) -> jax.Array:
    """Returns zeros for a batch of ``size`` examples of the type ``aval``."""
    zeros: jax.Array = ad.instantiate_zeros(ad.Zero(unmapped_aval(size, 0, aval)))
    return zeros


check_vma: Any = config._check_vma  # a context manager that turns types of varying axes on or off
_SECOND_DERIVATIVE = (
    "lce_jax computes first derivatives only, and this is a derivative of a gradient (grad of grad, jvp of grad, "
    "hessian). Differentiate plain JAX code that stores the logits instead"
)


def not_differentiable[**P, R](function: Callable[P, R], message: str = _SECOND_DERIVATIVE) -> Callable[P, R]:
    """Returns ``function`` with a derivative that raises an error with ``message`` once something uses the derivative.

    The default ``message`` refuses second derivatives. The derivative must not raise before it is used, because inside
    a gradient JAX also differentiates operands of ``stop_gradient`` and auxiliary results, and drops those derivatives.
    """
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        out = guarded(*primals)
        float_tangents = [x for x in jax.tree.leaves(tangents) if x.dtype != jax.dtypes.float0]
        flat, tree = jax.tree.flatten(out)
        avals = tuple(jax.typeof(x) for x in flat if jnp.issubdtype(x.dtype, jnp.inexact))
        float_derivatives = iter(_derivative_p.bind(*float_tangents, avals=avals, message=message))
        derivatives = [
            next(float_derivatives) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
            for x in flat
        ]
        return out, jax.tree.unflatten(tree, derivatives)

    return functools.wraps(function)(guarded)


# An unsupported derivative. It is a linear primitive, as JAX requires, and raises once it is evaluated, lowered or
# transposed.
_derivative_p = Primitive("lce_refused_derivative")
_derivative_p.multiple_results = True
_derivative_p.def_abstract_eval(lambda *_, avals, **__: list(avals))


def _refuse_derivative(*_: Any, message: str, **__: Any) -> Any:
    raise NotImplementedError(message)


def _transpose_derivative(cotangents: Any, *tangents: Any, message: str, **_: Any) -> Any:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(tangents)
    return _refuse_derivative(message=message)


def _batch_derivative(tangents: Any, dims: Any, *, avals: Any, message: str) -> Any:
    size = next(x.shape[dim] for x, dim in zip(tangents, dims, strict=True) if dim is not None)
    avals = tuple(aval.update(shape=(size, *aval.shape)) for aval in avals)
    return _derivative_p.bind(*tangents, avals=avals, message=message), [0] * len(avals)


_derivative_p.def_impl(_refuse_derivative)
mlir.register_lowering(_derivative_p, _refuse_derivative)
ad.primitive_jvps[_derivative_p] = _refuse_derivative
ad.primitive_transposes[_derivative_p] = _transpose_derivative
batching.primitive_batchers[_derivative_p] = _batch_derivative


# Two identities: `only_in_reverse` wraps a value, and `_tangent_p` its tangent. Lowering removes `only_in_reverse`, so
# compiled programs do not contain it. Reverse mode transposes `_tangent_p`. Forward mode evaluates, lowers or batches
# it, which raises an error that names the function, unlike JAX's own error for a ``custom_vjp``. The name is an
# argument: ``only_in_reverse.bind(x, function="linear_logprobs")``.
only_in_reverse, _tangent_p = Primitive("lce_only_in_reverse"), Primitive("lce_tangent_in_reverse")


def _refuse_forward_mode(*_: Any, function: str, **__: Any) -> Any:
    raise NotImplementedError(
        f"{function} has first derivatives in reverse mode (jax.grad, jax.vjp, jax.jacrev), but not in forward mode "
        "(jax.jvp, jax.linearize, jax.jacfwd). Take the derivative of a scalar along a direction as the inner product "
        "of its jax.grad with that direction"
    )


only_in_reverse.def_impl(lambda x, **_: x)
only_in_reverse.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(only_in_reverse, lambda _, x, **__: [x])
batching.defvectorized(only_in_reverse)
ad.primitive_jvps[only_in_reverse] = lambda primals, tangents, **function: (
    primals[0],
    tangents[0] if type(tangents[0]) is ad.Zero else _tangent_p.bind(tangents[0], **function),
)
_tangent_p.def_impl(_refuse_forward_mode)
_tangent_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_tangent_p, _refuse_forward_mode)
batching.primitive_batchers[_tangent_p] = _refuse_forward_mode
ad.primitive_jvps[_tangent_p] = _refuse_forward_mode
ad.primitive_transposes[_tangent_p] = lambda cotangent, *_, **__: [cotangent]
