"""Candidates, beside the big kernels: logits from gathered rows of the weight, gradients in each chunk's dlogits.

The kernels of logits and of dlogits do not know them. In the forward they cost T·K dot products. In the backward a
chunk of dlogits gets what stands at the candidates' places after its kernel and before the two products that read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax._types import RowCoefficients
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._host import least
from lce_jax.mosaic._live_tiles import Batches, Worklist
from lce_jax.mosaic.common._candidates import candidate_logits, candidate_values, gathers
from lce_jax.mosaic.common._put_candidates import put_candidates, put_live_candidates
from lce_jax.xla import _logits

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class Fields(NamedTuple):
    """How candidates lie: flat, a field of ``stride`` numbers for each, in which those of a token lie side by side."""

    ids: int  # the field of the first one's id
    x: int  # that of its x, in another array or in the same
    rows: Any  # of each field
    stride: Any
    start: Any  # the id of the shard's first column

    @classmethod
    def of(cls, call: KernelCall) -> Fields:
        """Those of `flat`."""
        return cls(0, 0, call.shape.padded_tokens, call.shape.padded_tokens, 0)


class PlacedCandidates(NamedTuple):
    """The candidates of a backward, and what stands in dlogits at the place of each."""

    ids: Int[Array, "n"]
    values: Float[Array, "K*stride"]
    fields: Fields


@jax.named_scope("candidates")
def unscaled(call: KernelCall) -> Float[Array, "T K"] | None:
    """The x of the candidates that this shard owns, -inf at the others."""
    candidates, fields = call.operands.candidates, Fields.of(call)
    if candidates is None:
        return None
    if not gathers(call.case):
        return _logits.unscaled_candidates(call.operands, call.case)
    memory = call.host.empty((candidates.shape[1] * fields.stride,), jnp.float32)
    x = logits(call, flat(call, candidates), memory, fields, fields.stride)
    return x.reshape(-1, fields.stride).T[: call.case.num_tokens]


def logits(
    call: KernelCall, ids: Int[Array, "n"], x: Float[Array, "m"], fields: Fields, x_stride: Any
) -> Float[Array, "m"]:
    """``x`` with those of the candidates in their fields, which lie ``x_stride`` numbers apart."""
    prepared = call.prepared
    numbers = call.host.numbers(prepared.num_rows, fields.stride, x_stride, fields.start, prepared.num_columns)
    memory = call.host.vary_like(x, (prepared, ids))
    first = fields.ids, fields.x
    return call.host.launch(candidate_logits, call.case, prepared.hidden, prepared.weight, ids, memory, numbers, first)


@jax.named_scope("candidates")
def of_rows(call: KernelCall, factors: Float[Array, "factors Tp"], rows: RowCoefficients) -> PlacedCandidates | None:
    """The call's own, if there are any with a gradient."""
    candidates = call.operands.candidates
    if candidates is None or rows.candidates is None or rows.at_candidates is None:
        return None
    ids, x, terms = (flat(call, y) for y in (candidates, rows.at_candidates, rows.candidates))
    return placed(call, factors, ids, x, terms, Fields.of(call))


def placed(
    call: KernelCall,
    factors: Float[Array, "factors Tp"],
    ids: Int[Array, "n"],
    x: Float[Array, "m"],
    terms: Float[Array, "K*stride"],
    fields: Fields,
) -> PlacedCandidates:
    """What stands at their places, from what each adds there, and from its x all else."""
    prepared = call.prepared
    numbers = call.host.numbers(fields.rows, fields.stride, fields.start)
    per_token = prepared.targets, prepared.scale, factors
    first = fields.ids, fields.x
    values = call.host.launch(candidate_values, call.case, ids, x, terms, *per_token, numbers, first)
    return PlacedCandidates(ids, values, fields)


@jax.named_scope("candidates")
def put(
    call: KernelCall, candidates: PlacedCandidates | None, dlogits: Float[Array, "Tp columns"], column: Any, stop: Any
) -> Float[Array, "Tp columns"]:
    """A chunk's ``dlogits``, of columns from ``column`` on, with the values of the candidates before column ``stop``.

    Each is rounded once, to the chunk's dtype.
    """
    if candidates is None:
        return dlogits
    fields, end = candidates.fields, least(stop, call.prepared.num_columns)
    numbers = call.host.numbers(call.prepared.num_rows, fields.stride, fields.start, column, end)
    given = dlogits, candidates.ids, candidates.values
    return call.host.launch(put_candidates, call.case, *given, numbers, fields.ids)


@jax.named_scope("candidates")
def put_live(
    call: KernelCall,
    candidates: PlacedCandidates | None,
    dlogits: Float[Array, "slots*blocks tile"],
    work: Worklist,
    batches: Batches,
    batch: Int[Array, "1"],
) -> Float[Array, "slots*blocks tile"]:
    """The same of a batch of live tiles."""
    if candidates is None:
        return dlogits
    ids, values, fields = candidates
    numbers = call.host.numbers(call.prepared.num_rows, fields.stride, fields.start)
    given = dlogits, ids, values, work, batches, batch
    return call.host.launch(put_live_candidates, call.case, *given, numbers, fields.ids)


def flat(call: KernelCall, per_candidate: Array) -> Array:
    """``[T, K]`` as the kernels take it, in whole blocks of rows."""
    missing = call.shape.padded_tokens - per_candidate.shape[0]
    return jnp.pad(per_candidate, ((0, missing), (0, 0))).T.reshape(-1)
