"""Candidates in the passes of `lce_jax.kernels`: array code over torch beside the kernels.

forward    columns ─ x ─ (exchange between shards) … keep         ids and x are saved of each token
backward   terms ─ coefficients ─ what stands at their places … dlogits ─ put …
"""

from __future__ import annotations

from typing import Any

from lce_jax import scalars
from lce_jax.mathematics import _logprobs
from lce_jax.mosaic import _partial_statistics

type Kind = Any  # that of `lce_jax.kernels`, which imports this module


def columns_of(xp: Any, ids: Any, kind: Kind) -> Any:
    """The shard's columns, -1 where it does not own the id."""
    live = kind.num_columns if kind.live_columns is None else kind.live_columns
    return xp.where((ids >= kind.start) & (ids < kind.start + live), ids - kind.start, -1)


def keep(xp: Any, saved: Any, ids: Any, x: Any, kind: Kind) -> tuple[Any, Any]:
    """``saved`` with both, and the log-probabilities: NaN where a row's statistics are."""
    fields, (first, last) = _fields(saved, kind), (kind.first_statistic, kind.saved_fields)
    fields.view(xp.int32)[first - kind.num_candidates : first] = ids.T
    fields[last - kind.num_candidates : last] = x.T
    names = _partial_statistics.kept(kind.case.options)
    highest, sumexp = (fields[first + names.index(name), :, None] for name in ("max", "sumexp"))
    scale = _logprobs.row_scale(kind.case.options, _inverse_temperature(xp, fields, kind)[0])
    found = _logprobs.candidate_logprobs(x, highest, scale, xp.log(sumexp), xp)
    return saved, xp.where(highest == highest, found, xp.nan)


def terms(xp: Any, saved: Any, seed: Any, total: Any, kind: Kind) -> tuple[Any, Any, Any, Any]:
    """The columns, what each adds to dlogits (eqs. 4, 5), their x, and ``total``, memory, with the Σ g of eq. 4."""
    fields, first = _fields(saved, kind), kind.first_statistic
    ids, x = fields.view(xp.int32)[first - kind.num_candidates : first].T, fields[-kind.num_candidates :].T
    inverse, there = _inverse_temperature(xp, fields, kind)
    factor = _logprobs.row_factor(kind.case.options, inverse)
    dcap = None if kind.logit_softcap is None else _logprobs.cap_derivative
    g, added = _logprobs.candidate_terms(x, seed, factor, dcap, xp)
    total[: len(g)] = g.sum(1)
    return columns_of(xp, ids, kind), added if there is None else xp.where(there, added, 0.0), x, total


def _fields(saved: Any, kind: Kind) -> Any:
    return saved.view(kind.saved_fields, -1)


def _inverse_temperature(xp: Any, fields: Any, kind: Kind) -> tuple[Any, Any]:
    """[T, 1], 1 where a row has no such temperature, and which have one; None if there are none."""
    if not kind.has_temperature:
        return None, None
    there = scalars.is_temperature(fields[1, :, None])
    return 1.0 / xp.where(there, xp.clip(fields[1, :, None], _logprobs.SMALLEST, None), 1.0), there
