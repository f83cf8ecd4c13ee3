"""The backward: dlogits chunk by chunk, and the two products of each chunk, which give dhidden and dweight.

The chunks run in a loop, so the dlogits of only one chunk exist at a time. The first chunks come from the cache, if
there is one. If the cache may be overwritten, the dlogits of all cached tiles are one chunk, in the cache's memory. The
other chunks' logits are recomputed; their dlogits use the same memory if a chunk fits it. The tile in which padding
begins is contracted last (`_edge`). With two heads, dlogits are the gradients with respect to the student's raw
products (eqs. 8, 10), and everything else is the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._kl import KLCoefficients, MixtureCoefficients
from lce_jax.mosaic import _candidates, _chunks, _edge, _mean_logit, _operands
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._chunks import Cache, KLCache
from lce_jax.mosaic._host import greatest, least
from lce_jax.mosaic.common._cached_dlogits import cached_dlogits, cached_kl_dlogits
from lce_jax.mosaic.common._heads import kl_factors
from lce_jax.mosaic.common._products import update_dhidden, write_dweight
from lce_jax.types._types import Call, Operands, Primals, RowCoefficients
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float

# dhidden as a sum of splits, [splits, Tp, Hp], and dweight [V, H]; each is None if `Call.gradients` does not request
# it. With an adapter, the gradients of u and B follow.
type Carry = tuple[Any, ...]


type Dlogits = Callable[..., Array]  # (packed span, columns, memory or None, *weights of `sources`) -> dlogits


class Part(NamedTuple):
    """A range of vocabulary tiles whose dlogits the same kernel computes."""

    chunks: range  # the first tile of each chunk; the step is the number of tiles per chunk
    dlogits: Dlogits
    num_tiles: int  # the size of the array that holds a chunk's dlogits
    in_cache: bool  # whether this array is the cache's memory


def gradients(
    operands: Operands,
    call: Call,
    generation: Generation,
    rows: RowCoefficients,
    cache: Cache | None,
    may_round_dhidden: bool,
    may_overwrite_cache: bool,
    dweight: Float[Array, "V H"] | None = None,
    adds_dweight: Any = True,
) -> Primals:
    """Computes the gradients of the shard (eq. 5). dhidden is arbitrary in masked rows.

    dhidden is in fp32, or in the weight's dtype if it may be rounded and one launch computes all of it. dweight is in
    the weight's dtype. If ``dweight`` is given, an fp32 sum, the kernels add to it, or overwrite it if not
    ``adds_dweight``. With an adapter, dhidden is [T, H + R], and the adapter's gradient is in fp32.
    """
    kernel_call = KernelCall.prepare(operands, call, generation)
    factors = _operands.stack_row_factors(rows, kernel_call.shape.padded_tokens)
    may_round = may_round_dhidden and rows.uniform is None
    candidates = _candidates.place_candidates(kernel_call, factors, rows)
    sums, total, *of_adapter = walk(
        kernel_call, factors, candidates, cache, may_round, may_overwrite_cache, dweight, adds_dweight
    )
    dhidden = _chunks.sum_dhidden(sums, call)
    if kernel_call.adapter is not None:
        partial_du, dadapter = of_adapter
        du = _chunks.sum_dhidden(partial_du, kernel_call.adapter.call)
        dhidden = None if du is None or dhidden is None else jnp.concatenate([dhidden, du.astype(dhidden.dtype)], 1)
        return Primals(dhidden, total, adapter=dadapter)
    if rows.uniform is not None:
        dhidden, total = _mean_logit.add_gradients(operands, call, rows.uniform, dhidden, total)
    return Primals(dhidden, total)


def kl_gradients(
    plan: KLPlan,
    shard: Shard,
    rows: KLCoefficients | MixtureCoefficients,
    cache: KLCache | None,
    generation: Generation,
) -> Primals:
    """Computes the student's gradients (eq. 8 or 10): dhidden in fp32, and dweight in the weight's dtype."""
    kernel_call = KernelCall.prepare_heads(plan, shard, generation)
    factors = kl_factors(rows, kernel_call.shape.padded_tokens, plan.direction)
    may_round, may_overwrite, adds_dweight = False, True, False
    sums, dweight = walk(kernel_call, factors, None, cache, may_round, may_overwrite, None, adds_dweight)
    return Primals(_chunks.sum_dhidden(sums, kernel_call.call), dweight)


def walk(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    cache: Cache | KLCache | None,
    may_round_dhidden: bool,
    may_overwrite_cache: bool,
    dweight: Float[Array, "V H"] | None,
    adds_dweight: Any = True,
) -> Carry:
    """Computes the splits of dhidden, and dweight, from the stacked coefficients ``factors``; for one head or two."""
    host, start = kernel_call.host, []
    parts = _parts(kernel_call, factors, cache, may_overwrite_cache)
    has_edge = _edge.has_edge_tile(kernel_call)
    rounds = may_round_dhidden and not has_edge and sum(len(part.chunks) for part in parts) == 1
    for one in kernel_call.products:
        dtype = jnp.float32 if one is kernel_call.adapter else one.call.dtype
        total = host.empty(one.prepared.weight.shape, dtype) if dweight is None else dweight
        sums = _chunks.empty_dhidden(host, one.call, kernel_call.shape, rounds)
        start += [sums if one.call.gradients.hidden else None, total if one.call.gradients.weight else None]
    inputs = [one.prepared for one in kernel_call.heads], factors, candidates, cache
    carry: Carry = host.vary_like(tuple(start), inputs)
    memory = None
    for i, part in enumerate(parts):
        memory, carry = _walk_chunks(
            kernel_call, part, candidates, memory, carry, i > 0, dweight is not None, adds_dweight
        )
    if not (has_edge and kernel_call.call.gradients.hidden):
        return carry
    added = _edge.update_dhidden(kernel_call, factors, candidates, *carry[::2])
    return tuple(itertools.chain(*zip(added, carry[1::2], strict=True)))


def _parts(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    cache: Cache | KLCache | None,
    may_overwrite_cache: bool,
) -> list[Part]:
    """Returns the cached tiles, in one chunk if dlogits overwrite the cache, and the tiles to recompute."""
    shape, num_tiles = kernel_call.shape, kernel_call.shape.num_tiles
    overwrites = may_overwrite_cache and _chunks.can_overwrite_cache(shape)
    cached, parts = 0 if cache is None else cache.num_tiles, []
    choose = functools.partial(_chunks.choose_chunks, kernel_call.call, shape, kernel_call.generation.budget)
    if cache is not None and cached:
        compute = functools.partial(_cached_dlogits, kernel_call, factors, cache, overwrites)
        size = cached if overwrites else choose(cached).num_tiles
        parts.append(Part(range(0, cached, size), compute, size, in_cache=overwrites))
    if cached < num_tiles:
        compute = functools.partial(_edge.compute_dlogits, kernel_call, factors)
        size, in_cache = choose(num_tiles - cached, cached if overwrites else 0)
        parts.append(Part(range(cached, num_tiles, size), compute, cached if in_cache else size, in_cache))
    return parts


def _cached_dlogits(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    cache: Cache | KLCache,
    overwrites: bool,
    span: Array,
    columns: int,
    memory: None,
    *weights: Array,
) -> Array:
    """Computes the dlogits of the span's tiles from the cache, for one head or two."""
    del memory  # dlogits overwrite the cache, or have memory of their own
    launch, generation = kernel_call.host.launch, kernel_call.generation
    if isinstance(cache, Cache):
        return launch(
            cached_dlogits, generation, kernel_call.arrays, kernel_call.call, factors, cache, span, columns, overwrites
        )
    assert kernel_call.plan is not None
    arguments = kernel_call.kl_calls, kernel_call.kl_operands(weights), factors, cache, span, columns
    return launch(cached_kl_dlogits, generation, *arguments, kernel_call.plan.direction, overwrites)


def _walk_chunks(
    kernel_call: KernelCall,
    part: Part,
    candidates: PlacedCandidates | None,
    memory: Array | None,
    carry: Carry,
    follows: bool,
    may_add: bool = False,
    adds_dweight: Any = False,
) -> tuple[Array | None, Carry]:
    """Computes a part's gradients chunk by chunk, and adds them to the arrays of the carry, or overwrites these.

    ``memory`` is the array that holds the cache, if an earlier part's dlogits have overwritten it; else None. Returns
    that array for the next part, and the carry. ``follows``: an earlier part has already written to the sums of
    dhidden. dweight is added if both ``may_add`` and ``adds_dweight``; the latter is known only at run time.
    """
    shape, generation, launch = kernel_call.shape, kernel_call.generation, kernel_call.host.launch
    contracted = _edge.count_contracted_columns(kernel_call)
    most = part.chunks.step

    @jax.named_scope("chunk")
    def step(first: Any, memory_and_carry: tuple[Array | None, Carry]) -> tuple[Array | None, Carry]:
        memory, carry = memory_and_carry
        column, num_tiles = first * shape.tile, least(part.chunks.stop - first, most)
        depth = least(greatest(contracted - column, 0), num_tiles * shape.tile)
        adds = follows or first > part.chunks.start
        in_place = shape.whole_atoms  # otherwise the kernels get copies of each chunk, without padding
        offset = column if in_place else 0
        span = kernel_call.span(
            column=column, num_tiles=num_tiles, depth=depth, offset=offset, adds=adds, adds_dweight=adds_dweight
        )
        weights = [
            one.prepared.weight if in_place else _edge.copy_columns(one, column, most * shape.tile)
            for one in kernel_call.sources
        ]
        d = part.dlogits(span, part.num_tiles * shape.tile, memory, *weights)
        d = d if candidates is None else candidates.put(kernel_call, d, column, column + num_tiles * shape.tile)
        updated: list[Any] = []
        products = zip(kernel_call.products, weights[: len(kernel_call.products)], carry[::2], carry[1::2], strict=True)
        for one, weight, sums, dweight in products:
            call, hidden = one.call, one.prepared.hidden
            if call.gradients.hidden:
                sums = launch(update_dhidden, generation, sums, d, weight, call, span)
            if call.gradients.weight and in_place:
                dweight = launch(write_dweight, generation, dweight, d, hidden, call, span, may_add)
            elif call.gradients.weight:
                copy = kernel_call.host.vary_like(kernel_call.host.empty(weight.shape, dweight.dtype), carry)
                copy = launch(write_dweight, generation, copy, d, hidden, call, span)
                dweight = _edge.put_columns(
                    one, dweight, copy, column, num_tiles * shape.tile, may_add and adds_dweight
                )
            updated += [sums, dweight]
        if not part.in_cache:
            return None, tuple(updated)
        return kernel_call.host.order((kernel_call.host.vary_like(d, carry), tuple(updated)))

    return kernel_call.host.loop(part.chunks, step, (memory if part.in_cache else None, carry))
