"""Candidates, beside the big kernels: logits from gathered rows of the weight, gradients in each chunk's dlogits.

The kernels of logits and of dlogits do not know them: this is array code between them, over ``xp``, which is
``jax.numpy`` or torch. In the forward candidates cost T·K dot products. In the backward, what stands at their places is
computed once, in float32. A chunk of dlogits gets it after its kernel and before the two products that read it, rounded
once.

It is all that stands there, not what is to be added: where a candidate is nearly certain, its terms nearly cancel the
rest, which a chunk holds rounded.

Candidates in the passes of `lce_jax.kernels`: array code over torch beside the kernels.

forward    columns ─ x ─ (exchange between shards) … keep         ids and x are saved of each token
backward   terms ─ coefficients ─ what stands at their places … dlogits ─ put …
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax import scalars
from lce_jax._types import Call, RowCoefficients
from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic import _operands
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._live_tiles import Sizes, Worklist
from lce_jax.mosaic._operands import RowFactors

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


@jax.named_scope("candidates")
def unscaled(call: KernelCall, columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The x of the candidates at these columns of the shard, -inf at -1."""
    x = call.operands
    raw = call.host.products(x.hidden, x.weight, columns, call.case, x.num_rows)
    return call.host.compute(_unscaled, raw, columns, x.raw_scale, call.case)


def _unscaled(xp: Any, raw: Array, columns: Array, raw_scale: Array | None, case: Call) -> Float[Array, "T K"]:
    x = _logprobs.unscaled_logits(
        raw[: len(columns)], case, raw_scale, _logprobs.softcap_tanh if xp is jnp else xp.tanh
    )
    return xp.where(columns >= 0, x, -xp.inf)


class PlacedCandidates(NamedTuple):
    """The candidates of a backward, and what stands in dlogits at the place of each."""

    columns: Int[Array, "T K"]  # once each; -1: none
    values: Float[Array, "T K"]

    @jax.named_scope("candidates")
    def put(
        self, call: KernelCall, dlogits: Float[Array, "Tp columns"], column: Any, stop: Any
    ) -> Float[Array, "Tp columns"]:
        """A chunk's ``dlogits``, of columns from ``column`` on, with the values of the candidates before ``stop``."""
        return call.host.put(dlogits, *self, call.host.numbers(column, call.prepared.num_rows, stop))

    @jax.named_scope("candidates")
    def entries(self, call: KernelCall, work: Worklist, sizes: Sizes) -> Int[Array, "T K"]:
        """How many entries of live tiles there are up to that of each candidate, whose tile is live."""
        return call.host.compute(_entries, self.columns, work.order, work.sums, sizes)


@jax.named_scope("candidates")
def of_rows(call: KernelCall, factors: Float[Array, "factors Tp"], rows: RowCoefficients) -> PlacedCandidates | None:
    """The call's own, if there are any with a gradient."""
    if call.operands.candidates is None or rows.candidates is None:
        return None
    return placed(call, factors, call.operands.candidates, rows.candidates, rows.at_candidates)


def placed(
    call: KernelCall, factors: Float[Array, "factors Tp"], columns: Int[Array, "T K"], terms: Array, x: Any
) -> PlacedCandidates:
    """What stands at their places, from what each adds there, and from its x all else."""
    of_rows = call.prepared.targets, call.prepared.scale, factors, call.prepared.num_rows
    return call.host.compute(_placed, columns, terms, x, *of_rows, call.case.logit_softcap is not None)


def _placed(
    xp: Any, columns: Any, terms: Any, x: Any, targets: Any, scale: Any, factors: Any, num_rows: Any, is_capped: bool
) -> PlacedCandidates:
    """Eqs. 4 and 5, in base 2."""
    T = len(columns)
    columns, terms, x = _logprobs.add_repeats(columns, terms, x, xp=xp)
    rows = RowFactors(*(factor[:T, None] for factor in factors), *[None] * (4 - len(factors)))
    u = xp.clip((x - rows.max) * scale[:T, None], MASKED, 0.0)
    e = xp.exp2(u)
    d = rows.constant * e
    d = d if rows.slope is None else d + rows.slope * (u * e)
    d = d * _logprobs.cap_derivative(x) if is_capped else d
    counts = xp.arange(T, dtype=xp.int32)[:, None] < num_rows
    values = xp.where(columns == targets[:T, None], rows.target, d) + terms
    return PlacedCandidates(xp.where(counts, columns, -1), values)


def _entries(xp: Any, columns: Any, order: Any, sums: Any, sizes: Sizes) -> Any:
    rank = xp.argsort(order)[columns // sizes.tile]  # anything at the column -1
    return sums.reshape(sizes.tiles, -1)[rank, xp.arange(len(columns))[:, None] // sizes.row_block]


type Kind = Any  # that of `lce_jax.kernels`, which imports this module


def columns_of(xp: Any, ids: Any, kind: Kind) -> Any:
    """The shard's columns, -1 where it does not own the id."""
    live = kind.columns if kind.live_columns is None else kind.live_columns
    return xp.where((ids >= kind.start) & (ids < kind.start + live), ids - kind.start, -1)


def keep(xp: Any, saved: Any, ids: Any, x: Any, kind: Kind) -> tuple[Any, Any]:
    """``saved`` with both, and the log-probabilities: NaN where a row's statistics are."""
    fields, (first, last) = _fields(saved, kind), (kind.first_statistic, kind.saved_fields)
    fields.view(xp.int32)[first - kind.num_candidates : first] = ids.T
    fields[last - kind.num_candidates : last] = x.T
    names = _operands.kept_statistics(kind.case)
    highest, sumexp = (fields[first + names.index(name), :, None] for name in ("max", "sumexp"))
    scale = _logprobs.row_scale(kind.case, _inverse_temperature(xp, fields, kind)[0])
    found = _logprobs.candidate_logprobs(x, highest, scale, xp.log(sumexp), xp)
    return saved, xp.where(highest == highest, found, xp.nan)


def terms(xp: Any, saved: Any, seed: Any, total: Any, kind: Kind) -> tuple[Any, Any, Any, Any]:
    """The columns, what each adds to dlogits (eqs. 4, 5), their x, and ``total``, memory, with the Σ g of eq. 4."""
    fields, first = _fields(saved, kind), kind.first_statistic
    ids, x = fields.view(xp.int32)[first - kind.num_candidates : first].T, fields[-kind.num_candidates :].T
    inverse, there = _inverse_temperature(xp, fields, kind)
    factor = _logprobs.row_factor(kind.case, inverse)
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
