"""Where sequences lie in rows of tokens: which token follows which, and which rows a context-parallel rank has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax import _jax, scalars
from lce_jax.call import _checks
from lce_jax.call._rows import on_device

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Int


class Packing(NamedTuple):
    """Where the sequences of ``[..., L]`` tokens begin and end; of one sequence a row if there is nothing."""

    segment_ids: Array | None = None  # [..., L]
    padding_segment: int | None = None
    ends: Array | None = None  # [n + 1], by the sequences' own lengths
    begins: Array | None = None  # [n + 1], where they lie


def of(x: Any, segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any) -> Packing:
    """What the arguments say of an array ``[..., L]``, checked."""
    _checks.array("x", x)
    if x.ndim < 1:
        raise ValueError("rows of tokens must be [..., L], got an array without dimensions")
    _whole(x, -1)
    scalars.packing(segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    if segment_ids is not None:
        _checks.label_array(segment_ids, "segment_ids")
        if tuple(segment_ids.shape) != tuple(x.shape):
            raise ValueError(f"segment_ids {tuple(segment_ids.shape)} must have the tokens' shape {tuple(x.shape)}")
        return Packing(on_device(segment_ids), padding_segment)
    length = x.shape[-1]
    ends = offsets("cu_seqlens", cu_seqlens, length)
    begins = ends if cu_seqlens_padded is None else offsets("cu_seqlens_padded", cu_seqlens_padded, length)
    if ends is not None and begins is not None:
        if ends.shape != begins.shape:
            raise ValueError(f"cu_seqlens_padded {begins.shape} must have the shape of cu_seqlens {ends.shape}")
        if cu_seqlens_padded is not None and _checks.is_concrete(cu_seqlens) and _checks.is_concrete(cu_seqlens_padded):
            scalars.lengths(jax.device_get(cu_seqlens).tolist(), jax.device_get(cu_seqlens_padded).tolist())
    return Packing(ends=ends, begins=begins)


def offsets(name: str, x: Any, length: int, whole: bool = False, multiple: int = 1) -> Int[Array, "n+1"] | None:
    """Offsets of sequences in ``length`` tokens, whose numbers are looked at where they are known."""
    if x is None:
        return None
    _checks.label_array(x, name)
    if x.ndim != 1 or x.size < 2:
        raise ValueError(f"{name} must be [n + 1] offsets of n sequences, 1 or more, got shape {tuple(x.shape)}")
    if _checks.is_concrete(x):
        scalars.offsets(name, jax.device_get(x).tolist(), length, whole, multiple)
    return on_device(x).astype(int)


def rank(value: Any, cp_size: int) -> Int[Array, ""]:
    """A ``cp_rank`` as an array, whose number is looked at where it is known."""
    if not scalars.is_integer(value):
        _checks.array("cp_rank", value, "an integer")
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"cp_rank must be one integer, got {value.dtype} of shape {tuple(value.shape)}")
        if not _checks.is_concrete(value):
            return value
        value = jax.device_get(value).item()
    if not 0 <= value < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {value}")
    return jax.device_put(np.int32(value))


def fill_of(value: Any, x: Any) -> bool | int | float:
    """``value`` as a number of the kind of ``x``."""
    return scalars.fill(value, **_kind(x))


def length(x: Any, axis: int) -> int:
    """How many rows an array has along ``axis``."""
    _checks.array("x", x)
    axis = scalars.integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} is no dimension of x {tuple(x.shape)}")
    _whole(x, axis)
    return int(x.shape[axis])


def _whole(x: Any, axis: int) -> None:
    """The rows must not be split over an Explicit axis of a mesh, because a neighbour may be on another device."""
    spec = _jax.partitions(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    split = dict(enumerate(spec)).get(axis % x.ndim)
    if split is not None:
        raise ValueError(
            f"the rows of {tuple(x.shape)}, in dimension {axis % x.ndim}, are split over {split!r}, an Explicit axis "
            "of the mesh: shift and order them before they are split, or pass jax.reshard(x, jax.P())"
        )


def shifted(x: Any, fill: bool | int | float, by: int, packing: Packing) -> Array:
    """``x`` moved ``by`` places, not 0, within each sequence; ``fill`` where nothing is moved to.

    All of it is `scalars.nothing` if the offsets do not fit.
    """
    fill = jax.device_put(np.asarray(fill, x.dtype))
    arrays = packing._replace(padding_segment=None)
    return _shifted(on_device(x), fill, arrays, by, packing.padding_segment)


@functools.partial(jax.jit, static_argnames=("by", "padding_segment"), inline=True)
def _shifted(x: Array, fill: Array, packing: Packing, by: int, padding_segment: int | None) -> Array:
    packing = packing._replace(padding_segment=padding_segment)
    follows = _has_next(x.shape, packing)  # the token at i + 1 is of the same sequence as that at i
    reached = _reaching(follows, abs(by))
    if by > 0:
        reached = jnp.roll(reached, by, axis=-1)
    moved = jnp.where(reached, jnp.roll(x, by, axis=-1), fill)
    if packing.ends is None or packing.begins is None:
        return moved
    fits = _rises(packing.ends, x.shape[-1]) & _rises(packing.begins, x.shape[-1])
    fits &= jnp.all(jnp.diff(packing.ends) <= jnp.diff(packing.begins))
    return jnp.where(fits, moved, jnp.asarray(scalars.nothing(**_kind(x)), x.dtype))


def _rises(offsets: Int[Array, "n+1"], length: int) -> Bool[Array, ""]:
    """Whether offsets rise from 0 to at most ``length``. Compared, because differences of wrong ones may overflow."""
    return (offsets[0] == 0) & jnp.all(offsets[1:] >= offsets[:-1]) & (offsets[-1] <= length)


def _kind(x: Any) -> dict[str, Any]:
    """What `scalars` must know of the dtype of ``x``."""
    return {
        "bools": x.dtype == jnp.bool_,
        "integers": jnp.iinfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else None,
    }


def taken(x: Any, places: Int[Array, "n"], axis: int) -> Array:
    """``x`` at some places along ``axis``; `scalars.nothing` where one of them is nowhere."""
    return _taken(on_device(x), places, axis)


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def _taken(x: Array, places: Int[Array, "n"], axis: int) -> Array:
    fill = False if x.dtype == jnp.bool_ else None  # else `jnp.take` has the same as `scalars.nothing`
    return jnp.take(x, places, axis, mode="fill", fill_value=fill, unique_indices=True)


def _reaching(follows: Bool[Array, "*b L"], steps: int) -> Bool[Array, "*b L"]:
    """The token at i + steps is of the same sequence as that at i. No step leads from the end to the beginning."""
    if steps == 1:
        return follows
    half = _reaching(follows, steps // 2)
    both = half & jnp.roll(half, -(steps // 2), axis=-1)
    return both & jnp.roll(follows, 1 - steps, axis=-1) if steps % 2 else both


def _has_next(shape: tuple[int, ...], packing: Packing) -> Bool[Array, "*b L"]:
    place = jnp.arange(shape[-1])
    inside = place < shape[-1] - 1
    if packing.segment_ids is not None:
        ids = packing.segment_ids
        same = inside & (ids == jnp.roll(ids, -1, axis=-1))
        return same if packing.padding_segment is None else same & (ids != packing.padding_segment)
    if packing.ends is None or packing.begins is None:
        return inside
    sequence = sequence_of(place, packing.begins)
    return place - packing.begins[sequence] + 1 < (packing.ends[1:] - packing.ends[:-1])[sequence]


def sequence_of(place: Int[Array, "L"], begins: Int[Array, "n+1"]) -> Int[Array, "L"]:
    """The sequence in which each place lies; the last one after all of them. Sequences may be empty."""
    found = jnp.searchsorted(begins[1:], place, side="right")
    return jnp.minimum(found, begins.size - 2)


@functools.partial(jax.jit, static_argnames=("length", "cp_size", "chunks"), inline=True)
def positions(
    begins: Int[Array, "n+1"] | None, cp_rank: Int[Array, "*r"] | int, length: int, cp_size: int, chunks: int
) -> Int[Array, "*r L/cp_size"]:
    """Where the rows of ranks stand; ``length``, which is nowhere, if ``begins`` or a rank do not fit."""
    begins = jnp.array([0, length]) if begins is None else begins
    fits = _rises(begins, length) & (begins[-1] == length) & jnp.all(jnp.diff(begins) % chunks == 0)
    rank = jnp.asarray(cp_rank, int)[..., None]
    fits &= (rank >= 0) & (rank < cp_size)
    row = jnp.arange(length // cp_size)
    sequence = sequence_of(row, begins // cp_size)
    begin = begins[sequence]
    chunk = jnp.maximum((begins[sequence + 1] - begin) // chunks, 1)
    inside = row - begin // cp_size
    # Of the zigzag's two chunks, the second one is as far from the end as the first one from the beginning.
    number = rank if chunks == cp_size else jnp.where(inside < chunk, rank, chunks - 1 - rank)
    return jnp.where(fits, begin + number * chunk + inside % chunk, length).astype(jnp.int32)


def order_of(length: int, cp_size: Any, layout: Any, cu_seqlens: Any, inverse: bool = False) -> Int[Array, "L"]:
    """The `positions` of all ranks, one after another, or where each row stands among these. Checks its arguments."""
    cp_size, chunks = scalars.chunks_of_ranks(length, cp_size, layout, cu_seqlens is not None)
    begins = offsets("cu_seqlens", cu_seqlens, length, whole=True, multiple=chunks)
    return _order(begins, length, cp_size, chunks, inverse)


@functools.partial(jax.jit, static_argnames=("length", "cp_size", "chunks", "inverse"), inline=True)
def _order(begins: Int[Array, "n+1"] | None, length: int, cp_size: int, chunks: int, inverse: bool) -> Int[Array, "L"]:
    order = positions(begins, np.arange(cp_size), length, cp_size, chunks).reshape(-1)
    return jnp.where(order < length, jnp.argsort(order), length) if inverse else order  # nowhere, as `positions` is
