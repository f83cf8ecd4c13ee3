"""The collectives of a vocabulary that is split over a mesh axis: one packed merge, one reduction, one gather."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from lce_jax import _jax
from lce_jax.mathematics import _statistics

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float

type AxisName = Any  # a hashable axis name, or a tuple of them


def stacked[T](tree: T, axis_name: AxisName) -> T:
    """The arrays of all shards of ``axis_name``, [N, ...] each, in one all-gather.

    Every shard then adds the same numbers in the same order, so all of them hold bitwise-equal results.
    """
    packed, unpack = ravel_pytree(tree)
    return jax.vmap(unpack)(from_all_shards(packed, axis_name))


def from_all_shards(x: Array, axis_name: AxisName) -> Array:
    """``x`` of each shard of ``axis_name``, stacked, and typed as the same on every shard."""
    return lax.all_gather(x, axis_name, to="invarying" if _jax.tracks_varying(axis_name) else "varying")


def total_cotangent[T](cotangent: T, axis_name: AxisName) -> T:
    """The cotangent of outputs that every shard of ``axis_name`` holds, in one collective.

    Under ``check_vma=True`` the types already make it the same on every shard. Under ``check_vma=False`` each shard
    has the derivative through its own copy, and by JAX's convention (that of ``psum``'s transpose) these are summed.
    """
    if _jax.tracks_varying(axis_name):
        return cotangent
    packed, unpack = ravel_pytree(cotangent)
    return unpack(lax.psum(packed, axis_name))


def same_on_all_shards[T](tree: T, leading: int, axis_name: AxisName) -> tuple[T, Bool[Array, "*b"] | None]:
    """Arrays typed as equal on every shard of ``axis_name``, and the rows in which they really are.

    The rows are their first ``leading`` dimensions.

    They may be typed as varying although every shard holds the same: ``lax.all_gather`` does so by default. Varying
    operands would make the results varying, and gradients would be as many times larger as there are shards. The rows
    are None if no type varies, as without ``check_vma``. Each shard's own copy has its part of a gradient.
    """
    agree = []

    def same(x: Array) -> Array:
        axes = tuple(name for name in _jax.as_axes(axis_name) if name in _jax.varying_axes(x))
        if not axes:
            return x
        bits = _bits(lax.stop_gradient(x))  # so that a NaN that every shard holds is the same
        highest, lowest = lax.pmax(bits, axes), lax.pmin(bits, axes)
        agree.append(jnp.all(highest == lowest, axis=tuple(range(leading, bits.ndim))))
        equal = _of_bits(highest, x.dtype)
        return _with_parts_of_gradient(axes, equal, x) if jnp.issubdtype(x.dtype, jnp.inexact) else equal

    tree = jax.tree.map(same, tree)
    return tree, functools.reduce(jnp.logical_and, agree) if agree else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_parts_of_gradient(axes: tuple[Any, ...], equal: Array, x: Array) -> Array:
    """``equal``, whose gradient each shard's own copy ``x`` has a part of, as ``lax.pmean(x, axes)`` would."""
    del axes, x
    return equal


@_with_parts_of_gradient.defjvp
def _derivative(axes: tuple[Any, ...], primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    return primals[0], lax.pmean(tangents[1], axes)


def _bits(x: Array) -> Array:
    """``x`` as integers of 32 bits or more, which every backend reduces; a complex number as two."""
    if jnp.iscomplexobj(x):
        return _bits(jnp.stack([x.real, x.imag], axis=-1))
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def _of_bits(bits: Array, dtype: Any) -> Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _of_bits(bits, jnp.finfo(dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(bits.astype(f"uint{jnp.finfo(dtype).bits}"), dtype)
    return bits.astype(dtype)


def both(agree: Array | None, also: Array | None) -> Array | None:
    """Where two results of `same_on_all_shards` agree."""
    return also if agree is None else agree if also is None else agree & also


def nan_where_different[T](agree: Bool[Array, "*b"], tree: T) -> T:
    """Results with NaN where `same_on_all_shards` found that the shards were given different rows."""
    return jax.tree.map(lambda x: jnp.where(_statistics.along(agree, x), x, jnp.nan), tree)


def gather_sequence(hidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """Hidden states whose dimension ``dim`` is split over ``axis_name``, whole on every shard."""
    return lax.all_gather(hidden, axis_name, axis=dim, tiled=True)


def scatter_sequence(dhidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """The transpose of `gather_sequence`: summed over the shards, each keeping its own part."""
    return lax.psum_scatter(dhidden, axis_name, scatter_dimension=dim, tiled=True)
