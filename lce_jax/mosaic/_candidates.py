"""Candidates, beside the big kernels: logits from gathered rows of the weight, gradients in each chunk's dlogits.

The kernels of logits and of dlogits do not know them: this is array code between them. In the forward candidates cost
T·K dot products. In the backward, what stands at their places is computed once, in float32. A chunk of dlogits gets it
after its kernel and before the two products that read it, rounded once.

It is all that stands there, not what is to be added: where a candidate is nearly certain, its terms nearly cancel the
rest, which a chunk holds rounded.

In the passes of `lce_jax.run.kernels`, small kernels compute the same (`common._candidates`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._live_tiles import Sizes, Worklist
from lce_jax.mosaic._operands import RowFactors
from lce_jax.types._types import Call, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


@jax.named_scope("candidates")
def unscaled(kernel_call: KernelCall, columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The x of the candidates at these columns of the shard, -inf at -1."""
    x = kernel_call.operands
    raw = kernel_call.host.products(x.hidden, x.weight, columns, kernel_call.call, x.num_rows)
    return kernel_call.host.compute(_unscaled, raw, columns, x.raw_scale, kernel_call.call)


def _unscaled(xp: Any, raw: Array, columns: Array, raw_scale: Array | None, call: Call) -> Float[Array, "T K"]:
    x = _logprobs.unscaled_logits(
        raw[: len(columns)], call, raw_scale, _logprobs.softcap_tanh if xp is jnp else xp.tanh
    )
    return xp.where(columns >= 0, x, -xp.inf)


class PlacedCandidates(NamedTuple):
    """The candidates of a backward, and what stands in dlogits at the place of each."""

    columns: Int[Array, "T K"]  # once each; -1: none
    values: Float[Array, "T K"]

    @jax.named_scope("candidates")
    def put(
        self, kernel_call: KernelCall, dlogits: Float[Array, "Tp columns"], column: Any, stop: Any
    ) -> Float[Array, "Tp columns"]:
        """A chunk's ``dlogits``, of columns from ``column`` on, with the values of the candidates before ``stop``."""
        return kernel_call.host.put(
            dlogits, *self, kernel_call.host.numbers(column, kernel_call.prepared.num_rows, stop)
        )

    @jax.named_scope("candidates")
    def entries(self, kernel_call: KernelCall, work: Worklist, sizes: Sizes) -> Int[Array, "T K"]:
        """How many entries of live tiles there are up to that of each candidate, whose tile is live."""
        return kernel_call.host.compute(_entries, self.columns, work.order, work.sums, sizes)


@jax.named_scope("candidates")
def of_rows(
    kernel_call: KernelCall, factors: Float[Array, "factors Tp"], rows: RowCoefficients
) -> PlacedCandidates | None:
    """The call's own, if there are any with a gradient."""
    if kernel_call.operands.candidates is None or rows.candidates is None:
        return None
    of_rows = kernel_call.prepared.targets, kernel_call.prepared.row_scale, factors, kernel_call.prepared.num_rows
    given = kernel_call.operands.candidates, rows.candidates, rows.at_candidates
    return _placed(*given, *of_rows, kernel_call.call.logit_softcap is not None)


def _placed(
    columns: Any, terms: Any, x: Any, targets: Any, row_scale: Any, factors: Any, num_rows: Any, is_capped: bool
) -> PlacedCandidates:
    """What stands at their places, from what each adds there, and from its x all else: eqs. 4 and 5, in base 2."""
    T = len(columns)
    columns, terms, x = _logprobs.sum_repeats(columns, terms, x)
    rows = RowFactors.of([factor[:T, None] for factor in factors])
    values = rows.at(x, row_scale[:T, None], columns == targets[:T, None], is_capped) + terms
    counts = jnp.arange(T, dtype=jnp.int32)[:, None] < num_rows
    return PlacedCandidates(jnp.where(counts, columns, -1), values)


def _entries(xp: Any, columns: Any, order: Any, sums: Any, sizes: Sizes) -> Any:
    rank = xp.argsort(order)[columns // sizes.tile]  # anything at the column -1
    return sums.reshape(sizes.tiles, -1)[rank, xp.arange(len(columns))[:, None] // sizes.row_block]


def columns_of(xp: Any, ids: Any, start: int, columns: int) -> Any:
    """The shard's columns, -1 where it does not own the id."""
    return xp.where((ids >= start) & (ids < start + columns), ids - start, -1)
