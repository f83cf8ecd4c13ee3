"""Rows of packed sequences and of context-parallel ranks: labels, masks and results that belong to them.

These are the functions of `lce_jax.rows` for tensors; that module documents them and all their arguments. They are
plain PyTorch and never wait for a GPU, so offsets on a GPU are not checked. If such offsets do not fit, a shift returns
only NaN, the least integer (for unsigned dtypes the largest) or False; `positions` returns only L, which is no row; and
functions that select the rows of ranks fail a device assertion.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.distributed as dist

from lce_jax.types import defaults, scalars, sequences
from lce_torch_bridge.call import _checks
from lce_torch_bridge.tensors import _tensor_parallel

type Layout = Literal["zigzag", "contiguous"]

__all__ = [
    "at_tokens", "in_rank_order", "in_sequence_order", "next_tokens", "next_values", "of_rank", "positions",
    "segment_mean", "segment_sum",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


def next_tokens(
    tokens: torch.Tensor,
    *,
    ahead: int = 1,
    segment_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    padding_segment: int | None = None,
) -> torch.Tensor:
    """Returns the label of each row: the next token of its sequence, or one further ahead; -100 if there is none.

    `lce_torch_bridge.linear_cross_entropy` ignores labels of -100. Pass ``ignore_index=-100`` to other functions.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> rows.next_tokens(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens=torch.tensor([0, 3, 5])).tolist()
        [6, 7, -100, 9, -100]
        >>> rows.next_tokens(torch.tensor([5, 6, 7, 8, 9]), ahead=2, cu_seqlens=torch.tensor([0, 3, 5])).tolist()
        [7, -100, -100, -100, -100]
    """
    _checks.integers("tokens", tokens)
    if not tokens.dtype.is_signed:
        raise TypeError(f"tokens must be signed, to hold labels of {defaults.IGNORED}, got {tokens.dtype}")
    return _shift_rows(-1, tokens, defaults.IGNORED, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def next_values(
    values: torch.Tensor,
    *,
    fill: float,
    ahead: int = 1,
    segment_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    padding_segment: int | None = None,
) -> torch.Tensor:
    """Moves values of tokens (a mask, an advantage, an old log-probability) to the rows that predict these tokens.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> answer = torch.tensor([False, True, True, False, True])
        >>> rows.next_values(answer, fill=False, segment_ids=torch.tensor([1, 1, 1, 2, 2])).tolist()
        [True, True, False, True, False]
    """
    return _shift_rows(-1, values, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def at_tokens(
    results: torch.Tensor,
    *,
    fill: float = 0.0,
    ahead: int = 1,
    segment_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    padding_segment: int | None = None,
) -> torch.Tensor:
    """Moves results of rows (log-probabilities) to the tokens that the rows predict: the inverse of `next_values`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
        >>> rows.at_tokens(logprobs, cu_seqlens=torch.tensor([0, 3, 5])).tolist()
        [0.0, -1.0, -2.0, 0.0, -4.0]
    """
    return _shift_rows(1, results, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def segment_mean(
    x: torch.Tensor, *, where: torch.Tensor | None = None, group: dist.ProcessGroup | None = None,
    segment_ids: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None, padding_segment: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns at each row the mean of ``x`` over the rows of its sequence that are in ``where``, a bool tensor.

    ``group`` is the process group over whose ranks context parallelism splits the rows; it takes the place of JAX's
    ``axis_name``. Its ranks call this together, and run the backward together. None: ``x`` has all rows.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> x = torch.tensor([1.0, 2.0, 6.0, 4.0, 8.0])
        >>> rows.segment_mean(x, cu_seqlens=torch.tensor([0, 3, 5]), where=x > 1).tolist()
        [4.0, 4.0, 4.0, 6.0, 6.0]
    """
    return _sum_rows(True, x, where, group, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def segment_sum(
    x: torch.Tensor, *, where: torch.Tensor | None = None, group: dist.ProcessGroup | None = None,
    segment_ids: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None, padding_segment: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns at each row the sum of ``x`` over the rows of its sequence. The arguments are those of `segment_mean`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> mask = torch.tensor([True, True, False])  # how many of its tokens each sequence has
        >>> rows.segment_sum(mask, segment_ids=torch.tensor([1, 1, 2])).tolist()
        [2.0, 2.0, 0.0]
    """
    return _sum_rows(False, x, where, group, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def positions(
    length: int,
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Returns the positions, among all L tokens, of the rows of a context-parallel rank: ``[L / cp_size]`` int64.

    They are on ``device``; by default on the device of ``cu_seqlens``, or torch's default device.

    Example:
        >>> from lce_torch_bridge import rows
        >>> [rows.positions(8, rank, 2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    rank = scalars.integer("cp_rank", cp_rank)
    return _locate_rows(scalars.integer("length", length), rank, cp_size, layout, cu_seqlens, device=device)


def of_rank(
    x: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
    axis: int = -1,
) -> torch.Tensor:
    """Returns the rows of a context-parallel rank.

    Shift labels before this, because the label of a chunk's last row stands in another chunk.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> labels = rows.next_tokens(torch.tensor([5, 6, 7, 8]))
        >>> [rows.of_rank(labels, rank, 2).tolist() for rank in (0, 1)]
        [[6, -100], [7, 8]]
    """
    return _take(x, axis, scalars.integer("cp_rank", cp_rank), cp_size, layout, cu_seqlens)


def in_rank_order(
    x: torch.Tensor, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: torch.Tensor | None = None, axis: int = -1
) -> torch.Tensor:
    """Returns the rows of all context-parallel ranks, one rank after another.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> rows.in_rank_order(torch.arange(8), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _take(x, axis, None, cp_size, layout, cu_seqlens)


def in_sequence_order(
    x: torch.Tensor, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: torch.Tensor | None = None, axis: int = -1
) -> torch.Tensor:
    """Restores the sequence's order of rows that ``torch.distributed`` has gathered from all ranks.

    It is the inverse of `in_rank_order`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> rows.in_sequence_order(torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _take(x, axis, None, cp_size, layout, cu_seqlens, inverse=True)


def _count_rows(x: Any, axis: int) -> int:
    _checks.tensor("x", x)
    return sequences.count_rows(x, axis)


def _describe_dtype(x: torch.Tensor) -> tuple[bool, Any]:
    bools = x.dtype == torch.bool
    return bools, None if bools or x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype)


def _shift_array(x: torch.Tensor, segment_ids: Any, ends: Any, begins: Any, fill: Any, **more: Any) -> torch.Tensor:
    if segment_ids is not None:
        _checks.same_device(x, segment_ids=segment_ids)
    arange, ends, begins = _move_to_device(x.device, ends, begins)
    return sequences.shift_array(torch, arange, x, segment_ids, ends, begins, fill, **more)


def _sum_array(
    x: torch.Tensor, segment_ids: Any, ends: Any, begins: Any, where: Any, group: dist.ProcessGroup | None, **more: Any
) -> torch.Tensor:
    others = {"segment_ids": segment_ids, "where": where}
    _checks.same_device(x, **{name: other for name, other in others.items() if other is not None})
    if group is not None:
        _checks.group(group, "group")
    arange, ends, begins = _move_to_device(x.device, ends, begins)
    name = _tensor_parallel.name_group(group)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    more["sum_terms"] = lambda terms, ids: _SumSegments.apply(terms, ids, name)
    return sequences.sum_array(torch, arange, x, segment_ids, ends, begins, where, **more)


class _SumSegments(torch.autograd.Function):
    """Computes `sequences.sum_segments` over the rows of all ranks, and returns the results of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, ids: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.name, length = name, ids.shape[-1]
        size, rank = _tensor_parallel.size_and_rank(name)
        if size > 1:
            terms, ids = (torch.cat([*_tensor_parallel.gather(x.contiguous(), name)], -1) for x in (terms, ids))
        (arange,) = _move_to_device(ids.device)
        sums = sequences.sum_segments(torch, arange, torch.take_along_dim, _repeat, terms, ids)
        return sums.narrow(-1, rank * length, length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return _SumSegments.apply(grad, ids, ctx.name), None, None


def _repeat(count: int, body: Any, x: torch.Tensor) -> torch.Tensor:
    return functools.reduce(lambda x, i: body(i, x), range(count), x)


def _compute_positions(begins: torch.Tensor | None, rank: int | None, device: Any, **more: Any) -> torch.Tensor:
    device = begins.device if device is None and begins is not None else device
    arange, begins = _move_to_device(device, begins)
    return sequences.compute_positions(torch, arange, begins, rank, **more)


def _move_to_device(device: Any, *offsets: torch.Tensor | None) -> list[Any]:
    """Returns `torch.arange` for a device, and the offsets on that device."""
    arange = functools.partial(torch.arange, device=device)
    return [arange, *(None if x is None else x.to(device, torch.int64) for x in offsets)]


def _take(x: torch.Tensor, axis: int, *arguments: Any, **more: Any) -> torch.Tensor:
    return x.index_select(axis, _locate_rows(_count_rows(x, axis), *arguments, device=x.device, **more))


_TORCH = sequences.Library(
    count_rows=_count_rows,
    check_integers=_checks.integers,
    read_values=lambda x: x.tolist() if _checks.can_read_values(x) else None,
    describe_dtype=_describe_dtype,
    shift_array=_shift_array,
    sum_array=_sum_array,
    compute_positions=_compute_positions,
)
_shift_rows = functools.partial(sequences.shift_rows, _TORCH)
_sum_rows = functools.partial(sequences.sum_rows, _TORCH)
_locate_rows = functools.partial(sequences.locate_rows, _TORCH)
