"""The gradients with a threshold: a batch of live tiles after the other, each feeding the two products.

    live tiles ─ lists ─▶ as many vocabulary tiles as fit the slots ─ dlogits ─ candidates ─ dhidden, dweight
                               the next ones …

How many batches hold anything is known at run time only; the kernels of the others end at once. The tile where padding
begins is live everywhere: dhidden takes it from `_edge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _candidates, _chunks, _dhidden, _edge, _mean, _operands
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._generation import Generation
from lce_jax.mosaic._live_tiles import Sizes, lists, mixed
from lce_jax.mosaic.common._dlogits import live_dlogits
from lce_jax.mosaic.common._hidden_rows import zeros
from lce_jax.mosaic.common._live_products import update_live_dhidden, write_live_dweight

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def gradients(
    operands: Operands,
    case: Case,
    generation: Generation,
    rows: RowCoefficients,
    live: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """Eq. 5 over the live tiles: dhidden in fp32, anything on rows that are not live, and dweight.

    dweight is in the weight's dtype, or added to the fp32 sum ``dweight``.
    """
    call = KernelCall.prepare(operands, case, generation)
    factors = _operands.row_factors(rows, call.shape.padded_tokens)
    sums, total = walk(call, factors, _candidates.of_rows(call, factors, rows), live, dweight)
    dhidden = _dhidden.total(sums, case)
    if rows.uniform is not None:
        dhidden, total = _mean.add_gradients(operands, case, rows.uniform, dhidden, total)
    return dhidden, total


def walk(
    call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    live: Int[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> tuple[Float[Array, "splits Tp Hp"], Float[Array, "V H"]]:
    """The parts of dhidden, and dweight, from the coefficients as the kernels take them."""
    case, generation, host, prepared = call.case, call.generation, call.host, call.prepared
    adds = dweight is not None
    sizes = sizes_of(call)
    with jax.named_scope("worklist"):
        given = host.numbers(*mixed(sizes.tiles)), live, _edge.contracted_tiles(call), prepared.num_columns
        work, batches = host.compute(lists, sizes, *given)
    sums = host.launch(zeros, _dhidden.sums_shape(case, call.shape), host.numbers(prepared.num_rows))
    total = host.empty(prepared.weight.shape, case.dtype) if dweight is None else dweight

    @jax.named_scope("batch")
    def step(i: Any, carry: Any) -> Any:
        sums, dweight = carry
        batch = host.numbers(i)
        along = work, batches, batch
        d = host.launch(live_dlogits, generation, call.arrays, prepared.weight, case, factors, *along, sizes.slots)
        d = d if candidates is None else candidates.put_live(call, d, work, batches, i)
        sums = host.launch(update_live_dhidden, generation, sums, d, prepared.weight, case, *along)
        return sums, host.launch(write_live_dweight, generation, dweight, d, prepared.hidden, case, *along, adds)

    carry = host.vary_like((sums, total), (prepared, factors, candidates, live))
    sums, total = host.loop(range(sizes.batches), step, carry)
    return (_edge.update_dhidden(call, factors, candidates, sums) if _edge.is_left(call) else sums), total


def sizes_of(call: KernelCall) -> Sizes:
    """Those of the call's lists."""
    case, shape, generation = call.case, call.shape, call.generation
    group = generation.tunings.of(case, "dlogits").cluster  # its blocks share each tile of the weight
    return Sizes(shape.num_tiles, shape.row_blocks, group, _chunks.live_slots(case, shape, generation.budget, group))
