"""Shifts and sums in packed sequences, and the rows of context-parallel ranks: one implementation for JAX and torch.

`lce_jax.rows` and `lce_torch_bridge.rows` call this module, and document the arguments. In `shift_array`, `sum_array`
and `compute_positions`, ``xp`` is `jax.numpy` or `torch`, and ``arange`` makes its array on the device of the other
arrays. L is the number of tokens, n the number of sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lce_jax.types import scalars

__all__ = [
    "Library", "compute_positions", "count_rows", "locate_rows", "shift_array", "shift_rows", "sum_array", "sum_rows",
    "sum_segments",
]  # fmt: skip


class Library(NamedTuple):
    """The steps that JAX and torch do differently."""

    count_rows: Callable[[Any, int], int]  # checks an array and counts its rows along an axis
    check_integers: Callable[[str, Any], None]  # refuses an argument that is not an array of integers
    read_values: Callable[[Any], list[int] | None]  # returns integers; None if that would wait or break a trace
    describe_dtype: Callable[[Any], tuple[bool, Any]]  # whether an array is bool, and the iinfo of an integer array
    shift_array: Callable[..., Any]  # runs `shift_array`
    sum_array: Callable[..., Any]  # runs `sum_array`
    compute_positions: Callable[..., Any]  # runs `compute_positions`


def count_rows(x: Any, axis: Any) -> int:
    """Checks ``axis``, and returns how many rows ``x`` has along it."""
    if not -x.ndim <= scalars.integer("axis", axis) < x.ndim:
        raise ValueError(f"axis={axis} is no dimension of x {tuple(x.shape)}")
    return int(x.shape[axis])


def shift_rows(
    library: Library, direction: int, x: Any, fill: Any, ahead: Any,
    segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any,
) -> Any:  # fmt: skip
    """Checks the arguments and shifts ``x`` within its sequences by ``ahead`` rows.

    A ``direction`` of 1 shifts to later rows, and -1 to earlier rows.
    """
    if scalars.integer("ahead", ahead) < 1:
        raise ValueError(f"ahead must be at least 1, the next token, got {ahead}")
    segments = _check_segments(library, x, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    fill, invalid = _check_fill(fill, *library.describe_dtype(x))
    static = {"by": direction * int(ahead), "invalid": invalid, "padding_segment": padding_segment}
    return library.shift_array(x, *segments, fill, **static)


def sum_rows(
    library: Library, is_mean: bool, x: Any, where: Any, group: Any,
    segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any,
) -> Any:  # fmt: skip
    """Checks the arguments and computes the sum, or the mean, of each row's segment over all ranks of ``group``."""
    segments = _check_segments(library, x, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    if where is not None:
        library.count_rows(where, -1)
        is_bool, _ = library.describe_dtype(where)
        if not is_bool or tuple(where.shape) != tuple(x.shape):
            raise ValueError(
                f"where {where.dtype} {tuple(where.shape)} must be bool of the shape of x {tuple(x.shape)}"
            )
    return library.sum_array(x, *segments, where, group, is_mean=is_mean, padding_segment=padding_segment)


def _check_segments(
    library: Library, x: Any, segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any
) -> tuple[Any, Any, Any]:
    """Checks the arguments that tell where sequences end. Returns the ids, and offsets of true and padded lengths."""
    length = library.count_rows(x, -1)
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("segment_ids and cu_seqlens both say where sequences end: give only one of them")
    if cu_seqlens_padded is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens_padded without cu_seqlens: give the true lengths too, or cu_seqlens alone")
    if padding_segment is not None:
        if segment_ids is None:
            raise ValueError(f"padding_segment={padding_segment!r} without segment_ids: give segment_ids too")
        scalars.integer("padding_segment", padding_segment)
    if segment_ids is not None:
        library.check_integers("segment_ids", segment_ids)
        if tuple(segment_ids.shape) != tuple(x.shape):
            raise ValueError(f"segment_ids {tuple(segment_ids.shape)} must have the tokens' shape {tuple(x.shape)}")
    ends = _check_offsets(library, "cu_seqlens", cu_seqlens, length)
    begins = _check_offsets(library, "cu_seqlens_padded", cu_seqlens_padded, length)
    if cu_seqlens_padded is None:
        cu_seqlens_padded = cu_seqlens
    elif (shape := tuple(cu_seqlens_padded.shape)) != tuple(cu_seqlens.shape):
        raise ValueError(f"cu_seqlens_padded {shape} must have the shape of cu_seqlens {tuple(cu_seqlens.shape)}")
    for i, (size, room) in enumerate(zip(_lengths(ends or ()), _lengths(begins or ()), strict=False)):
        if size > room:
            raise ValueError(f"sequence {i} has {size} tokens by cu_seqlens, but {room} by cu_seqlens_padded")
    return segment_ids, cu_seqlens, cu_seqlens_padded


def locate_rows(
    library: Library, length: int, rank: Any, cp_size: Any, layout: Any, cu_seqlens: Any, **more: Any
) -> Any:
    """Checks the arguments and computes the positions of the rows of one rank, or of all ranks.

    A ``rank`` is checked if it is a Python number.
    """
    scalars.check_choice("layout", layout, ("zigzag", "contiguous"))
    if scalars.integer("cp_size", cp_size) < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}")
    chunks = 2 * cp_size if layout == "zigzag" and cp_size > 1 else cp_size
    if cu_seqlens is None and length % chunks:
        raise ValueError(
            f'{length} tokens do not divide into {chunks} chunks, which layout="{layout}" gives {cp_size} ranks: '
            f"pad them to {-(-length // chunks) * chunks}"
        )
    if scalars.is_integer(rank) and not 0 <= rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {rank}")
    _check_offsets(library, "cu_seqlens", cu_seqlens, length, fills=True, multiple=chunks)
    return library.compute_positions(cu_seqlens, rank, length=length, cp_size=int(cp_size), chunks=int(chunks), **more)


def _check_offsets(library: Library, name: str, x: Any, length: int, fills: bool = False, multiple: int = 1) -> Any:
    """Checks the sequences' offsets in ``length`` tokens. Returns their values; None if the values are not known yet.

    With ``fills``, the sequences must cover all tokens.
    """
    if x is None:
        return None
    library.check_integers(name, x)
    if x.ndim != 1 or x.shape[0] < 2:
        raise ValueError(f"{name} must be [n + 1] offsets of n sequences, 1 or more, got shape {tuple(x.shape)}")
    values = library.read_values(x)
    if values is None:
        return None
    if values[0] != 0 or min(_lengths(values)) < 0 or values[-1] > length or (fills and values[-1] != length):
        end = f"{length}" if fills else f"at most {length}"
        raise ValueError(f"{name} must rise from 0 to {end}, the number of tokens, got {values}")
    for size in _lengths(values):
        if size % multiple:
            raise ValueError(
                f"{name} must have sequences of multiples of {multiple} tokens, got one of {size}: pad them"
            )
    return values


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(offsets)]


def _check_fill(value: Any, bools: bool, integers: Any) -> tuple[Any, Any]:
    """Checks the fill of rows without a source. Returns it, and the fill of all rows if traced offsets are invalid."""
    if bools:
        return scalars.flag("fill", value), False
    if integers is None:
        return scalars.real("fill", value), math.nan
    value, lowest, highest = scalars.integer("fill", value), int(integers.min), int(integers.max)
    if not lowest <= value <= highest:
        raise ValueError(f"fill must lie in [{lowest}, {highest}], the integers of {integers.dtype}, got {value}")
    return value, lowest or highest


def shift_array(
    xp: Any, arange: Any, x: Any, segment_ids: Any, ends: Any, begins: Any, fill: Any,
    *, invalid: bool | int | float, by: int, padding_segment: int | None,
) -> Any:  # fmt: skip
    """Shifts ``x`` ``[..., L]`` by ``by`` rows (never 0) within each sequence. Rows without a source get ``fill``.

    ``ends`` ``[n + 1]`` are the cumulative lengths of the sequences, and ``begins`` ``[n + 1]`` is where each sequence
    begins. If the offsets are invalid, all rows get ``invalid``.
    """
    row, last = arange(x.shape[-1]), x.shape[-1] - 1
    ids, inside, fits = _find_segments(xp, row, segment_ids, ends, begins, padding_segment)
    follows = row < last  # whether the tokens at i and i + 1 belong to the same sequence
    if ids is not None:
        follows = follows & (ids == xp.roll(ids, -1, -1))
    if inside is not None:
        follows = follows & inside & xp.roll(inside, -1, -1)
    has_source = _follow_steps(xp, follows, abs(by))
    has_source = xp.roll(has_source, by, -1) if by > 0 else has_source
    shifted = xp.where(has_source, xp.roll(x, by, -1), xp.full_like(x[..., :1], fill))
    return shifted if fits is None else xp.where(fits, shifted, xp.full_like(x[..., :1], invalid))


def sum_array(
    xp: Any, arange: Any, x: Any, segment_ids: Any, ends: Any, begins: Any, where: Any,
    *, sum_terms: Any, is_mean: bool, padding_segment: int | None,
) -> Any:  # fmt: skip
    """Returns for each row of ``x`` ``[..., L]`` the sum, or the mean, over its segment's rows that ``where`` selects.

    ``sum_terms`` is the library's differentiable `sum_segments`. If the offsets are invalid, all rows are NaN.
    """
    ids, inside, fits = _find_segments(xp, arange(x.shape[-1]), segment_ids, ends, begins, padding_segment)
    terms = xp.stack([x, xp.ones_like(x)] if is_mean else [x])
    for mask in (where, inside):
        terms = terms if mask is None else xp.where(mask, terms, xp.zeros_like(terms))
    ids = xp.zeros_like(x) if ids is None else xp.broadcast_to(ids, x.shape)
    sums = sum_terms(terms, ids)
    result = sums[0] / xp.clip(sums[1], 1, None) if is_mean else sums[0]
    result = result if inside is None else xp.where(inside, result, xp.zeros_like(result))
    return result if fits is None else xp.where(fits, result, xp.full_like(result, math.nan))


def sum_segments(xp: Any, arange: Any, take: Any, repeat: Any, terms: Any, ids: Any) -> Any:
    """Returns for each row of ``terms`` ``[n, ..., L]`` the sums over all rows with equal ids in ``ids`` ``[..., L]``.

    The rows are sorted by id. In steps of 1, 2, 4 … rows the last row of each segment collects the sum; then the other
    rows copy it. So the order of the additions is fixed, and all rows of a segment have the same bits. The sums are a
    symmetric matrix times the terms, so this function of the sums' gradient is the gradient of the terms.

    ``take`` is the library's `take_along_axis`, and ``repeat(n, body, x)`` applies ``body(i, x)`` for each i below n.
    """
    order = xp.argsort(ids, stable=True)
    ids, terms, row = take(ids, order, -1), take(terms, order[None], -1), arange(ids.shape[-1])

    def add_earlier(i: Any, terms: Any) -> Any:
        step = 1 << i
        same = (ids == xp.roll(ids, step, -1)) & (row >= step)
        return terms + xp.where(same, xp.roll(terms, step, -1), xp.zeros_like(terms))

    def copy_later(i: Any, terms: Any) -> Any:
        step = 1 << i
        same = (ids == xp.roll(ids, -step, -1)) & (row < row.shape[0] - step)
        return xp.where(same, xp.roll(terms, -step, -1), terms)

    count = max(row.shape[0] - 1, 0).bit_length()
    sums = repeat(count, copy_later, repeat(count, add_earlier, terms))
    return take(sums, xp.argsort(order)[None], -1)


def _find_segments(
    xp: Any, row: Any, segment_ids: Any, ends: Any, begins: Any, padding_segment: int | None
) -> tuple[Any, Any, Any]:
    """Returns each row's segment, whether the row lies in one, and whether the offsets are valid.

    None in place of these means: there is one segment; every row lies in one; there are no offsets.
    ``row`` numbers the rows. `shift_array` documents the other arguments.
    """
    if segment_ids is not None:
        return segment_ids, None if padding_segment is None else segment_ids != padding_segment, None
    if ends is None:
        return None, None, None
    sizes, sequence = ends[1:] - ends[:-1], _find_sequence(xp, row, begins)
    fits = _rises(ends, row.shape[0]) & _rises(begins, row.shape[0]) & (sizes <= begins[1:] - begins[:-1]).all()
    return sequence, row - begins[sequence] < sizes[sequence], fits


def _follow_steps(xp: Any, follows: Any, steps: int) -> Any:
    """Whether the tokens at i and i + steps belong to the same sequence. Steps do not wrap around."""
    if steps == 1:
        return follows
    half = _follow_steps(xp, follows, steps // 2)
    both = half & xp.roll(half, -(steps // 2), -1)
    return both & xp.roll(follows, 1 - steps, -1) if steps % 2 else both


def _rises(offsets: Any, length: int) -> Any:
    """Whether offsets rise from 0 to at most ``length``.

    It compares neighbours and does not subtract them, because differences of wrong offsets may overflow.
    """
    return (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] <= length)


def _find_sequence(xp: Any, row: Any, begins: Any) -> Any:
    """Returns the sequence of each row. Rows after all sequences get the last sequence. Sequences may be empty."""
    return xp.clip(xp.searchsorted(begins[1:], row, side="right"), None, begins.shape[0] - 2)


def compute_positions(
    xp: Any, arange: Any, begins: Any, rank: Any, *, length: int, cp_size: int, chunks: int, inverse: bool = False
) -> Any:
    """Returns the positions of ``rank``'s rows among all L tokens. With ``rank`` None, all ranks follow in order.

    ``inverse`` inverts the permutation of all ranks. If the offsets ``begins`` or the rank are invalid, each position
    is ``length``, which is out of range.
    """
    begins = length * arange(2) if begins is None else begins
    rank = arange(cp_size)[:, None] if rank is None else rank
    fits = _rises(begins, length) & (begins[-1] == length) & ((begins[1:] - begins[:-1]) % chunks == 0).all()
    row = arange(length // cp_size)
    sequence = _find_sequence(xp, row, begins // cp_size)
    begin = begins[sequence]
    chunk = xp.clip((begins[sequence + 1] - begin) // chunks, 1, None)
    inside = row - begin // cp_size
    # In a zigzag, a rank's second chunk is as far from the sequence's end as its first chunk is from the beginning.
    number = rank if chunks == cp_size else xp.where(inside < chunk, rank, chunks - 1 - rank)
    fits = fits & (rank >= 0) & (rank < cp_size)
    positions = xp.where(fits, begin + number * chunk + inside % chunk, length).reshape(-1)
    return xp.where(positions < length, xp.argsort(positions), length) if inverse else positions
