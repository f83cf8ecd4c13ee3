"""Packed sequences: what rows and tokens have to do with each other within a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from lce_jax import scalars
from lce_jax.call import _checks, _packing

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int

__all__ = ["at_tokens", "next_tokens", "next_values"]


def next_tokens(
    tokens: Int[Array, "*b L"],
    *,
    ahead: int = 1,
    segment_ids: Int[Array, "*b L"] | None = None,
    cu_seqlens: Int[Array, "n+1"] | None = None,
    cu_seqlens_padded: Int[Array, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Int[Array, "*b L"]:
    """The label of each row: the next token of its sequence, or one further ahead; -100 where there is none.

    `lce_jax.linear_cross_entropy` leaves labels of -100 out; elsewhere give ``where=labels != -100``.

    Args:
        tokens: ``[..., L]`` integers.
        ahead: which token of the sequence is meant: 1 is the next one, 2 the one after it. Multi-token prediction has
            k + 1 at depth k.
        segment_ids: ``[..., L]`` integers: neighbours with the same id are of one sequence. None: see ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers that rise from 0: sequence i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens,
            and what comes after the last one is padding. None, without ``segment_ids`` too: each row is one sequence.
        cu_seqlens_padded: ``[n + 1]``, where each sequence begins if it is padded to a multiple. None: ``cu_seqlens``.
        padding_segment: the id of ``segment_ids`` that marks padding, 0 in MaxText and Tunix. None: no id does.

    Returns:
        ``[..., L]`` in the dtype of ``tokens``.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. If traced offsets
            do not fit, all that is returned is NaN, the least integer (the largest unsigned one) or False.

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
    packing = _packing.of(tokens, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(tokens, scalars.IGNORED, -scalars.ahead(ahead), packing)


def next_values(
    values: Array,
    *,
    fill: float,
    ahead: int = 1,
    segment_ids: Int[Array, "*b L"] | None = None,
    cu_seqlens: Int[Array, "n+1"] | None = None,
    cu_seqlens_padded: Int[Array, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Array:
    """What tokens come with (a mask, an advantage, an old log-probability), at the rows that predict them.

    Args:
        values: ``[..., L]``, a number or bool per token.
        fill: what rows without such a token have.
        ahead: which token of the sequence is meant: 1 is the next one, 2 the one after it. Multi-token prediction has
            k + 1 at depth k.
        segment_ids: ``[..., L]`` integers: neighbours with the same id are of one sequence. None: see ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers that rise from 0: sequence i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens,
            and what comes after the last one is padding. None, without ``segment_ids`` too: each row is one sequence.
        cu_seqlens_padded: ``[n + 1]``, where each sequence begins if it is padded to a multiple. None: ``cu_seqlens``.
        padding_segment: the id of ``segment_ids`` that marks padding, 0 in MaxText and Tunix. None: no id does.

    Returns:
        ``[..., L]`` in the dtype of ``values``.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. If traced offsets
            do not fit, all that is returned is NaN, the least integer (the largest unsigned one) or False.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> answer = jnp.array([False, True, True, False, True])
        >>> rows.next_values(answer, fill=False, segment_ids=jnp.array([1, 1, 1, 2, 2])).tolist()
        [True, True, False, True, False]
    """
    packing = _packing.of(values, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(values, _packing.fill_of(fill, values), -scalars.ahead(ahead), packing)


def at_tokens(
    results: Array,
    *,
    fill: float = 0.0,
    ahead: int = 1,
    segment_ids: Int[Array, "*b L"] | None = None,
    cu_seqlens: Int[Array, "n+1"] | None = None,
    cu_seqlens_padded: Int[Array, "n+1"] | None = None,
    padding_segment: int | None = None,
) -> Array:
    """The inverse of `next_values`: what rows have (log-probabilities), at the tokens that they predict.

    Args:
        results: ``[..., L]``, a number or bool per row.
        fill: what the first tokens of each sequence have, ``ahead`` of them, and padding.
        ahead: which token of the sequence is meant: 1 is the next one, 2 the one after it. Multi-token prediction has
            k + 1 at depth k.
        segment_ids: ``[..., L]`` integers: neighbours with the same id are of one sequence. None: see ``cu_seqlens``.
        cu_seqlens: ``[n + 1]`` integers that rise from 0: sequence i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens,
            and what comes after the last one is padding. None, without ``segment_ids`` too: each row is one sequence.
        cu_seqlens_padded: ``[n + 1]``, where each sequence begins if it is padded to a multiple. None: ``cu_seqlens``.
        padding_segment: the id of ``segment_ids`` that marks padding, 0 in MaxText and Tunix. None: no id does.

    Returns:
        ``[..., L]`` in the dtype of ``results``.

    Raises:
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. If traced offsets
            do not fit, all that is returned is NaN, the least integer (the largest unsigned one) or False.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import rows
        >>> logprobs = jnp.array([-1.0, -2.0, -3.0, -4.0, -5.0])
        >>> rows.at_tokens(logprobs, cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [0.0, -1.0, -2.0, 0.0, -4.0]
    """
    packing = _packing.of(results, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(results, _packing.fill_of(fill, results), scalars.ahead(ahead), packing)
