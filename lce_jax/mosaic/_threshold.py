"""Which tiles carry gradient, from the forward's own maxima.

A tile, a row block by a vocabulary tile, is live if it holds a label, a candidate, or a probability of at least the
threshold. What the forward keeps of each tile tells that as soon as the whole vocabulary's lse is known, so the
backward never touches the others.

The gradients with a threshold: a batch of live tiles after the other, each feeding the two products.

    live tiles ─ lists ─▶ as many vocabulary tiles as fit the slots ─ dlogits ─ candidates ─ dhidden, dweight
                               the next ones …

How many batches hold anything is known at run time only; the kernels of the others end at once. The tile where padding
begins is live everywhere: dhidden takes it from `_edge`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _candidates, _chunks, _edge, _live_tiles, _mean, _operands
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._host import TRACED
from lce_jax.mosaic._live_tiles import Sizes, lists, orders
from lce_jax.mosaic.common import _select as kernels
from lce_jax.mosaic.common._dlogits import live_dlogits
from lce_jax.mosaic.common._products import update_live_dhidden, write_live_dweight
from lce_jax.mosaic.common._tiles import live_shape
from lce_jax.mosaic.common._tokens import zeros
from lce_jax.types._types import Call, Operands, Primals, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


class TileStatistics(NamedTuple):
    """What the forward keeps for `select`."""

    maxima: Float[Array, "tiles kept Tp"]  # of each vocabulary tile the largest x, and Σ e^u if probabilities are asked
    targets: Int[Array, "Tp"]
    row_scale: Float[Array, "Tp"]
    always: Any  # a vocabulary tile that is live whatever it holds, or -1
    held: Int[Array, "tiles blocks"] | None = None  # 1 where a tile holds a candidate


def tile_statistics(kernel_call: KernelCall, maxima: Float[Array, "tiles kept Tp"]) -> TileStatistics:
    """Of a shard."""
    always = jnp.asarray(always_live(kernel_call), jnp.int32)
    of_tokens = kernel_call.prepared.targets, kernel_call.prepared.row_scale
    return TileStatistics(maxima, *of_tokens, always, held(kernel_call, kernel_call.operands.candidates))


def held(kernel_call: KernelCall, columns: Int[Array, "T K"] | None) -> Int[Array, "tiles blocks"] | None:
    """The tiles that hold one of these columns, -1 for none."""
    if columns is None:
        return None
    sizes, shape = (kernel_call.shape.row_block, kernel_call.shape.tile), live_shape(kernel_call.call)
    return kernel_call.host.compute(_live_tiles.held, columns, kernel_call.prepared.num_rows, sizes, shape)


def always_live(kernel_call: KernelCall) -> Int[Array, ""] | int:
    """The tile where padding begins, which `_edge` contracts; -1 if there is none."""
    return -1 if kernel_call.operands.num_columns is None else _edge.contracted_tiles(kernel_call)


def select(
    call: Call, tiles: TileStatistics, of_rows: Normalizer, num_rows: Any
) -> tuple[Int[Array, "tiles blocks"], Float[Array, "T"] | None]:
    """The live tiles, and the probability of each token in the others, 0 after the first ``num_rows``; None: all.

    A row whose sum is NaN makes its row block live everywhere, so that its gradient is NaN as well.
    """
    padded, count = tiles.targets.shape[0], call.num_tokens if num_rows is None else num_rows
    merged = jnp.concatenate([_operands.pad(x, padded) for x in (of_rows.max, of_rows.sumexp)])
    numbers = TRACED.numbers(count, padded, tiles.always)
    live, masses = kernels.select(call, tiles.maxima, tiles.targets, tiles.row_scale, merged, 0, numbers, tiles.held)
    if masses is None:
        return live, None
    dropped = functools.reduce(jnp.add, masses)[: call.num_tokens]  # in their order
    return live, jnp.where(jnp.arange(call.num_tokens, dtype=jnp.int32) < count, dropped, 0.0)


def gradients(
    operands: Operands,
    call: Call,
    generation: Generation,
    rows: RowCoefficients,
    live: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> Primals:
    """Eq. 5 over the live tiles: dhidden in fp32, anything on rows that are not live, and dweight.

    dweight is in the weight's dtype, or added to the fp32 sum ``dweight``.
    """
    kernel_call = KernelCall.prepare(operands, call, generation)
    factors = _operands.row_factors(rows, kernel_call.shape.padded_tokens)
    sums, total = walk(kernel_call, factors, _candidates.of_rows(kernel_call, factors, rows), live, dweight)
    gradients = _chunks.total_dhidden(sums, call), total
    if rows.uniform is not None:
        gradients = _mean.add_gradients(operands, call, rows.uniform, *gradients)
    return Primals(*gradients)


def walk(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    live: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> tuple[Any, Any]:
    """The parts of dhidden, and dweight, from the coefficients as the kernels take them."""
    call, generation, host, prepared = kernel_call.call, kernel_call.generation, kernel_call.host, kernel_call.prepared
    adds = dweight is not None
    sizes = sizes_of(kernel_call)
    with jax.named_scope("worklist"):
        work = host.compute(lists, sizes, host.numbers(*orders(sizes)), live, _edge.contracted_tiles(kernel_call))
    entries = None if candidates is None else candidates.entries(kernel_call, work, sizes)
    sums: Any = None
    if call.gradients.hidden:
        sums = host.launch(zeros, _chunks.dhidden_shape(call, kernel_call.shape), host.numbers(prepared.num_rows))
    total = host.empty(prepared.weight.shape, call.dtype) if dweight is None else dweight

    @jax.named_scope("batch")
    def step(i: Any, carry: Any) -> Any:
        sums, dweight = carry
        along = work, sizes, host.numbers(i, prepared.num_rows, prepared.num_columns)
        d = host.launch(live_dlogits, generation, kernel_call.arrays, prepared.weight, call, factors, *along)
        d = d if candidates is None else host.put(d, *candidates, along[2], entries, *along[:2])
        if call.gradients.hidden:
            sums = host.launch(update_live_dhidden, generation, sums, d, prepared.weight, call, *along)
        if not call.gradients.weight:
            return sums, None
        return sums, host.launch(write_live_dweight, generation, dweight, d, prepared.hidden, call, *along, adds)

    start = sums, total if call.gradients.weight else None
    carry = host.vary_like(start, (prepared, factors, candidates, live))
    sums, total = host.loop(range(sizes.batches), step, carry)
    has_edge = call.gradients.hidden and _edge.is_left(kernel_call)
    return (_edge.update_dhidden(kernel_call, factors, candidates, sums)[0] if has_edge else sums), total


def sizes_of(kernel_call: KernelCall) -> Sizes:
    """Those of the call's lists."""
    call, shape, generation = kernel_call.call, kernel_call.shape, kernel_call.generation
    group = generation.tunings.of(call, "dlogits").cluster  # its blocks share each tile of the weight
    slots = _chunks.live_slots(call, shape, generation.budget, group)
    return Sizes(shape.num_tiles, shape.row_blocks, group, slots, shape.row_block, shape.tile)
