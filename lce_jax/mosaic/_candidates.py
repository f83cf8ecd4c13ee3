"""Candidates: their logits from gathered rows of the weight, and their gradients in each chunk of dlogits.

The kernels that compute logits and dlogits ignore candidates. This module is array code between these kernels. In the
forward, candidates cost T·K dot products. In the backward, the dlogits of the candidates' columns are computed once, in
float32. After the kernel that computes a chunk's dlogits, the values of the chunk's candidates are rounded and written
into these; then the two products follow.

A value replaces the chunk's, and is not added to it, because the two terms of a nearly certain candidate's dlogits
nearly cancel, and the chunk is already rounded.

In `lce_jax.run.kernels`, small kernels do this work (`common._candidates`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._operands import RowFactors
from lce_jax.mosaic._threshold_tiles import Sizes, Worklist
from lce_jax.types._types import Call, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


@jax.named_scope("candidates")
def unscaled(kernel_call: KernelCall, columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """Computes the x of the candidates at these columns of the shard, -inf at the column -1."""
    x = kernel_call.operands
    raw = kernel_call.host.products(x.hidden, x.weight, columns, kernel_call.call, x.num_rows)
    return kernel_call.host.compute(_unscaled, raw, columns, x.raw_scale, kernel_call.call)


def _unscaled(xp: Any, raw: Array, columns: Array, raw_scale: Array | None, call: Call) -> Float[Array, "T K"]:
    x = _logprobs.unscaled_logits(
        raw[: len(columns)], call, raw_scale, _logprobs.softcap_tanh if xp is jnp else xp.tanh
    )
    return xp.where(columns >= 0, x, -xp.inf)


class PlacedCandidates(NamedTuple):
    """The candidates of a backward, and the values of dlogits at their places."""

    columns: Int[Array, "T K"]  # each column once per token; -1: no column
    values: Float[Array, "T K"]

    @jax.named_scope("candidates")
    def put(
        self, kernel_call: KernelCall, dlogits: Float[Array, "Tp columns"], column: Any, stop: Any
    ) -> Float[Array, "Tp columns"]:
        """Writes the values of the candidates from ``column`` to ``stop`` to a chunk's ``dlogits``."""
        return kernel_call.host.put(
            dlogits, *self, kernel_call.host.numbers(column, kernel_call.prepared.num_rows, stop)
        )

    @jax.named_scope("candidates")
    def entries(self, kernel_call: KernelCall, work: Worklist, sizes: Sizes) -> Int[Array, "T K"]:
        """Returns how many entries the list of active tiles has up to each candidate's tile."""
        return kernel_call.host.compute(_entries, self.columns, work.order, work.sums, sizes)


@jax.named_scope("candidates")
def place_candidates(
    kernel_call: KernelCall, factors: Float[Array, "factors Tp"], rows: RowCoefficients
) -> PlacedCandidates | None:
    """Returns the call's candidates with the values of their dlogits; None if no candidate has a gradient."""
    if kernel_call.operands.candidates is None or rows.candidates is None:
        return None
    per_token = kernel_call.prepared.targets, kernel_call.prepared.row_scale, factors, kernel_call.prepared.num_rows
    candidates = kernel_call.operands.candidates, rows.candidates, rows.at_candidates
    return _place(*candidates, *per_token, kernel_call.call.logit_softcap is not None)


def _place(
    columns: Any, terms: Any, x: Any, targets: Any, row_scale: Any, factors: Any, num_rows: Any, is_capped: bool
) -> PlacedCandidates:
    """Computes dlogits (eqs. 4, 5) in the candidates' columns. ``terms``: what each candidate's gradient adds."""
    T = len(columns)
    columns, terms, x = _logprobs.sum_repeats(columns, terms, x)
    rows = RowFactors.of([factor[:T, None] for factor in factors])
    values = rows.compute_dlogits(x, row_scale[:T, None], columns == targets[:T, None], is_capped) + terms
    is_unmasked = jnp.arange(T, dtype=jnp.int32)[:, None] < num_rows
    return PlacedCandidates(jnp.where(is_unmasked, columns, -1), values)


def _entries(xp: Any, columns: Any, order: Any, sums: Any, sizes: Sizes) -> Any:
    rank = xp.argsort(order)[columns // sizes.tile]  # arbitrary at the column -1
    return sums.reshape(sizes.tiles, -1)[rank, xp.arange(len(columns))[:, None] // sizes.row_block]


def find_columns(xp: Any, ids: Any, start: int, columns: int) -> Any:
    """Returns the columns of the ids in this shard; -1 for ids of other shards."""
    return xp.where((ids >= start) & (ids < start + columns), ids - start, -1)
