"""The collectives of a vocabulary that is split over a mesh axis, and whether its shards were given the same tokens.

One packed merge, one reduction, one gather. An axis or a process group that splits something else than the vocabulary
would give finite numbers that are wrong. So each shard says what it was given, in the collective that its statistics
take anyway:

    tags      of each token, all that it comes with but hidden: label, temperature, floor, ids
    sketches  of each token, hidden roughly: the shards may have it from kernels that round it differently
    probes    some elements of the weight

The rows in which the shards differ are NaN. All rows are, if two shards hold the same columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from lce_jax.mathematics import _statistics
from lce_jax.types import _jax

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int

type AxisName = Any  # a hashable axis name, or a tuple of them

ODD = 0x9E3779B1  # a product with an odd number loses nothing modulo 2³²
SAMPLE = 32  # elements of a hidden row that scale a sketch
LANES = 4  # elements of it that a sketch keeps, a byte each: 127 is the length of the sample
ROUNDING = 4  # the most that a lane may differ by, about a sixth of such an element: 40 roundings of bfloat16
PROBED = 8, 16  # rows and columns of a weight's probe
PIECE = 12  # bits of a tag that are summed: exact in float32 over 4096 shards


def stacked[T](tree: T, axis_name: AxisName) -> T:
    """The arrays of all shards of ``axis_name``, [N, ...] each, in one all-gather.

    Every shard then adds the same numbers in the same order, so all of them hold bitwise-equal results. Integers and
    floats travel together, by their bits.
    """
    leaves, structure = jax.tree.flatten(tree)
    widest = jnp.uint64 if any(x.dtype.itemsize == 8 for x in leaves) else jnp.uint32
    packed = jnp.concatenate(
        [lax.bitcast_convert_type(x, _words_of(x.dtype)).reshape(-1).astype(widest) for x in leaves]
    )
    every, found, first = from_all_shards(packed, axis_name), [], 0
    for x in leaves:
        words = every[:, first : first + x.size].astype(_words_of(x.dtype))
        found.append(lax.bitcast_convert_type(words, x.dtype).reshape(-1, *x.shape))
        first += x.size
    return jax.tree.unflatten(structure, found)


def _words_of(dtype: Any) -> Any:
    """Unsigned integers as wide as numbers of 32 or 64 bits."""
    return jnp.uint64 if dtype.itemsize == 8 else jnp.uint32


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


def where_it_counts(agree: Array | None, where: Array | None) -> Array | None:
    """``agree`` of rows that count: what stands in the others does not matter."""
    return agree if agree is None or where is None else agree | ~where


def nan_where_different[T](agree: Bool[Array, "*b"], tree: T) -> T:
    """Results with NaN where the shards were given different rows; their gradients are NaN there too."""
    return jax.tree.map(lambda x: x * jnp.where(_statistics.along(agree, x), 1.0, jnp.nan).astype(x.dtype), tree)


def gather_sequence(hidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """Hidden states whose dimension ``dim`` is split over ``axis_name``, whole on every shard."""
    return lax.all_gather(hidden, axis_name, axis=dim, tiled=True)


def scatter_sequence(dhidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """The transpose of `gather_sequence`: summed over the shards, each keeping its own part."""
    return lax.psum_scatter(dhidden, axis_name, scatter_dimension=dim, tiled=True)


class Said(NamedTuple):
    """What a shard says of its operands; of all shards, with one more dimension before these."""

    tags: Int[Array, "T"]
    sketches: Int[Array, "n T"]  # of n heads
    probes: Int[Array, "n rows columns"]


def tags(columns: Sequence[Array], where: Bool[Array, "*b"] | None = None) -> Int[Array, "*b"]:
    """One number for each token, equal where the bits of all columns are: shards compare it to know that tokens differ.

    ``columns``: integers or floats in the shape of tokens, the first one exactly, the others possibly with more
    dimensions. What stands in rows that do not count is the same as anything else; but if the masks differ in one row,
    all tags do. Other columns have another number, but for one in 2³² if more than one of them differs.
    """
    shape = columns[0].shape
    words = [lax.bitcast_convert_type(_bits(x), jnp.int32) for x in columns]  # two of them for a float of 64 bits
    bits = jnp.concatenate([x.reshape(*shape, math.prod(x.shape[len(shape) :])) for x in words], axis=-1)
    factors = np.arange(1, 2 * bits.shape[-1], 2, dtype=np.uint32) * np.uint32(ODD)
    found = jnp.sum(bits * factors.astype(np.int32), axis=-1, dtype=jnp.int32)
    if where is None:
        return found
    place = _mixed(jnp.arange(1, 1 + math.prod(shape), dtype=jnp.int32).reshape(shape))
    return jnp.where(where, found, 0) + jnp.sum(jnp.where(where, place, 0), dtype=jnp.int32)


def sketch(hidden: Float[Array, "T H"]) -> Int[Array, "T"]:
    """Some elements of each row, relative to the length of more of them, a byte each."""
    places = np.arange(SAMPLE) * hidden.shape[1] // SAMPLE
    sample = hidden[:, places].astype(jnp.float32)
    sample = jnp.where(jnp.isfinite(sample), sample, 0.0)
    length = jnp.sqrt(jnp.sum(jnp.square(sample), axis=1, keepdims=True))
    kept = sample[:, :: SAMPLE // LANES] / jnp.maximum(length, np.finfo(np.float32).tiny)
    return lax.bitcast_convert_type(jnp.round(127.0 * kept).astype(jnp.int8), jnp.int32)


def probe(weight: Float[Array, "V H"], vocab_dim: int, columns: Any) -> Int[Array, "rows columns"]:
    """The bits of some elements among the first ``columns`` of the vocabulary, a row for each column that is looked at.

    ``columns`` may be traced, and 0.
    """
    rows, elements = PROBED
    ids = jnp.arange(rows, dtype=jnp.int32) * columns // rows
    places = np.arange(elements) * weight.shape[1 - vocab_dim] // elements
    found = weight[places[None], ids[:, None]] if vocab_dim else weight[ids[:, None], places[None]]
    return lax.bitcast_convert_type(_bits(found), jnp.int32).reshape(rows, -1)


def agree(every: Said, ids: Int[Array, "..."], columns: int) -> Bool[Array, "T"]:
    """The tokens that all shards were given alike; none if two shards hold the same columns.

    But if a quarter of the ``ids`` lie beyond what the shards then hold, ``columns`` each, it is a large vocabulary of
    which some shards are equal.
    """
    same = jnp.all(every.tags == every.tags[:1], axis=0)
    lanes = lax.bitcast_convert_type(every.sketches, jnp.int8).astype(jnp.int32)  # [N, n, T, lanes]
    near = jnp.all(jnp.abs(lanes - lanes[:1]) <= ROUNDING, axis=(0, 1, 3))
    # Columns that are all equal, such as those of zeros, may be so on every shard.
    vary = jnp.any(every.probes != every.probes[:, :, :1], axis=(2, 3))  # [N, n]
    equal = jnp.all(every.probes[:, None] == every.probes[None], axis=(3, 4))  # [N, N, n]
    before = np.tri(len(every.probes), k=-1, dtype=bool)[:, :, None]
    again = jnp.any(equal & before, axis=1) & vary
    held = (len(every.probes) - jnp.max(jnp.sum(again, axis=0, dtype=jnp.int32))) * columns
    known, beyond = (jnp.sum(ids >= first, dtype=jnp.int32) for first in (0, held))
    return same & near & (~jnp.any(again) | ((known > 0) & (4 * beyond >= known)))


def differences(tags: Int[Array, "*b"], shard: int | Int[Array, ""], shards: int) -> Float[Array, "*b 2"]:
    """A shard's part of a sum that tells whether all shards have the same tags: for a collective that adds.

    ``shard`` is one of at most 4096. The sums over the shards are exactly 0 if all tags are equal. If not, they are
    both 0 in one of 2²⁴ cases.
    """
    bits = _mixed(tags)
    pieces = jnp.stack([bits >> 32 - PIECE, bits >> 8], axis=-1) & (1 << PIECE) - 1
    return pieces.astype(jnp.float32) * jnp.where(shard == 0, shards - 1.0, -1.0)


def _mixed(x: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """A permutation of the 32-bit numbers that keeps no sum and no difference."""
    x = lax.bitcast_convert_type(x, jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return lax.bitcast_convert_type(x, jnp.int32)
