"""Collectives over the mesh axis that splits the vocabulary, and checks that all shards have the same tokens.

An axis or a process group that splits something other than the vocabulary would make results finite but wrong. So each
shard adds a summary of its operands to the collective that merges the statistics:

    tags      one integer per token, from everything except hidden: label, temperature, floor, ids
    sketches  a rough copy of hidden per token, because kernels of different shards may round hidden differently
    probes    some elements of the weight

Rows in which the shards differ become NaN. If two shards hold the same columns, all rows become NaN.
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

ODD = 0x9E3779B1  # a factor in tags; it is odd, so a product modulo 2³² loses no information
SAMPLE = 32  # a row's sketch is scaled by the norm of this many elements, a sample of the row
LANES = 4  # how many elements of this sample a sketch keeps, a byte each; the byte 127 stands for the sample's norm
ROUNDING = 4  # the largest difference of bytes that counts as rounding: a sixth of a usual byte, 40 bfloat16 roundings
PROBED = 8, 16  # the rows and columns of a probe of the weight
PIECE = 12  # a sum takes this many bits of a tag, so that a float32 sum over 4096 shards is exact


def gather_trees[T](tree: T, axis_name: AxisName) -> T:
    """Gathers a tree of arrays from all shards of ``axis_name`` in one all-gather. Each array becomes [N, ...].

    Every shard can then add the same numbers in the same order, so the results of all shards are bitwise equal. The
    bits of integers and floats are packed into one array.
    """
    leaves, structure = jax.tree.flatten(tree)
    widest = jnp.uint64 if any(x.dtype.itemsize == 8 for x in leaves) else jnp.uint32
    packed = jnp.concatenate(
        [lax.bitcast_convert_type(x, _unsigned_dtype(x.dtype)).reshape(-1).astype(widest) for x in leaves]
    )
    gathered, unpacked, first = gather_shards(packed, axis_name), [], 0
    for x in leaves:
        words = gathered[:, first : first + x.size].astype(_unsigned_dtype(x.dtype))
        unpacked.append(lax.bitcast_convert_type(words, x.dtype).reshape(-1, *x.shape))
        first += x.size
    return jax.tree.unflatten(structure, unpacked)


def _unsigned_dtype(dtype: Any) -> Any:
    """Returns the dtype of unsigned integers as wide as ``dtype``, which has 32 or 64 bits."""
    return jnp.uint64 if dtype.itemsize == 8 else jnp.uint32


def gather_shards(x: Array, axis_name: AxisName) -> Array:
    """Gathers and stacks the ``x`` of each shard of ``axis_name``. The result is typed as equal on every shard."""
    return lax.all_gather(x, axis_name, to="invarying" if _jax.tracks_varying(axis_name) else "varying")


def sum_cotangents[T](cotangent: T, axis_name: AxisName) -> T:
    """Sums the cotangents of outputs that are replicated over ``axis_name``, in one collective.

    Under ``check_vma=True`` there is nothing to sum, because the types already make the cotangent equal on every shard.
    Under ``check_vma=False`` each shard has the derivative through its own copy. By JAX's convention, as in the
    transpose of ``psum``, these derivatives are summed.
    """
    if _jax.tracks_varying(axis_name):
        return cotangent
    packed, unpack = ravel_pytree(cotangent)
    return unpack(lax.psum(packed, axis_name))


def equalize_shards[T](tree: T, leading: int, axis_name: AxisName) -> tuple[T, Bool[Array, "*b"] | None]:
    """Returns the arrays typed as equal on every shard of ``axis_name``, and in which rows they really are equal.

    Rows are the first ``leading`` dimensions of the arrays. The second result is None if no array's type varies, for
    example without ``check_vma``.

    Arrays may be typed as varying although all shards hold the same values: ``lax.all_gather`` types its result like
    this by default. Such operands would make the results vary, and multiply gradients by the number of shards. Here,
    the shards' copies share the gradient.
    """
    agreements = []

    def equalize(x: Array) -> Array:
        axes = tuple(name for name in _jax.list_axes(axis_name) if name in _jax.varying_axes(x))
        if not axes:
            return x
        bits = _to_bits(lax.stop_gradient(x))  # bits, so that a NaN that every shard holds counts as equal
        highest, lowest = lax.pmax(bits, axes), lax.pmin(bits, axes)
        agreements.append(jnp.all(highest == lowest, axis=tuple(range(leading, bits.ndim))))
        equal = _from_bits(highest, x.dtype)
        return _share_gradient(axes, equal, x) if jnp.issubdtype(x.dtype, jnp.inexact) else equal

    tree = jax.tree.map(equalize, tree)
    return tree, functools.reduce(jnp.logical_and, agreements) if agreements else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _share_gradient(axes: tuple[Any, ...], equal: Array, x: Array) -> Array:
    """Returns ``equal``, with the gradient of ``lax.pmean(x, axes)``: the shards' ``x`` share it."""
    del axes, x
    return equal


@_share_gradient.defjvp
def _derivative(axes: tuple[Any, ...], primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    return primals[0], lax.pmean(tangents[1], axes)


def _to_bits(x: Array) -> Array:
    """Returns ``x`` as integers of at least 32 bits, which every backend can reduce.

    A complex number becomes two integers.
    """
    if jnp.iscomplexobj(x):
        return _to_bits(jnp.stack([x.real, x.imag], axis=-1))
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def _from_bits(bits: Array, dtype: Any) -> Array:
    """Inverts `_to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _from_bits(bits, jnp.finfo(dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(bits.astype(f"uint{jnp.finfo(dtype).bits}"), dtype)
    return bits.astype(dtype)


def join_agreement(first: Array | None, second: Array | None) -> Array | None:
    """Joins two agreements that `equalize_shards` returned: True where both are. None: nothing was compared."""
    return second if first is None else first if second is None else first & second


def ignore_masked_rows(agree: Array | None, where: Array | None) -> Array | None:
    """Sets ``agree`` to True in masked rows, because their operands do not matter."""
    return agree if agree is None or where is None else agree | ~where


def set_nan_where_different[T](agree: Bool[Array, "*b"], tree: T) -> T:
    """Sets results to NaN in rows in which the shards differ. Gradients of these rows become NaN too."""
    return jax.tree.map(lambda x: x * jnp.where(_statistics.expand_like(agree, x), 1.0, jnp.nan).astype(x.dtype), tree)


def gather_sequence(hidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """Gathers hidden states whose dimension ``dim`` is split over ``axis_name``.

    The result is replicated over this axis.
    """
    return lax.all_gather(hidden, axis_name, axis=dim, tiled=True)


def scatter_sequence(dhidden: Float[Array, "*b H"], axis_name: AxisName, dim: int) -> Float[Array, "*b H"]:
    """Transposes `gather_sequence`: sums dhidden over the shards, and returns this shard's part."""
    return lax.psum_scatter(dhidden, axis_name, scatter_dimension=dim, tiled=True)


class ShardSummary(NamedTuple):
    """A summary of one shard's operands; or the summaries of all shards, stacked along a leading dimension."""

    tags: Int[Array, "T"]
    sketches: Int[Array, "n T"]  # n: the number of heads
    probes: Int[Array, "n rows columns"]


def compute_tags(columns: Sequence[Array], where: Bool[Array, "*b"] | None = None) -> Int[Array, "*b"]:
    """Returns one integer per token. Shards compare these tags to find tokens that differ.

    Two tags are equal if all columns have equal bits. If exactly one column differs, the tags differ. If several
    columns differ, the tags are equal with a probability of 2⁻³². The values in masked rows do not matter, but if the
    masks differ in any row, all tags differ.

    ``columns`` are arrays of integers or floats. The first has exactly the shape of the tokens; the others may have
    further trailing dimensions.
    """
    shape = columns[0].shape
    words = [lax.bitcast_convert_type(_to_bits(x), jnp.int32) for x in columns]  # a 64-bit float becomes two words
    bits = jnp.concatenate([x.reshape(*shape, math.prod(x.shape[len(shape) :])) for x in words], axis=-1)
    factors = np.arange(1, 2 * bits.shape[-1], 2, dtype=np.uint32) * np.uint32(ODD)
    sums = jnp.sum(bits * factors.astype(np.int32), axis=-1, dtype=jnp.int32)
    if where is None:
        return sums
    rows = _permute_bits(jnp.arange(1, 1 + math.prod(shape), dtype=jnp.int32).reshape(shape))
    return jnp.where(where, sums, 0) + jnp.sum(jnp.where(where, rows, 0), dtype=jnp.int32)


def sketch(hidden: Float[Array, "T H"]) -> Int[Array, "T"]:
    """Returns a rough copy of each row, as one integer.

    The bytes of this integer are `LANES` elements, relative to the norm of `SAMPLE` elements.
    """
    indices = np.arange(SAMPLE) * hidden.shape[1] // SAMPLE
    sample = hidden[:, indices].astype(jnp.float32)
    sample = jnp.where(jnp.isfinite(sample), sample, 0.0)
    norm = jnp.sqrt(jnp.sum(jnp.square(sample), axis=1, keepdims=True))
    lanes = sample[:, :: SAMPLE // LANES] / jnp.maximum(norm, np.finfo(np.float32).tiny)
    return lax.bitcast_convert_type(jnp.round(127.0 * lanes).astype(jnp.int8), jnp.int32)


def probe(weight: Float[Array, "V H"], vocab_dim: int, columns: Any) -> Int[Array, "rows columns"]:
    """Returns the bits of some elements of the weight, one row for each probed vocabulary column.

    The probed columns are among the first ``columns``, a count that may be traced and may be 0.
    """
    rows, elements = PROBED
    ids = jnp.arange(rows, dtype=jnp.int32) * columns // rows
    indices = np.arange(elements) * weight.shape[1 - vocab_dim] // elements
    sample = weight[indices[None], ids[:, None]] if vocab_dim else weight[ids[:, None], indices[None]]
    return lax.bitcast_convert_type(_to_bits(sample), jnp.int32).reshape(rows, -1)


def compare_summaries(every: ShardSummary, ids: Int[Array, "..."], columns: int) -> Bool[Array, "T"]:
    """Returns which tokens are equal on all shards. If two shards hold the same columns of the weight, no token is.

    There is one exception: a large vocabulary may really have shards with equal columns. The ``ids`` show this: at
    least a quarter of them lie outside the vocabulary that the distinct shards alone would form. ``columns`` is the
    number of columns of each shard.
    """
    same = jnp.all(every.tags == every.tags[:1], axis=0)
    lanes = lax.bitcast_convert_type(every.sketches, jnp.int8).astype(jnp.int32)  # [N, n, T, lanes]
    near = jnp.all(jnp.abs(lanes - lanes[:1]) <= ROUNDING, axis=(0, 1, 3))
    # A probe whose columns are all equal, such as zeros, proves nothing: different shards may really have equal ones.
    vary = jnp.any(every.probes != every.probes[:, :, :1], axis=(2, 3))  # [N, n]
    equal = jnp.all(every.probes[:, None] == every.probes[None], axis=(3, 4))  # [N, N, n]
    earlier = np.tri(len(every.probes), k=-1, dtype=bool)[:, :, None]
    repeated = jnp.any(equal & earlier, axis=1) & vary
    distinct_columns = (len(every.probes) - jnp.max(jnp.sum(repeated, axis=0, dtype=jnp.int32))) * columns
    known, outside = (jnp.sum(ids >= first, dtype=jnp.int32) for first in (0, distinct_columns))
    return same & near & (~jnp.any(repeated) | ((known > 0) & (4 * outside >= known)))


def difference_terms(tags: Int[Array, "*b"], shard: int | Int[Array, ""], shards: int) -> Float[Array, "*b 2"]:
    """Returns a shard's terms of two sums over the shards, which show whether all shards have the same tags.

    Both sums, over at most 4096 shards, are exactly 0 if all tags are equal. If tags differ, both are 0 in one of 2²⁴
    cases.
    """
    bits = _permute_bits(tags)
    pieces = jnp.stack([bits >> 32 - PIECE, bits >> 8], axis=-1) & (1 << PIECE) - 1
    return pieces.astype(jnp.float32) * jnp.where(shard == 0, shards - 1.0, -1.0)


def _permute_bits(x: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Permutes the 32-bit integers, so that sums and differences are not preserved."""
    x = lax.bitcast_convert_type(x, jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return lax.bitcast_convert_type(x, jnp.int32)
