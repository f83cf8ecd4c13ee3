"""What JAX may move or rename (except the kernel language), and the few idioms that its manual-axis types need.

Private names are read here, in `lce_jax.mosaic._pallas` and in `lce_jax.mosaic._compiler`, which opens JAX's plugin.
All are in JAX 0.11.2 and 0.12.0.1.
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


def spec_of(sharding: Any, mesh: Any) -> P:
    """How a compiler's sharding splits an array over ``mesh``."""
    return P(*parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0])


def devices_of(sharding: Any) -> np.ndarray[Any, Any]:
    """The devices of a compiler's sharding, in its order."""
    return np.array(sharding._device_assignment)


def as_axes(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes in ``axes``: none, one or several."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def platform_of(described: Any) -> str:
    """The platform of a mesh's ``AbstractDevice``. Before JAX 0.11 it has no such field, and its name has to tell."""
    known = getattr(described, "platform", None)
    if known is not None:
        return known
    kind = described.device_kind
    return "cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu"


def abstract_device(platform: str, kind: str, cores: int | None) -> Any:
    """A device that need not be there, for an ``AbstractMesh``."""
    fields: dict[str, Any] = {"device_kind": kind, "num_cores": cores, "platform": platform}
    known = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}
    return jax.sharding.AbstractDevice(**{name: value for name, value in fields.items() if name in known})


def partitions(spec: P) -> tuple[Any, ...]:
    """The mesh axes of each dimension that ``spec`` names. Before JAX 0.11 a spec is itself such a sequence."""
    return tuple(getattr(spec, "partitions", spec))


def varying_axes(tree: Any) -> frozenset[Any]:
    """The manual mesh axes over which some leaf's type says that it may differ. Empty under ``check_vma=False``."""
    return frozenset[Any]().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def tracks_varying(axis_name: Any) -> bool:
    """Whether the enclosing ``shard_map`` tracks types over ``axis_name`` (``check_vma=True``)."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def vary_like[T](tree: T, like: Any) -> T:
    """``tree`` typed as varying over every axis that a leaf of ``like`` varies over: what a loop's carry must be."""
    return vary_over(tree, varying_axes(like))


def vary_over[T](tree: T, axes: frozenset[Any]) -> T:
    """``tree`` typed as varying over ``axes``."""
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varying_axes(x)), to="varying"), tree)


def is_traced() -> bool:
    """Whether what runs here becomes part of a program: under ``jit``, not under ``grad`` or ``vmap`` alone."""
    return isinstance(_nothing(), jax.core.Tracer)


_nothing = jax.jit(lambda: jnp.zeros(()))


def has_explicit_axes(x: Any) -> bool:
    """Whether what is made of ``x`` has a mesh in its type with axes that types split arrays over.

    Its own mesh, also where no axis splits ``x``, or that of ``jax.set_mesh``.
    """
    meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    return any(AxisType.Explicit in (mesh.axis_types or ()) for mesh in meshes)


def without_reduced(x: jax.Array) -> jax.Array:
    """``x`` without the axes over which its type asks for a gradient that is not summed (``P(..., reduced={...})``).

    Inside ``shard_map`` it varies over them instead; outside, its sharding just leaves them out. Either way the
    transpose gives the gradient the type that ``x`` asks for.
    """
    kind = jax.typeof(x)
    if kind.mat.reduced:
        return lax.pcast(x, tuple(sorted(kind.mat.reduced, key=str)), to="varying")
    if kind.sharding.spec.reduced:
        return jax.sharding.reshard(x, kind.sharding.update(spec=P(*partitions(kind.sharding.spec))))
    return x


def whole(x: jax.Array, *dims: int) -> jax.Array:
    """``x`` with no Explicit axis over ``dims``, counted from the last one: types of concatenations want it."""
    split = partitions(jax.typeof(x).sharding.spec)
    own = (*(None if dim - x.ndim in dims else axes for dim, axes in enumerate(split)),)
    return x if own == split else jax.sharding.reshard(x, jax.typeof(x).sharding.update(spec=P(*own)))


def split_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` split over Explicit axes as the first dimensions of ``like`` are: types of elementwise operations want it.

    ``like`` has at least as many dimensions.
    """
    sharding = jax.typeof(like).sharding
    spec = P(*partitions(sharding.spec)[: x.ndim])
    if sharding.mesh.empty or partitions(jax.typeof(x).sharding.spec) == partitions(spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def psum_to_axes(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """``x`` summed over the axes it varies over, except ``axes``: the cotangent of a value that varies over these."""
    extra = tuple(sorted(varying_axes(x) - axes, key=str))
    return lax.psum(x, extra) if extra else x


def values(primals: Any) -> Any:
    """The arrays among what the forward rule of a ``custom_vjp`` with ``symbolic_zeros`` is given."""
    return jax.tree.map(lambda x: x.value, primals)


def cotangents(given: Any) -> Any:
    """What its backward rule is given, as arrays."""
    return jax.tree.map(lambda x: ad.instantiate_zeros(ad.Zero(x.aval)) if isinstance(x, SymbolicZero) else x, given)


def of_one(size: int, batched: bool, x: Any) -> Any:
    """The type of an example of ``x``, the first dimension of which is the batch if it has one."""
    return mapped_aval(size, 0, jax.typeof(x)) if batched else jax.typeof(x)


def zeros_of_batch(size: int, aval: Any) -> jax.Array:
    """Zeros for each example."""
    zeros: jax.Array = ad.instantiate_zeros(ad.Zero(unmapped_aval(size, 0, aval)))
    return zeros


check_vma: Any = config._check_vma  # a context: whether types say over which axes arrays vary
_SECOND_DERIVATIVE = (
    "lce_jax computes first derivatives only, and this is a derivative of a gradient (grad of grad, jvp of grad, "
    "hessian): differentiate plain JAX code that stores the logits instead"
)


def not_differentiable[**P, R](function: Callable[P, R], message: str = _SECOND_DERIVATIVE) -> Callable[P, R]:
    """``function`` with a derivative that raises ``message`` if its result is used: by default that of a gradient.

    It must not raise earlier: JAX also differentiates what stands under ``stop_gradient``, or is an auxiliary result,
    inside a gradient, and drops that derivative.
    """
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        out = guarded(*primals)
        given = [x for x in jax.tree.leaves(tangents) if x.dtype != jax.dtypes.float0]
        flat, tree = jax.tree.flatten(out)
        avals = tuple(jax.typeof(x) for x in flat if jnp.issubdtype(x.dtype, jnp.inexact))
        of_floats = iter(_derivative_p.bind(*given, avals=avals, message=message))
        of_out = [
            next(of_floats) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
            for x in flat
        ]
        return out, jax.tree.unflatten(tree, of_out)

    return functools.wraps(function)(guarded)


# A derivative that there is not: linear, as JAX wants it, and refused once it is evaluated, lowered or transposed.
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


# Two identities: of a value, which no compiled program has, and of its tangent. The second is transposed, in reverse
# mode; in forward mode it is evaluated, lowered or batched, and refused. (JAX's own error, that of a ``custom_vjp``,
# names no function.) Give ``function=``, its name: ``only_in_reverse.bind(x, function="linear_logprobs")``.
only_in_reverse, _tangent_p = Primitive("lce_only_in_reverse"), Primitive("lce_tangent_in_reverse")


def _refuse_forward_mode(*_: Any, function: str, **__: Any) -> Any:
    raise NotImplementedError(
        f"{function} has first derivatives in reverse mode (jax.grad, jax.vjp, jax.jacrev), and this is one in forward "
        "mode (jax.jvp, jax.linearize, jax.jacfwd): the derivative of a scalar along a direction is the inner product "
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
