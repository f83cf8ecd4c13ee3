"""Rows of packed sequences and of context-parallel ranks: labels, masks and results that belong to them.

Every function of `lce_jax` works row by row: a hidden state and its label. So packing and context parallelism ask one
thing alone, that each row has the label of its own sequence's next token:

    labels = rows.next_tokens(tokens, segment_ids=segment_ids)           # -100 at the last token of each sequence
    labels = rows.of_rank(labels, cp_rank, cp_size)                      # after the shift, never before it
    loss = linear_cross_entropy(hidden, weight, labels)                  # hidden: the rank's own

Shapes are static, so all of them run under ``jit``, with a traced ``cp_rank`` too. What is traced cannot be refused: if
offsets or a rank do not fit, all that is returned is NaN, the least integer (of unsigned ones the largest) or False.
`lce_torch_bridge.rows` has the same functions for tensors. L is the length of a row of tokens, which may hold several
sequences one after another.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax.call import _checks
from lce_jax.call._describe import on_device
from lce_jax.types import _jax, scalars, sequences

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Int

type Layout = Literal["zigzag", "contiguous"]

__all__ = ["at_tokens", "in_rank_order", "in_sequence_order", "next_tokens", "next_values", "of_rank", "positions"]


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
    """The label of each row: the next token of its sequence, or one further ahead; -100 where there is none.

    `lce_jax.linear_cross_entropy` leaves labels of -100 out; elsewhere give ``ignore_index=-100``.

    Args:
        tokens: ``[..., L]`` integers.
        ahead: which token of the sequence is meant: 1 is the next one, 2 the one after it. Multi-token prediction has
            k + 1 at depth k.
        segment_ids: ``[..., L]`` integers: neighbours with the same id are of one sequence. None: see ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers that rise from 0: sequence i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens,
            and what comes after the last one is padding. Repeat the last offset to fill a static shape up. None,
            without ``segment_ids`` too: each row is one sequence.
        cu_seqlens_padded: ``[n + 1]``, where each sequence begins if it is padded to a multiple. None: ``cu_seqlens``.
        padding_segment: the id of ``segment_ids`` that marks padding, 0 in MaxText and Tunix. None: no id does.

    Returns:
        ``[..., L]`` in the dtype of ``tokens``.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.next_tokens(jnp.array([5, 6, 7, 8, 9]), cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [6, 7, -100, 9, -100]
        >>> rows.next_tokens(jnp.array([5, 6, 7, 8, 9]), ahead=2, cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [7, -100, -100, -100, -100]
    """
    _checks.label_array(tokens, "tokens")
    if not jnp.issubdtype(tokens.dtype, jnp.signedinteger):
        raise TypeError(f"tokens must be signed, to hold labels of {scalars.IGNORED}, got {tokens.dtype}")
    return _shift(-1, tokens, scalars.IGNORED, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


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
    """What tokens come with (a mask, an advantage, an old log-probability), at the rows that predict them.

    ``values`` ``[..., L]`` are a number or bool per token; rows without such a token have ``fill``. `next_tokens` says
    what the other arguments are, and what is refused.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> answer = jnp.array([False, True, True, False, True])
        >>> rows.next_values(answer, fill=False, segment_ids=jnp.array([1, 1, 1, 2, 2])).tolist()
        [True, True, False, True, False]
    """
    return _shift(-1, values, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


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
    """The inverse of `next_values`: what rows have (log-probabilities), at the tokens that they predict.

    ``results`` ``[..., L]`` are a number or bool per row; the first ``ahead`` tokens of each sequence and padding have
    ``fill``. `next_tokens` says what the other arguments are, and what is refused.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> logprobs = jnp.array([-1.0, -2.0, -3.0, -4.0, -5.0])
        >>> rows.at_tokens(logprobs, cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [0.0, -1.0, -2.0, 0.0, -4.0]
    """
    return _shift(1, results, fill, ahead, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)


def positions(
    length: int,
    cp_rank: int | Int[ArrayLike, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
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
        ``[L / cp_size]`` int32, the rank's rows in its own order. All are L, which is no row, if what is traced does
        not fit.

    Raises:
        ValueError, TypeError: lengths that do not divide, and other values that do not fit.

    Example:
        >>> from lce_jax import rows
        >>> [rows.positions(8, rank, 2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    return _places(scalars.integer("length", length), _rank(cp_rank), cp_size, layout, cu_seqlens)


def of_rank(
    x: ArrayLike,
    cp_rank: int | Int[ArrayLike, ""],
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """The rows of a context-parallel rank. Shift first: the label of a chunk's last row stands in another chunk.

    ``x`` has L rows along ``axis``, of which ``L / cp_size`` remain. `positions` says what the other arguments are, and
    what is refused.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> labels = rows.next_tokens(jnp.array([5, 6, 7, 8]))
        >>> [rows.of_rank(labels, rank, 2).tolist() for rank in (0, 1)]
        [[6, -100], [7, 8]]
    """
    return _take(x, axis, _rank(cp_rank), cp_size, layout, cu_seqlens)


def in_rank_order(
    x: ArrayLike,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Int[ArrayLike, "n+1"] | None = None,
    axis: int = -1,
) -> Array:
    """The rows of all context-parallel ranks, one rank after another: an array to be split over a mesh axis.

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
    """The inverse of `in_rank_order`: what is gathered from all ranks (``jax.lax.all_gather``), as it was before.

    The arguments are those of `of_rank`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> rows.in_sequence_order(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _take(x, axis, None, cp_size, layout, cu_seqlens, inverse=True)


def _num_rows(x: Any, axis: int) -> int:
    """How many rows an array has along ``axis``. They must not be split: a neighbour may be on another device."""
    _checks.array("x", x)
    length = sequences.num_rows(x, axis)
    spec = _jax.partitions(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    split = dict(enumerate(spec)).get(axis % x.ndim)
    if split is not None:
        raise ValueError(
            f"the rows of {tuple(x.shape)}, in dimension {axis % x.ndim}, are split over {split!r}, an Explicit axis "
            "of the mesh: shift and order them before they are split, or pass jax.reshard(x, jax.P())"
        )
    return length


def _rank(value: Any) -> Any:
    """A ``cp_rank``: an integer of Python, or a traced one."""
    if scalars.is_integer(value):
        return value
    _checks.array("cp_rank", value, "an integer")
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"cp_rank must be one integer, got {value.dtype} of shape {tuple(value.shape)}")
    return jax.device_get(value).item() if _checks.is_concrete(value) else value


def _indices(x: Any) -> Any:
    return None if x is None else on_device(x).astype(int)


# Jitted: outside ``jit`` each number in an expression is a transfer, which ``jax.transfer_guard`` may forbid.
@functools.partial(jax.jit, static_argnames=("nothing", "by", "padding_segment"), inline=True)
def _shifted(x: Array, ids: Any, fill: Array, ends: Any, begins: Any, **static: Any) -> Array:
    return sequences.shifted(jnp, jnp.arange, x, ids, ends, begins, fill, **static)


@functools.partial(jax.jit, static_argnames=("length", "cp_size", "chunks", "inverse"), inline=True)
def _positions(begins: Any, rank: Any, **static: Any) -> Array:
    return sequences.positions(jnp, jnp.arange, begins, rank, **static).astype(jnp.int32)


def _take(x: Any, axis: int, *said: Any, **more: Any) -> Array:
    places = _places(_num_rows(x, axis), *said, **more)
    fill = False if x.dtype == jnp.bool_ else None  # else what `sequences.shift` calls nothing
    return jnp.take(on_device(x), places, axis, mode="fill", fill_value=fill, unique_indices=True)


_JAX = sequences.Library(
    num_rows=_num_rows,
    integers=lambda name, x: _checks.label_array(x, name),
    values=lambda x: jax.device_get(x).tolist() if _checks.is_concrete(x) else None,
    kind=lambda x: (x.dtype == jnp.bool_, jnp.iinfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else None),
    shifted=lambda x, ids, ends, begins, fill, **static: _shifted(
        *jax.tree.map(on_device, (x, ids, np.asarray(fill, x.dtype))), *map(_indices, (ends, begins)), **static
    ),
    positions=lambda begins, rank, **static: _positions(_indices(begins), _indices(rank), **static),
)
_shift = functools.partial(sequences.shift, _JAX)
_places = functools.partial(sequences.places, _JAX)
