"""Where sequences lie in rows of tokens, and which rows a context-parallel rank has: once, for JAX and for torch.

`lce_jax.rows` says what it all means. This module is public for `lce_torch_bridge`. In `shifted` and `positions`
``xp`` is `jax.numpy` or `torch`, and ``arange`` counts on the arrays' device. L tokens, n sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lce_jax.types import scalars

__all__ = ["Library", "num_rows", "places", "positions", "shift", "shifted"]


class Library(NamedTuple):
    """What JAX and torch do each in its own way."""

    num_rows: Callable[[Any, int], int]  # of an array along an axis, checked
    integers: Callable[[str, Any], None]  # a check
    values: Callable[[Any], list[int] | None]  # of integers; None where reading them waits or breaks a trace
    kind: Callable[[Any], tuple[bool, Any]]  # of an array: whether it is bool, and the iinfo of integers
    shifted: Callable[..., Any]  # runs `shifted`
    positions: Callable[..., Any]  # runs `positions`


def num_rows(x: Any, axis: Any) -> int:
    """How many rows ``x`` has along ``axis``."""
    if not -x.ndim <= scalars.integer("axis", axis) < x.ndim:
        raise ValueError(f"axis={axis} is no dimension of x {tuple(x.shape)}")
    return int(x.shape[axis])


def shift(
    library: Library, way: int, x: Any, fill: Any, ahead: Any,
    segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any,
) -> Any:  # fmt: skip
    """``x`` moved within its sequences, ``ahead`` rows on (``way`` 1) or back (-1). Checks its arguments."""
    length = library.num_rows(x, -1)
    if scalars.integer("ahead", ahead) < 1:
        raise ValueError(f"ahead must be at least 1, the next token, got {ahead}")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("segment_ids and cu_seqlens both say where sequences end: give one of the two")
    if cu_seqlens_padded is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens_padded without cu_seqlens: give the true lengths too, or cu_seqlens alone")
    if padding_segment is not None:
        if segment_ids is None:
            raise ValueError(f"padding_segment={padding_segment!r} is an id of segment_ids, which are not given")
        scalars.integer("padding_segment", padding_segment)
    if segment_ids is not None:
        library.integers("segment_ids", segment_ids)
        if tuple(segment_ids.shape) != tuple(x.shape):
            raise ValueError(f"segment_ids {tuple(segment_ids.shape)} must have the tokens' shape {tuple(x.shape)}")
    ends = _offsets(library, "cu_seqlens", cu_seqlens, length)
    begins = _offsets(library, "cu_seqlens_padded", cu_seqlens_padded, length)
    if cu_seqlens_padded is None:
        cu_seqlens_padded = cu_seqlens
    elif (shape := tuple(cu_seqlens_padded.shape)) != tuple(cu_seqlens.shape):
        raise ValueError(f"cu_seqlens_padded {shape} must have the shape of cu_seqlens {tuple(cu_seqlens.shape)}")
    for i, (size, room) in enumerate(zip(_steps(ends or ()), _steps(begins or ()), strict=False)):
        if size > room:
            raise ValueError(f"sequence {i} has {size} tokens by cu_seqlens, but {room} by cu_seqlens_padded")
    fill, nothing = _fill_and_nothing(fill, *library.kind(x))
    told = {"by": way * int(ahead), "nothing": nothing, "padding_segment": padding_segment}
    return library.shifted(x, segment_ids, cu_seqlens, cu_seqlens_padded, fill, **told)


def places(library: Library, length: int, rank: Any, cp_size: Any, layout: Any, cu_seqlens: Any, **more: Any) -> Any:
    """The `positions` of a rank, or of all. Checks its arguments, a ``rank`` where it is a number of Python."""
    scalars.one_of("layout", layout, ("zigzag", "contiguous"))
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
    _offsets(library, "cu_seqlens", cu_seqlens, length, whole=True, multiple=chunks)
    return library.positions(cu_seqlens, rank, length=length, cp_size=int(cp_size), chunks=int(chunks), **more)


def _offsets(library: Library, name: str, x: Any, length: int, whole: bool = False, multiple: int = 1) -> Any:
    """The numbers of offsets of sequences in ``length`` tokens (all of them if ``whole``), checked as far as known."""
    if x is None:
        return None
    library.integers(name, x)
    if x.ndim != 1 or x.shape[0] < 2:
        raise ValueError(f"{name} must be [n + 1] offsets of n sequences, 1 or more, got shape {tuple(x.shape)}")
    values = library.values(x)
    if values is None:
        return None
    if values[0] != 0 or min(_steps(values)) < 0 or values[-1] > length or (whole and values[-1] != length):
        end = f"{length}" if whole else f"at most {length}"
        raise ValueError(f"{name} must rise from 0 to {end}, the number of tokens, got {values}")
    for step in _steps(values):
        if step % multiple:
            raise ValueError(
                f"{name} must have sequences of multiples of {multiple} tokens, got one of {step}: pad them"
            )
    return values


def _steps(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(values)]


def _fill_and_nothing(value: Any, bools: bool, integers: Any) -> tuple[Any, Any]:
    """What stands where there is no neighbour, and where offsets do not fit: of the kind of the values."""
    if bools:
        return scalars.flag("fill", value), False
    if integers is None:
        return scalars.real("fill", value), math.nan
    value, lowest, highest = scalars.integer("fill", value), int(integers.min), int(integers.max)
    if not lowest <= value <= highest:
        raise ValueError(f"fill must lie in [{lowest}, {highest}], the integers of {integers.dtype}, got {value}")
    return value, lowest or highest


def shifted(
    xp: Any, arange: Any, x: Any, segment_ids: Any, ends: Any, begins: Any, fill: Any,
    *, nothing: bool | int | float, by: int, padding_segment: int | None,
) -> Any:  # fmt: skip
    """``x`` ``[..., L]`` moved ``by`` rows, not 0, within each sequence; ``fill`` where nothing is moved to.

    Offsets ``[n + 1]``: ``ends`` by the sequences' own lengths, ``begins`` where they lie. All of it is ``nothing`` if
    they do not fit.
    """
    place, last = arange(x.shape[-1]), x.shape[-1] - 1
    follows, fits = place < last, None  # the token at i + 1 is of the same sequence as that at i
    if segment_ids is not None:
        follows = follows & (segment_ids == xp.roll(segment_ids, -1, -1))
        if padding_segment is not None:
            follows = follows & (segment_ids != padding_segment)
    elif ends is not None:
        sizes, sequence = ends[1:] - ends[:-1], _sequence_of(xp, place, begins)
        follows = place - begins[sequence] + 1 < sizes[sequence]
        fits = _rises(ends, last + 1) & _rises(begins, last + 1) & (sizes <= begins[1:] - begins[:-1]).all()
    reached = _reaching(xp, follows, abs(by))
    reached = xp.roll(reached, by, -1) if by > 0 else reached
    moved = xp.where(reached, xp.roll(x, by, -1), xp.full_like(x[..., :1], fill))
    return moved if fits is None else xp.where(fits, moved, xp.full_like(x[..., :1], nothing))


def _reaching(xp: Any, follows: Any, steps: int) -> Any:
    """The token at i + steps is of the same sequence as that at i. No step leads from the end to the beginning."""
    if steps == 1:
        return follows
    half = _reaching(xp, follows, steps // 2)
    both = half & xp.roll(half, -(steps // 2), -1)
    return both & xp.roll(follows, 1 - steps, -1) if steps % 2 else both


def _rises(offsets: Any, length: int) -> Any:
    """Whether offsets rise from 0 to at most ``length``. Compared, because differences of wrong ones may overflow."""
    return (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] <= length)


def _sequence_of(xp: Any, place: Any, begins: Any) -> Any:
    """The sequence in which each place lies; the last one after all of them. Sequences may be empty."""
    return xp.clip(xp.searchsorted(begins[1:], place, side="right"), None, begins.shape[0] - 2)


def positions(
    xp: Any, arange: Any, begins: Any, rank: Any, *, length: int, cp_size: int, chunks: int, inverse: bool = False
) -> Any:
    """Where the rows of a rank stand; of all ranks, one after another, if it is None, or the ``inverse`` of these.

    Each is ``length``, which is nowhere, if the offsets ``begins`` or the rank do not fit.
    """
    begins = length * arange(2) if begins is None else begins
    rank = arange(cp_size)[:, None] if rank is None else rank
    fits = _rises(begins, length) & (begins[-1] == length) & ((begins[1:] - begins[:-1]) % chunks == 0).all()
    row = arange(length // cp_size)
    sequence = _sequence_of(xp, row, begins // cp_size)
    begin = begins[sequence]
    chunk = xp.clip((begins[sequence + 1] - begin) // chunks, 1, None)
    inside = row - begin // cp_size
    # Of the zigzag's two chunks, the second one is as far from the end as the first one from the beginning.
    number = rank if chunks == cp_size else xp.where(inside < chunk, rank, chunks - 1 - rank)
    fits = fits & (rank >= 0) & (rank < cp_size)
    places = xp.where(fits, begin + number * chunk + inside % chunk, length).reshape(-1)
    return xp.where(places < length, xp.argsort(places), length) if inverse else places
