"""Context parallelism: which rows a rank has."""

from __future__ import annotations

from typing import Literal

import torch

from lce_jax import scalars
from lce_torch_bridge.call import _packing

type Layout = Literal["zigzag", "contiguous"]

__all__ = ["in_rank_order", "in_sequence_order", "of_rank", "positions"]


def positions(
    length: int,
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Where the rows of a context-parallel rank stand among all L.

    Args:
        length: L, the number of tokens before the split.
        cp_rank: the rank, from 0.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText (load balance), so that causal
            attention is as much work on each. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L: each is split by itself, as Transformer Engine does with packed
            sequences (``cu_seqlens_padded``, if they are padded). None: the L tokens are split as one.
        device: of the result. None: that of ``cu_seqlens``, or torch's default.

    Returns:
        ``[L / cp_size]`` int64, the rank's rows in its own order.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. Offsets on a
            GPU are not checked: if they do not fit, every position is L, which is no valid index.

    Example:
        >>> from lce_torch_bridge import rows
        >>> [rows.positions(8, rank, 2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    length = scalars.integer("length", length)
    cp_size, chunks = scalars.chunks_of_ranks(length, cp_size, layout, cu_seqlens is not None)
    if not 0 <= scalars.integer("cp_rank", cp_rank) < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {cp_rank}")
    if device is None and cu_seqlens is not None:
        device = cu_seqlens.device
    begins = _packing.offsets("cu_seqlens", cu_seqlens, length, device, whole=True, multiple=chunks)
    return _packing.positions(begins, torch.full((), cp_rank, device=device), length, cp_size, chunks)


def of_rank(
    x: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
    axis: int = -1,
) -> torch.Tensor:
    """The rows of a context-parallel rank. Shift first: the label of a chunk's last row stands in another chunk.

    Args:
        x: a tensor of L rows along ``axis``.
        cp_rank: the rank, from 0.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText (load balance), so that causal
            attention is as much work on each. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L: each is split by itself, as Transformer Engine does with packed
            sequences (``cu_seqlens_padded``, if they are padded). None: the L tokens are split as one.
        axis: the dimension of the rows.

    Returns:
        ``x`` with ``L / cp_size`` rows.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. Offsets on a
            GPU are not checked: if they do not fit, a device assertion fails.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> labels = rows.next_tokens(torch.tensor([5, 6, 7, 8]))
        >>> [rows.of_rank(labels, rank, 2).tolist() for rank in (0, 1)]
        [[6, -100], [7, 8]]
    """
    length = _packing.length(x, axis)
    places = positions(length, cp_rank, cp_size, layout=layout, cu_seqlens=cu_seqlens, device=x.device)
    return x.index_select(axis, places)


def in_rank_order(
    x: torch.Tensor, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: torch.Tensor | None = None, axis: int = -1
) -> torch.Tensor:
    """The rows of all context-parallel ranks, one rank after another: an array to be split over a mesh axis.

    Args:
        x: a tensor of L rows along ``axis``.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText (load balance), so that causal
            attention is as much work on each. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L: each is split by itself, as Transformer Engine does with packed
            sequences (``cu_seqlens_padded``, if they are padded). None: the L tokens are split as one.
        axis: the dimension of the rows.

    Returns:
        ``x`` in another order.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. Offsets on a
            GPU are not checked: if they do not fit, a device assertion fails.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> rows.in_rank_order(torch.arange(8), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    order = _packing.order_of(_packing.length(x, axis), cp_size, layout, cu_seqlens, x.device)
    return x.index_select(axis, order)


def in_sequence_order(
    x: torch.Tensor, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: torch.Tensor | None = None, axis: int = -1
) -> torch.Tensor:
    """The inverse of `in_rank_order`: what ``torch.distributed`` has gathered from all ranks, as it was before.

    Args:
        x: a tensor of L rows along ``axis``, the parts of the ranks one after another.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText (load balance), so that causal
            attention is as much work on each. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L: each is split by itself, as Transformer Engine does with packed
            sequences (``cu_seqlens_padded``, if they are padded). None: the L tokens are split as one.
        axis: the dimension of the rows.

    Returns:
        ``x`` in another order.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. Offsets on a
            GPU are not checked: if they do not fit, a device assertion fails.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> rows.in_sequence_order(torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    order = _packing.order_of(_packing.length(x, axis), cp_size, layout, cu_seqlens, x.device)
    places = torch.where(order < order.numel(), order.argsort(), order.numel())  # none, where `positions` has none
    return x.index_select(axis, places)
