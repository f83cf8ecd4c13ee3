"""Where sequences lie in rows of tokens: which token follows which, and which rows a context-parallel rank has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lce_jax import scalars
from lce_torch_bridge.call import _checks


class Packing(NamedTuple):
    """Where the sequences of ``[..., L]`` tokens begin and end; of one sequence a row if there is nothing."""

    segment_ids: torch.Tensor | None = None  # [..., L]
    padding_segment: int | None = None
    ends: torch.Tensor | None = None  # [n + 1], by the sequences' own lengths
    begins: torch.Tensor | None = None  # [n + 1], where they lie


def of(x: Any, segment_ids: Any, cu_seqlens: Any, cu_seqlens_padded: Any, padding_segment: Any) -> Packing:
    """What the arguments say of a tensor ``[..., L]``, checked."""
    _checks.tensor("x", x)
    if x.ndim < 1:
        raise ValueError("rows of tokens must be [..., L], got a tensor without dimensions")
    scalars.packing(segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    if segment_ids is not None:
        _checks.integers("segment_ids", segment_ids)
        if segment_ids.shape != x.shape:
            raise ValueError(f"segment_ids {tuple(segment_ids.shape)} must have the tokens' shape {tuple(x.shape)}")
        _checks.same_device(x, segment_ids=segment_ids)
        return Packing(segment_ids, padding_segment)
    length = x.shape[-1]
    ends = offsets("cu_seqlens", cu_seqlens, length, x.device)
    begins = ends
    if ends is not None and cu_seqlens_padded is not None:
        begins = offsets("cu_seqlens_padded", cu_seqlens_padded, length, x.device)
        if cu_seqlens_padded.shape != ends.shape:
            raise ValueError(
                f"cu_seqlens_padded {tuple(cu_seqlens_padded.shape)} must have the shape of cu_seqlens "
                f"{tuple(ends.shape)}"
            )
        if _checks.may_look_at(cu_seqlens) and _checks.may_look_at(cu_seqlens_padded):
            scalars.lengths(cu_seqlens.tolist(), cu_seqlens_padded.tolist())
    return Packing(ends=ends, begins=begins)


def offsets(
    name: str, x: Any, length: int, device: torch.device | str | None, whole: bool = False, multiple: int = 1
) -> torch.Tensor | None:
    """Offsets of sequences in ``length`` tokens, on a device, whose numbers are looked at where nothing waits."""
    if x is None:
        return None
    _checks.integers(name, x)
    if x.ndim != 1 or x.numel() < 2:
        raise ValueError(f"{name} must be [n + 1] offsets of n sequences, 1 or more, got shape {tuple(x.shape)}")
    if _checks.may_look_at(x):
        scalars.offsets(name, x.tolist(), length, whole, multiple)
    return x.to(device, torch.int64)


def fill_of(value: Any, x: torch.Tensor) -> bool | int | float:
    """``value`` as a number of the kind of ``x``."""
    return scalars.fill(value, **_kind(x))


def _kind(x: torch.Tensor) -> dict[str, Any]:
    """What `scalars` must know of the dtype of ``x``."""
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return {"bools": x.dtype == torch.bool, "integers": torch.iinfo(x.dtype) if integers else None}


def length(x: Any, axis: int) -> int:
    """How many rows a tensor has along ``axis``."""
    _checks.tensor("x", x)
    axis = scalars.integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} is no dimension of x {tuple(x.shape)}")
    return int(x.shape[axis])


def shifted(x: torch.Tensor, fill: bool | int | float, by: int, packing: Packing) -> torch.Tensor:
    """``x`` moved ``by`` places, not 0, within each sequence; ``fill`` where nothing is moved to.

    All of it is `scalars.nothing` if the offsets do not fit.
    """
    follows = _has_next(x, packing)  # the token at i + 1 is of the same sequence as that at i
    reached = _reaching(follows, abs(by))
    if by > 0:
        reached = reached.roll(by, dims=-1)
    moved = x.roll(by, dims=-1).masked_fill(~reached, fill)
    if packing.ends is None or packing.begins is None:
        return moved
    fits = _rises(packing.ends, x.shape[-1]) & _rises(packing.begins, x.shape[-1])
    fits = fits & (packing.ends.diff() <= packing.begins.diff()).all()
    return moved.masked_fill(~fits, scalars.nothing(**_kind(x)))


def _rises(offsets: torch.Tensor, length: int) -> torch.Tensor:
    """Whether offsets rise from 0 to at most ``length``. Compared, because differences of wrong ones may overflow."""
    return (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] <= length)


def _reaching(follows: torch.Tensor, steps: int) -> torch.Tensor:
    """The token at i + steps is of the same sequence as that at i. No step leads from the end to the beginning."""
    if steps == 1:
        return follows
    half = _reaching(follows, steps // 2)
    both = half & half.roll(-(steps // 2), dims=-1)
    return both & follows.roll(1 - steps, dims=-1) if steps % 2 else both


def _has_next(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    place = torch.arange(x.shape[-1], device=x.device)
    inside = place < x.shape[-1] - 1
    if packing.segment_ids is not None:
        ids = packing.segment_ids
        same = inside & (ids == ids.roll(-1, dims=-1))
        return same if packing.padding_segment is None else same & (ids != packing.padding_segment)
    if packing.ends is None or packing.begins is None:
        return inside
    sequence = sequence_of(place, packing.begins)
    return place - packing.begins[sequence] + 1 < packing.ends.diff()[sequence]


def sequence_of(place: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The sequence in which each place lies; the last one after all of them. Sequences may be empty."""
    return torch.searchsorted(begins[1:], place, right=True).clamp(max=begins.numel() - 2)


def positions(
    begins: torch.Tensor | None, cp_rank: torch.Tensor, length: int, cp_size: int, chunks: int
) -> torch.Tensor:
    """Where the rows of ranks stand; ``length``, which is nowhere, if the offsets ``begins`` do not fit."""
    device = cp_rank.device
    begins = length * torch.arange(2, device=device) if begins is None else begins.to(device)
    fits = _rises(begins, length) & (begins[-1] == length) & (begins.diff() % chunks == 0).all()
    rank = cp_rank[..., None]
    row = torch.arange(length // cp_size, device=device)
    sequence = sequence_of(row, begins // cp_size)
    begin = begins[sequence]
    chunk = ((begins[sequence + 1] - begin) // chunks).clamp(min=1)
    inside = row - begin // cp_size
    # Of the zigzag's two chunks, the second one is as far from the end as the first one from the beginning.
    number = rank if chunks == cp_size else torch.where(inside < chunk, rank, chunks - 1 - rank)
    return torch.where(fits, begin + number * chunk + inside % chunk, length)


def order_of(length: int, cp_size: Any, layout: Any, cu_seqlens: Any, device: torch.device) -> torch.Tensor:
    """The `positions` of all ranks, one after another, from arguments that are checked here."""
    cp_size, chunks = scalars.chunks_of_ranks(length, cp_size, layout, cu_seqlens is not None)
    begins = offsets("cu_seqlens", cu_seqlens, length, device, whole=True, multiple=chunks)
    return positions(begins, torch.arange(cp_size, device=device), length, cp_size, chunks).reshape(-1)
