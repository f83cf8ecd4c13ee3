"""Labels, masks and results for the rows of packed sequences and of context-parallel ranks.

Every function of `lce_jax` works row by row, on a hidden state and its label. So packing and context parallelism need
only one thing: the label of each row must be the next token of the same sequence.

    labels = rows.next_tokens(tokens, segment_ids=segment_ids)           # -100 at the last token of each sequence
    labels = rows.of_rank(labels, cp_rank, cp_size)                      # after the shift, never before it
    loss = linear_cross_entropy(hidden, weight, labels)                  # hidden: the rows of this rank

A loss per sequence, such as GSPO's, also needs the mean over each sequence: `segment_mean`.

Shapes are static, so all functions run under ``jit``, also with a traced ``cp_rank``. Traced values cannot raise an
error. If traced offsets or a traced rank are invalid, every element of the result is NaN; an integer is the smallest of
its dtype, an unsigned integer the largest, and a bool False. `lce_torch_bridge.rows` has the same functions for
tensors. L is the number of tokens in a row of the batch, which may hold several sequences one after another.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax.call import _checks, _options
from lce_jax.call._describe import put_on_device
from lce_jax.types import _jax, defaults, scalars, sequences

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int

type Layout = Literal["zigzag", "contiguous"]

__all__ = [
    "at_tokens", "in_rank_order", "in_sequence_order", "next_tokens", "next_values", "of_rank", "positions",
    "segment_mean", "segment_sum",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


def next_tokens(
    tokens: Int[ArrayLike, "*b L"],
    *,
    ahead: int = 1,
    segment_ids: Int[ArrayLike, "*b L"] | None = None,
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    cu_seqlens_padded: Int[ArrayLike, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Int[Array, "*b L"]:
    """Returns the label of each row: the next token of its sequence, or one further ahead; -100 if there is none.

    `lce_jax.linear_cross_entropy` ignores labels of -100. Give ``ignore_index=-100`` elsewhere.

    Args:
        tokens: ``[..., L]`` integers.
        ahead: how many tokens ahead the label is: 1 for the next token, 2 for the one after it. Multi-token prediction
            uses k + 1 at depth k.
        segment_ids: ``[..., L]`` integers: neighbouring tokens with the same id belong to one sequence. None: see
            ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers that rise from 0: sequence i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens,
            and rows after the last sequence are padding. Repeat the last offset to fill a static shape. If this and
            ``segment_ids`` are None, each row of tokens is one sequence.
        cu_seqlens_padded: ``[n + 1]``, where each sequence begins if sequences are padded to a multiple. None:
            ``cu_seqlens``.
        padding_segment: the id in ``segment_ids`` that marks padding, 0 in MaxText and Tunix. None: no id marks
            padding.

    Returns:
        ``[..., L]`` in the dtype of ``tokens``.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets do not fit; the message has the values.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.next_tokens(jnp.array([5, 6, 7, 8, 9]), cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [6, 7, -100, 9, -100]
        >>> rows.next_tokens(jnp.array([5, 6, 7, 8, 9]), ahead=2, cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [7, -100, -100, -100, -100]
    """
    _checks.check_labels(tokens, "tokens")
    if not jnp.issubdtype(tokens.dtype, jnp.signedinteger):
        raise TypeError(f"tokens must be signed, to hold labels of {defaults.IGNORED}, got {tokens.dtype}")
    return _shift_rows(-1, tokens, defaults.IGNORED, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def next_values(
    values: ArrayLike,
    *,
    fill: float,
    ahead: int = 1,
    segment_ids: Int[ArrayLike, "*b L"] | None = None,
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    cu_seqlens_padded: Int[ArrayLike, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Array:
    """Moves values of tokens (a mask, an advantage, an old log-probability) to the rows that predict these tokens.

    ``values`` ``[..., L]`` holds a number or bool per token. Rows that predict no token get ``fill``. `next_tokens`
    documents the other arguments and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> answer = jnp.array([False, True, True, False, True])
        >>> rows.next_values(answer, fill=False, segment_ids=jnp.array([1, 1, 1, 2, 2])).tolist()
        [True, True, False, True, False]
    """
    return _shift_rows(-1, values, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def at_tokens(
    results: ArrayLike,
    *,
    fill: float = 0.0,
    ahead: int = 1,
    segment_ids: Int[ArrayLike, "*b L"] | None = None,
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    cu_seqlens_padded: Int[ArrayLike, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Array:
    """Moves results of rows (log-probabilities) to the tokens that the rows predict: the inverse of `next_values`.

    ``results`` ``[..., L]`` holds a number or bool per row. The first ``ahead`` tokens of each sequence, and padding,
    get ``fill``. `next_tokens` documents the other arguments and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> logprobs = jnp.array([-1.0, -2.0, -3.0, -4.0, -5.0])
        >>> rows.at_tokens(logprobs, cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [0.0, -1.0, -2.0, 0.0, -4.0]
    """
    return _shift_rows(1, results, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def segment_mean(
    x: ArrayLike, *, where: Bool[ArrayLike, "*b L"] | None = None, axis_name: str | tuple[str, ...] | None = None,
    segment_ids: Int[ArrayLike, "*b L"] | None = None, cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    cu_seqlens_padded: Int[ArrayLike, "n+1"] | None = None, padding_segment: int | None = None,
) -> Float[Array, "*b L"]:  # fmt: skip
    """Returns at each row the mean of ``x`` over the rows of its sequence: ``Σ x / n`` over the n rows in ``where``.

    All rows of a sequence get the same bits, even rows outside ``where``. So ``exp(segment_mean(logprobs - old))`` is
    GSPO's ratio at each token. The result is 0 where no row of the sequence is in ``where``, and in padding.

    Args:
        x: ``[..., L]`` numbers, one per row. Rows outside ``where`` may hold anything, NaN too.
        where: ``[..., L]`` bool, the rows that count. None: all.
        axis_name: inside ``shard_map``, the mesh axis (or tuple) over which context parallelism splits the rows. Each
            sequence is then summed over all shards. None: ``x`` has all rows of its sequences.
        segment_ids: ``[..., L]`` integers: tokens of one row of the batch with the same id belong to one sequence, even
            if they are not neighbours, as on a context-parallel rank. Under ``axis_name``, give the ids of the shard's
            rows (`of_rank`). None: see ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers, as in `next_tokens`. Under ``axis_name``, give the offsets in the shard's
            rows, ``cu_seqlens_padded // cp_size``, and leave padding out with ``where``.
        cu_seqlens_padded: as in `next_tokens`.
        padding_segment: as in `next_tokens`.

    Returns:
        ``[..., L]`` float32, float64 for a float64 ``x``. The result is differentiable. Under ``axis_name``, each shard
        gets the gradient of the sum of all shards' losses.

    Raises:
        ValueError, TypeError: shapes, dtypes, offsets or axes do not fit; the message has the values.

    Memory:
        The call takes O(L) per row of the batch. Under ``axis_name``, each device gathers the numbers of all shards.

    Numerics:
        The terms are added in pairs, then pairs of pairs, and so on, so that the error grows only with log L. The order
        depends on nothing but the ids and L.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> x = jnp.array([1.0, 2.0, 6.0, 4.0, 8.0])
        >>> rows.segment_mean(x, cu_seqlens=jnp.array([0, 3, 5]), where=x > 1).tolist()
        [4.0, 4.0, 4.0, 6.0, 6.0]
    """
    return _sum_rows(True, x, where, axis_name, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def segment_sum(
    x: ArrayLike, *, where: Bool[ArrayLike, "*b L"] | None = None, axis_name: str | tuple[str, ...] | None = None,
    segment_ids: Int[ArrayLike, "*b L"] | None = None, cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    cu_seqlens_padded: Int[ArrayLike, "n+1"] | None = None, padding_segment: int | None = None,
) -> Float[Array, "*b L"]:  # fmt: skip
    """Returns at each row the sum of ``x`` over the rows of its sequence. The arguments are those of `segment_mean`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> mask = jnp.array([True, True, False])  # how many of its tokens each sequence has
        >>> rows.segment_sum(mask, segment_ids=jnp.array([1, 1, 2])).tolist()
        [2.0, 2.0, 0.0]
    """
    return _sum_rows(False, x, where, axis_name, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def positions(
    length: int,
    cp_rank: int | Int[ArrayLike, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
) -> Int[Array, "L/cp_size"]:
    """Returns the positions, among all L tokens, of the rows of a context-parallel rank.

    Args:
        length: L, the number of tokens before the split.
        cp_rank: the rank, from 0; it may be traced, as ``jax.lax.axis_index`` is.
        cp_size: the number of ranks.
        layout: how a sequence is split. "zigzag": into ``2 * cp_size`` chunks, of which rank r has the chunks r and
            ``2 * cp_size - 1 - r``, as in Megatron, Transformer Engine and MaxText. This balances the load: causal
            attention takes the same work on every rank. "contiguous": into ``cp_size`` chunks, as in a plain ring.
        cu_seqlens: where each sequence begins, and L at the end. Each sequence is split separately, as Transformer
            Engine does with packed sequences (give ``cu_seqlens_padded`` if they are padded). None: the L tokens are
            split as one sequence.

    Returns:
        ``[L / cp_size]`` int32, the positions in the order of the rank's rows. If traced values are invalid, all
        positions are L, which is out of range.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other invalid values.

    Example:
        >>> from lce_jax import rows
        >>> [rows.positions(8, rank, 2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    return _locate_rows(scalars.integer("length", length), _check_rank(cp_rank), cp_size, layout, cu_seqlens)


def of_rank(
    x: ArrayLike,
    cp_rank: int | Int[ArrayLike, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """Returns the rows of a context-parallel rank.

    Shift labels before this call, because the label of a chunk's last row is in another chunk. ``x`` has L rows along
    ``axis``, and the result has ``L / cp_size``. `positions` documents the other arguments and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> labels = rows.next_tokens(jnp.array([5, 6, 7, 8]))
        >>> [rows.of_rank(labels, rank, 2).tolist() for rank in (0, 1)]
        [[6, -100], [7, 8]]
    """
    return _take(x, axis, _check_rank(cp_rank), cp_size, layout, cu_seqlens)


def in_rank_order(
    x: ArrayLike,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """Returns the rows of all context-parallel ranks, one rank after another, so that a mesh axis can split them.

    The arguments are those of `of_rank`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.in_rank_order(jnp.arange(8), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _take(x, axis, None, cp_size, layout, cu_seqlens)


def in_sequence_order(
    x: ArrayLike,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """Returns rows gathered from all ranks (``jax.lax.all_gather``) in the sequence's order again.

    This is the inverse of `in_rank_order`. The arguments are those of `of_rank`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.in_sequence_order(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _take(x, axis, None, cp_size, layout, cu_seqlens, inverse=True)


def _count_rows(x: Any, axis: int) -> int:
    """Returns how many rows an array has along ``axis``.

    Refuses rows that are split over an Explicit axis, because the next row may be on another device.
    """
    _checks.check_array("x", x)
    length = sequences.count_rows(x, axis)
    spec = _jax.partitions(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    axes = dict(enumerate(spec)).get(axis % x.ndim)
    if axes is not None:
        raise ValueError(
            f"the rows of {tuple(x.shape)}, in dimension {axis % x.ndim}, are split over {axes!r}, an Explicit axis "
            "of the mesh: shift and order them before they are split, or pass jax.reshard(x, jax.P())"
        )
    return length


def _check_rank(value: Any) -> Any:
    """Returns a ``cp_rank`` as a Python integer, or unchanged if it is traced."""
    if scalars.is_integer(value):
        return value
    _checks.check_array("cp_rank", value, "an integer")
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"cp_rank must be one integer, got {value.dtype} of shape {tuple(value.shape)}")
    return jax.device_get(value).item() if _checks.is_concrete(value) else value


def _check_bound(axis_name: Any) -> Any:
    """Returns ``axis_name`` if an enclosing ``shard_map`` binds it, or None."""
    if axis_name is not None:
        _checks.find_axis_size(_options.OPTIONS["axis_name"].check("axis_name", axis_name), "leave axis_name out")
    return axis_name


def _cast_to_indices(x: Any) -> Any:
    return None if x is None else put_on_device(x).astype(int)


# The next two functions are jitted. Outside ``jit``, each Python number in an expression would be transferred to the
# device, which ``jax.transfer_guard`` may forbid.
@functools.partial(jax.jit, static_argnames=("invalid", "by", "padding_segment"), inline=True)
def _shift_array(x: Array, ids: Any, fill: Array, ends: Any, begins: Any, **static: Any) -> Array:
    return sequences.shift_array(jnp, jnp.arange, x, ids, ends, begins, fill, **static)


@functools.partial(jax.jit, static_argnames=("axis_name", "is_mean", "padding_segment"), inline=True)
def _sum_array(x: Array, ids: Any, where: Any, ends: Any, begins: Any, *, axis_name: Any, **static: Any) -> Array:
    def sum_terms(terms: Array, ids: Array) -> Array:
        like = ids if axis_name is None else (ids, lax.axis_index(axis_name))
        return _sum_segments(_jax.vary_like(terms, like), ids, axis_name)

    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return sequences.sum_array(jnp, jnp.arange, x, ids, ends, begins, where, sum_terms=sum_terms, **static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_segments(terms: Array, ids: Array, axis_name: Any) -> Array:
    """Computes `sequences.sum_segments` over the rows of all shards, and returns the results of this shard's rows."""
    # If the loop were unrolled, XLA would take a second to compile each step.
    compute = functools.partial(
        sequences.sum_segments, jnp, jnp.arange, jnp.take_along_axis, functools.partial(lax.fori_loop, 0)
    )
    if axis_name is None:
        return compute(terms, ids)
    gathered = (lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True) for x in (terms, ids))
    length = ids.shape[-1]
    return lax.dynamic_slice_in_dim(compute(*gathered), lax.axis_index(axis_name) * length, length, -1)


_sum_segments.defvjp(
    lambda terms, ids, axis_name: (_sum_segments(terms, ids, axis_name), ids),
    lambda axis_name, ids, cotangent: (_sum_segments(cotangent, ids, axis_name), None),
)


@functools.partial(jax.jit, static_argnames=("length", "cp_size", "chunks", "inverse"), inline=True)
def _compute_positions(begins: Any, rank: Any, **static: Any) -> Array:
    return sequences.compute_positions(jnp, jnp.arange, begins, rank, **static).astype(jnp.int32)


def _take(x: Any, axis: int, *arguments: Any, **options: Any) -> Array:
    """Returns the rows of ``x`` at the positions that `sequences.locate_rows` computes from the other arguments."""
    indices = _locate_rows(_count_rows(x, axis), *arguments, **options)
    fill = False if x.dtype == jnp.bool_ else None  # None fills with NaN, or with an extreme integer
    return jnp.take(put_on_device(x), indices, axis, mode="fill", fill_value=fill, unique_indices=True)


_JAX = sequences.Library(
    count_rows=_count_rows,
    check_integers=lambda name, x: _checks.check_labels(x, name),
    read_values=lambda x: jax.device_get(x).tolist() if _checks.is_concrete(x) else None,
    describe_dtype=lambda x: (
        x.dtype == jnp.bool_,
        jnp.iinfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else None,
    ),
    shift_array=lambda x, ids, ends, begins, fill, **static: _shift_array(
        *jax.tree.map(put_on_device, (x, ids, np.asarray(fill, x.dtype))),
        *map(_cast_to_indices, (ends, begins)),
        **static,
    ),
    sum_array=lambda x, ids, ends, begins, where, axis_name, **static: _sum_array(
        *jax.tree.map(put_on_device, (x, ids, where)),
        *map(_cast_to_indices, (ends, begins)),
        axis_name=_check_bound(axis_name),
        **static,
    ),
    compute_positions=lambda begins, rank, **static: _compute_positions(
        _cast_to_indices(begins), _cast_to_indices(rank), **static
    ),
)
_shift_rows = functools.partial(sequences.shift_rows, _JAX)
_sum_rows = functools.partial(sequences.sum_rows, _JAX)
_locate_rows = functools.partial(sequences.locate_rows, _JAX)
