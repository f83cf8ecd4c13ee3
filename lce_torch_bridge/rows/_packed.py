"""Packed sequences: what rows and tokens have to do with each other within a sequence."""

from __future__ import annotations

import torch

from lce_jax import scalars
from lce_torch_bridge.call import _checks, _packing

__all__ = ["at_tokens", "next_tokens", "next_values"]


def next_tokens(
    tokens: torch.Tensor,
    *,
    ahead: int = 1,
    segment_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    padding_segment: int | None = None,
) -> torch.Tensor:
    """The label of each row: the next token of its sequence, or one further ahead; -100 where there is none.

    `lce_torch_bridge.linear_cross_entropy` leaves labels of -100 out; elsewhere give ``ignore_index=-100``.

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
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. Offsets on a GPU
            are not checked: if they do not fit, all that is returned is NaN, the least integer (the largest unsigned
            one) or False.

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
        raise TypeError(f"tokens must be signed, to hold labels of {scalars.IGNORED}, got {tokens.dtype}")
    packing = _packing.of(tokens, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(tokens, scalars.IGNORED, -scalars.ahead(ahead), packing)


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
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. Offsets on a GPU
            are not checked: if they do not fit, all that is returned is NaN, the least integer (the largest unsigned
            one) or False.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> answer = torch.tensor([False, True, True, False, True])
        >>> rows.next_values(answer, fill=False, segment_ids=torch.tensor([1, 1, 1, 2, 2])).tolist()
        [True, True, False, True, False]
    """
    packing = _packing.of(values, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(values, _packing.fill_of(fill, values), -scalars.ahead(ahead), packing)


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
        ValueError, TypeError: shapes, dtypes or offsets that do not fit, with the offending values. Offsets on a GPU
            are not checked: if they do not fit, all that is returned is NaN, the least integer (the largest unsigned
            one) or False.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import rows
        >>> logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
        >>> rows.at_tokens(logprobs, cu_seqlens=torch.tensor([0, 3, 5])).tolist()
        [0.0, -1.0, -2.0, 0.0, -4.0]
    """
    packing = _packing.of(results, segment_ids, cu_seqlens, cu_seqlens_padded, padding_segment)
    return _packing.shifted(results, _packing.fill_of(fill, results), scalars.ahead(ahead), packing)
