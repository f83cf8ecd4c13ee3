"""The gradients with a threshold: a batch of live tiles after the other, each feeding the two products.

    live tiles ─ lists ─▶ as many vocabulary tiles as fit the slots ─ dlogits ─ dhidden, dweight
                               the next ones …

How many batches hold anything is known at run time only; the kernels of the others end at once. The tile where padding
begins is live everywhere: dhidden takes it from `_edge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat
from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _chunks, _dhidden, _edge, _mean, _operands
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._worklist import Batches, Worklist

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def gradients(
    operands: Operands,
    case: Case,
    kernels: KernelSet,
    rows: RowCoefficients,
    live: Bool[Array, "tiles blocks"],
    dweight: Float[Array, "V H"] | None,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """Eq. 5 over the live tiles: dhidden in fp32, anything on rows that are not live, and dweight.

    dweight is in the weight's dtype, or added to the fp32 sum ``dweight``.
    """
    call = Call.prepare(operands, case, kernels)
    shape, adds = call.shape, dweight is not None
    contracted = None
    if operands.num_columns is not None:
        contracted = jnp.arange(shape.num_tiles, dtype=jnp.int32) < _edge.contracted_tiles(call)
    with jax.named_scope("worklist"):
        work = Worklist.of(live, kernels.live_group(case), contracted)
    sums = jnp.zeros(_dhidden.sums_shape(case, shape), jnp.float32)
    total = lax.empty(operands.weight.shape, case.dtype) if dweight is None else dweight
    sums, total = _walk(call, rows, work, *_compat.vary_like((sums, total), (operands, rows, live)), adds)
    if _edge.is_left(call):
        factors = _operands.row_factors(rows, shape.padded_tokens)
        sums = _edge.update_dhidden(call, factors, None, sums)
    dhidden = _dhidden.total(sums, case)
    if rows.uniform is not None:
        dhidden, total = _mean.add_gradients(operands, case, rows.uniform, dhidden, total)
    return dhidden, total


def _walk(call: Call, rows: RowCoefficients, work: Worklist, sums: Any, dweight: Any, adds: bool) -> tuple[Any, Any]:
    """Both gradients with all live tiles in them, a batch at a time."""
    case, shape, kernels, prepared = call.case, call.shape, call.kernels, call.prepared
    factors = _operands.row_factors(rows, shape.padded_tokens)
    group = kernels.live_group(case)
    slots = _chunks.live_slots(case, shape, kernels.budget, group)
    with jax.named_scope("worklist"):
        batches = Batches.of(work, slots, group, prepared.num_columns)

    @jax.named_scope("batch")
    def step(i: Any, carry: Any) -> Any:
        sums, dweight = carry
        batch, lists = batches.at(i)
        d = kernels.live_dlogits(prepared, prepared.weight, case, factors, work, batch, slots)
        sums = kernels.update_live_dhidden(sums, d, prepared.weight, case, work, lists, batch)
        return sums, kernels.write_live_dweight(dweight, d, prepared.hidden, case, work, batches.ranks, batch, adds)

    return lax.fori_loop(0, batches.scalars.shape[0], step, (sums, dweight))
