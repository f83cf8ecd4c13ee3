"""The gradients: dlogits chunk by chunk, each chunk feeding the two products that give dhidden and dweight.

The chunks run in `lax.fori_loop`, one of them alive at a time. The first come from the cache, if there is one. Where
the cache may be overwritten, they are one chunk, which takes the cache's memory. The others come from the recomputing
kernel. What the kernels leave out, a few columns at the end of the vocabulary, goes through plain XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat
from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _cache, _candidates, _chunks, _dhidden, _mean, _operands, _remainder
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._operands import RowFactors
from lce_jax.mosaic._span import Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float

type Carry = tuple[Float[Array, "splits Tp Hp"], Float[Array, "V H"]]  # parts of dhidden, and dweight


class Part(NamedTuple):
    """A range of vocabulary tiles whose dlogits come from the same kernel."""

    chunks: range  # the first tile of each; the step is the number of tiles of a chunk
    dlogits: Callable[[Array, int, Array], Array]  # (packed span, columns, the span's weight) -> dlogits
    rows: RowCoefficients


def gradients(
    operands: Operands,
    case: Case,
    kernels: KernelSet,
    rows: RowCoefficients,
    cache: Cache | None,
    may_round_dhidden: bool,
    may_overwrite_cache: bool,
    dweight: Float[Array, "V H"] | None = None,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """Eq. 5 of the whole shard: dhidden, anything on rows that are not live, and dweight in the weight's dtype.

    dhidden is in fp32, or in the weight's dtype where that is allowed and one launch computes all of it. With
    ``dweight``, a sum in fp32, the kernels add to that sum.
    """
    call = Call.prepare(operands, case, kernels)
    factors = _operands.row_factors(rows, call.shape.padded_tokens)
    parts = _parts(call, rows, factors, cache, may_overwrite_cache)
    has_rest = _remainder.is_left(call)
    adds = sum(len(part.chunks) for part in parts) > 1  # otherwise each tile of dhidden's sums is written once
    rounds = may_round_dhidden and not (adds or has_rest or rows.uniform is not None)
    total = _remainder.empty_dweight(call) if dweight is None else dweight
    start = _dhidden.empty_sums(case, call.shape, adds, rounds), total
    carry: Carry = _compat.vary_like(start, (operands, rows, cache))
    for part in parts:
        carry = _walk_chunks(call, part, carry, adds, dweight is not None)
    sums, total = carry
    dhidden = _dhidden.total(sums, case)
    if has_rest:
        rest = call, rows._replace(uniform=None), dhidden, total
        dhidden, total = _remainder.add_gradients(*rest, adds=dweight is not None, step=kernels.depth_step(case))
    if rows.uniform is not None:
        dhidden, total = _mean.add_gradients(operands, case, rows.uniform, dhidden, total)
    return dhidden, total


def _parts(
    call: Call, rows: RowCoefficients, factors: RowFactors, cache: Cache | None, may_overwrite_cache: bool
) -> list[Part]:
    """The tiles in the cache, if any, and the tiles to recompute, if any."""
    prepared, case, shape, kernels = call.prepared, call.case, call.shape, call.kernels
    cached = 0 if cache is None else cache.max.shape[0]
    overwrites = may_overwrite_cache and _cache.can_be_overwritten(shape)

    def recomputed(span: Array, columns: int, weight: Array) -> Array:
        return kernels.dlogits(prepared, weight, case, factors, span, columns)

    def from_cache(span: Array, columns: int, weight: Array) -> Array:
        del weight
        assert cache is not None
        return kernels.cached_dlogits(prepared, case, factors, cache, span, columns, overwrites)

    def chunks(start: int, stop: int) -> range:
        return range(start, stop, _chunks.chunk_tiles(case, shape, kernels.budget, stop - start))

    parts = []
    if cached:
        parts.append(Part(range(0, cached, cached) if overwrites else chunks(0, cached), from_cache, rows))
    if cached < shape.num_tiles:
        parts.append(Part(chunks(cached, shape.num_tiles), recomputed, rows))
    return parts


def _walk_chunks(call: Call, part: Part, carry: Carry, adds: bool, adds_dweight: bool) -> Carry:
    """Adds a part's gradients (or writes them), a chunk at a time."""
    prepared, case, shape, chunks = call.prepared, call.case, call.shape, part.chunks
    covered = _remainder.covered_columns(call, call.kernels.depth_step(case))
    columns = chunks.step * shape.tile
    in_place = shape.whole_atoms  # otherwise the kernels are given copies of each chunk

    @jax.named_scope("chunk")
    def step(first: Any, carry: Carry) -> Carry:
        sums, dweight = carry
        column, num_tiles = first * shape.tile, jnp.minimum(chunks.stop - first, chunks.step)
        depth = jnp.clip(covered - column, 0, num_tiles * shape.tile)
        offset = column if in_place else 0
        span = Span(prepared.num_rows, prepared.num_columns, column, num_tiles, depth, offset).pack()
        weight, target = prepared.weight, dweight
        if not in_place:
            places = column + jnp.arange(columns, dtype=jnp.int32)
            weight = jnp.take(weight, places, axis=0, mode="clip")
            target = _compat.vary_like(lax.empty(weight.shape, dweight.dtype), carry)
        d = part.dlogits(span, columns, weight)
        d = _candidates.add_terms(call, part.rows, d, column, column + num_tiles * shape.tile)
        sums = call.kernels.update_dhidden(sums, d, weight, case, span, adds)
        written = call.kernels.write_dweight(target, d, prepared.hidden, case, span, adds_dweight and in_place)
        if in_place:
            return sums, written
        # Columns after the chunk get a place outside dweight, where nothing is written.
        places = jnp.where(places < column + num_tiles * shape.tile, places, places + case.vocab_size)
        put = dweight.at[places].add if adds_dweight else dweight.at[places].set
        return sums, put(written, mode="drop", indices_are_sorted=True, unique_indices=True)

    if len(chunks) == 1:
        return step(jnp.int32(chunks.start), carry)
    return lax.fori_loop(0, len(chunks), lambda i, carry: step(chunks.start + i * chunks.step, carry), carry)
