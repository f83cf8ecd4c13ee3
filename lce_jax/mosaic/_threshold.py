"""With a ``gradient_threshold``: which tiles are active, and the gradients of the active tiles.

A tile (a row block by a vocabulary tile) is active if it holds a label, a candidate, or a probability of at least the
threshold. The forward saves each tile's maxima; with the lse of the whole vocabulary they decide which tiles are
active. The backward never computes the other tiles.

The gradients run batch by batch, with two products for each batch of active tiles:

    active tiles ─ worklist ─▶ as many vocabulary tiles as fit the slots ─ dlogits ─ candidates ─ dhidden, dweight
                               the next ones …

How many batches have tiles is known only at run time. The kernels of empty batches end at once. The tile in which
padding begins is active in every row block, because `_edge` adds this tile's part of dhidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._statistics import Normalizer, sum_in_order
from lce_jax.mosaic import _candidates, _chunks, _edge, _mean_logit, _operands, _threshold_tiles
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._host import TRACED
from lce_jax.mosaic._threshold_tiles import Sizes, make_orders, make_worklist
from lce_jax.mosaic.common import _threshold as kernels
from lce_jax.mosaic.common._dlogits import active_dlogits
from lce_jax.mosaic.common._products import update_active_dhidden, write_active_dweight
from lce_jax.mosaic.common._tiles import active_tiles_shape
from lce_jax.mosaic.common._tokens import zeros
from lce_jax.types._types import Call, Operands, Primals, RowCoefficients

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


class TileStatistics(NamedTuple):
    """What the forward saves so that `select` can choose the active tiles."""

    # Each vocabulary tile's largest x, and Σ e^u if the dropped mass is requested.
    maxima: Float[Array, "tiles saved Tp"]
    targets: Int[Array, "Tp"]
    row_scale: Float[Array, "Tp"]
    always: Any  # a vocabulary tile that is always active, or -1
    candidate_tiles: Int[Array, "tiles blocks"] | None = None  # 1 for tiles that hold a candidate


def make_tile_statistics(kernel_call: KernelCall, maxima: Float[Array, "tiles saved Tp"]) -> TileStatistics:
    """Makes the statistics of a shard's tiles."""
    always = jnp.asarray(find_padded_tile(kernel_call), jnp.int32)
    per_token = kernel_call.prepared.targets, kernel_call.prepared.row_scale
    return TileStatistics(
        maxima, *per_token, always, mark_candidate_tiles(kernel_call, kernel_call.operands.candidates)
    )


def mark_candidate_tiles(
    kernel_call: KernelCall, columns: Int[Array, "T K"] | None
) -> Int[Array, "tiles blocks"] | None:
    """Marks the tiles that hold one of these columns; the column -1 is in no tile."""
    if columns is None:
        return None
    sizes, shape = (kernel_call.shape.row_block, kernel_call.shape.tile), active_tiles_shape(kernel_call.call)
    return kernel_call.host.compute(_threshold_tiles.mark_tiles, columns, kernel_call.prepared.num_rows, sizes, shape)


def find_padded_tile(kernel_call: KernelCall) -> Int[Array, ""] | int:
    """Returns the tile in which padding begins, which `_edge` contracts; -1 if there is no padding."""
    return -1 if kernel_call.operands.num_columns is None else _edge.count_contracted_tiles(kernel_call)


def select(
    call: Call, tiles: TileStatistics, normalizer: Normalizer, num_rows: Any
) -> tuple[Int[Array, "tiles blocks"], Float[Array, "T"] | None]:
    """Selects the active tiles. Returns their mask and, if requested, each token's probability in the other tiles.

    Only the first ``num_rows`` rows count, or all if it is None. A row whose sum is NaN makes all tiles of its row
    block active, so that its gradient is NaN, too.
    """
    padded, count = tiles.targets.shape[0], call.num_tokens if num_rows is None else num_rows
    merged = jnp.concatenate([_operands.pad(x, padded) for x in (normalizer.max, normalizer.sumexp)])
    numbers = TRACED.numbers(count, padded, tiles.always)
    active, masses = kernels.select(
        call, tiles.maxima, tiles.targets, tiles.row_scale, merged, 0, numbers, tiles.candidate_tiles
    )
    if masses is None:
        return active, None
    dropped = sum_in_order(masses)[: call.num_tokens]
    return active, jnp.where(jnp.arange(call.num_tokens, dtype=jnp.int32) < count, dropped, 0.0)


def gradients(
    operands: Operands,
    call: Call,
    generation: Generation,
    rows: RowCoefficients,
    active: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> Primals:
    """Computes eq. 5 over the active tiles: dhidden in fp32, arbitrary in masked rows, and dweight.

    dweight is in the weight's dtype, or added to the fp32 sum ``dweight``.
    """
    kernel_call = KernelCall.prepare(operands, call, generation)
    factors = _operands.stack_row_factors(rows, kernel_call.shape.padded_tokens)
    sums, total = walk(kernel_call, factors, _candidates.place_candidates(kernel_call, factors, rows), active, dweight)
    gradients = _chunks.sum_dhidden(sums, call), total
    if rows.uniform is not None:
        gradients = _mean_logit.add_gradients(operands, call, rows.uniform, *gradients)
    return Primals(*gradients)


def walk(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    active: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> tuple[Any, Any]:
    """Computes the splits of dhidden, and dweight, from the stacked coefficients ``factors``."""
    call, generation, host, prepared = kernel_call.call, kernel_call.generation, kernel_call.host, kernel_call.prepared
    adds = dweight is not None
    sizes = make_sizes(kernel_call)
    with jax.named_scope("worklist"):
        work = host.compute(
            make_worklist, sizes, host.numbers(*make_orders(sizes)), active, _edge.count_contracted_tiles(kernel_call)
        )
    entries = None if candidates is None else candidates.entries(kernel_call, work, sizes)
    sums: Any = None
    if call.gradients.hidden:
        sums = host.launch(zeros, _chunks.dhidden_shape(call, kernel_call.shape), host.numbers(prepared.num_rows))
    total = host.empty(prepared.weight.shape, call.dtype) if dweight is None else dweight

    @jax.named_scope("batch")
    def step(i: Any, carry: Any) -> Any:
        sums, dweight = carry
        along = work, sizes, host.numbers(i, prepared.num_rows, prepared.num_columns)
        d = host.launch(active_dlogits, generation, kernel_call.arrays, prepared.weight, call, factors, *along)
        d = d if candidates is None else host.put(d, *candidates, along[2], entries, *along[:2])
        if call.gradients.hidden:
            sums = host.launch(update_active_dhidden, generation, sums, d, prepared.weight, call, *along)
        if not call.gradients.weight:
            return sums, None
        return sums, host.launch(write_active_dweight, generation, dweight, d, prepared.hidden, call, *along, adds)

    start = sums, total if call.gradients.weight else None
    carry = host.vary_like(start, (prepared, factors, candidates, active))
    sums, total = host.loop(range(sizes.batches), step, carry)
    has_edge = call.gradients.hidden and _edge.has_edge_tile(kernel_call)
    return (_edge.update_dhidden(kernel_call, factors, candidates, sums)[0] if has_edge else sums), total


def make_sizes(kernel_call: KernelCall) -> Sizes:
    """Returns the sizes of the call's worklist."""
    call, shape, generation = kernel_call.call, kernel_call.shape, kernel_call.generation
    group = generation.tunings.of(call, "dlogits").cluster  # the blocks of a cluster share each tile of the weight
    slots = _chunks.choose_active_slots(call, shape, generation.budget, group)
    return Sizes(shape.num_tiles, shape.row_blocks, group, slots, shape.row_block, shape.tile)
