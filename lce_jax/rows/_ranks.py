"""Context parallelism: which rows a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lce_jax import scalars
from lce_jax.call import _packing

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int

type Layout = Literal["zigzag", "contiguous"]

__all__ = ["in_rank_order", "in_sequence_order", "of_rank", "positions"]


def positions(
    length: int,
    cp_rank: int | Int[Array, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[Array, "n+1"] | None = None,
) -> Int[Array, "L/cp_size"]:
    """Where the rows of a context-parallel rank stand among all L.

    Args:
        length: L, the number of tokens before the split.
        cp_rank: the rank, from 0; it may be traced, as ``jax.lax.axis_index`` is.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText (load balance), so that causal
            attention is as much work on each. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L: each is split by itself, as Transformer Engine does with packed
            sequences (``cu_seqlens_padded``, if they are padded). None: the L tokens are split as one.

    Returns:
        ``[L / cp_size]`` int32, the rank's rows in its own order.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. If ``cu_seqlens`` or
            ``cp_rank`` is traced and does not fit, every position is L, which is no row.

    Example:
        >>> from lce_jax import rows
        >>> [rows.positions(8, rank, 2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    length = scalars.integer("length", length)
    cp_size, chunks = scalars.chunks_of_ranks(length, cp_size, layout, cu_seqlens is not None)
    rank = _packing.rank(cp_rank, cp_size)
    begins = _packing.offsets("cu_seqlens", cu_seqlens, length, whole=True, multiple=chunks)
    return _packing.positions(begins, rank, length, cp_size, chunks)


def of_rank(
    x: Array,
    cp_rank: int | Int[Array, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[Array, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """The rows of a context-parallel rank. Shift first: the label of a chunk's last row stands in another chunk.

    Args:
        x: an array of L rows along ``axis``.
        cp_rank: the rank, from 0; it may be traced, as ``jax.lax.axis_index`` is.
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
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. If ``cu_seqlens`` or
            ``cp_rank`` is traced and does not fit, all that is returned is NaN, the least integer (the largest unsigned
            one) or False.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> labels = rows.next_tokens(jnp.array([5, 6, 7, 8]))
        >>> [rows.of_rank(labels, rank, 2).tolist() for rank in (0, 1)]
        [[6, -100], [7, 8]]
    """
    length = _packing.length(x, axis)
    places = positions(length, cp_rank, cp_size, layout=layout, cu_seqlens=cu_seqlens)
    return _packing.taken(x, places, axis)


def in_rank_order(
    x: Array, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: Int[Array, "n+1"] | None = None, axis: int = -1
) -> Array:
    """The rows of all context-parallel ranks, one rank after another: an array to be split over a mesh axis.

    Args:
        x: an array of L rows along ``axis``.
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
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. If ``cu_seqlens`` is traced
            and does not fit, all that is returned is NaN, the least integer (the largest unsigned one) or False.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.in_rank_order(jnp.arange(8), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    order = _packing.order_of(_packing.length(x, axis), cp_size, layout, cu_seqlens)
    return _packing.taken(x, order, axis)


def in_sequence_order(
    x: Array, cp_size: int, *, layout: Layout = "zigzag", cu_seqlens: Int[Array, "n+1"] | None = None, axis: int = -1
) -> Array:
    """The inverse of `in_rank_order`: what is gathered from all ranks (``jax.lax.all_gather``), as it was before.

    Args:
        x: an array of L rows along ``axis``, the parts of the ranks one after another.
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
        ValueError, TypeError: lengths that do not divide, and other values that do not fit. If ``cu_seqlens`` is traced
            and does not fit, all that is returned is NaN, the least integer (the largest unsigned one) or False.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.in_sequence_order(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    places = _packing.order_of(_packing.length(x, axis), cp_size, layout, cu_seqlens, inverse=True)
    return _packing.taken(x, places, axis)
