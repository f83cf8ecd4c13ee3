"""The backward of `lce_jax.linear_kl` on one shard with kernels: dlogits chunk by chunk, and two products of each.

The tiles that the forward kept come first, as one chunk whose dlogits take their place. The others come from the kernel
that computes both heads' tiles again. The tile where padding begins is contracted after them (`_edge`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax import _jax
from lce_jax._types import Primals
from lce_jax.mathematics._kl import Direction, KLCoefficients, MixtureCoefficients, Pair
from lce_jax.mosaic import _dhidden, _edge, _mixture
from lce_jax.mosaic._backward import Carry, parts_of, walk_chunks
from lce_jax.mosaic._generation import Generation
from lce_jax.mosaic._host import least
from lce_jax.mosaic._kl import Calls
from lce_jax.mosaic._kl_operands import KLCache
from lce_jax.mosaic._operands import LOG2E
from lce_jax.mosaic.common._cached_kl_dlogits import cached_kl_dlogits
from lce_jax.mosaic.common._kl import kl_dlogits
from lce_jax.mosaic.common._products import update_dhidden
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


def gradients(
    plan: KLPlan,
    shard: Shard,
    rows: KLCoefficients | MixtureCoefficients,
    cache: KLCache | None,
    generation: Generation,
) -> Primals:
    """The student's part of dhidden, in float32, and its dweight in the weight's dtype."""
    calls = Calls.prepare(plan, shard, generation)
    call, shape = calls.student, calls.student.shape
    gradient = Gradient(calls, _factors(rows, shape.padded_tokens, plan.direction), cache)
    carry: Carry = (
        _dhidden.empty_sums(call.host, call.case, shape, rounds=False),
        call.host.empty(call.prepared.weight.shape, call.case.dtype),
    )
    carry = _jax.vary_like(carry, (shard, rows, cache))
    cached = 0 if cache is None else cache.references.shape[0]
    for i, part in enumerate(parts_of(call, cached, gradient.from_cache, gradient.recomputed, overwrites=True)):
        carry = walk_chunks(call, part, None, carry, i > 0, adds_dweight=False)
    sums, dweight = carry
    if _edge.is_left(call):
        sums = _update_dhidden_at_the_edge(gradient, sums)
    return Primals(_dhidden.total(sums, call.case), dweight)


class Gradient(NamedTuple):
    """What makes a tile's dlogits."""

    calls: Calls
    factors: Float[Array, "fields Tp"]  # the coefficients as the kernels take them
    cache: KLCache | None

    def recomputed(self, span: Array, columns: int, _: Array) -> Float[Array, "Tp columns"]:
        """Of the span's tiles, from both weights where they lie: V is whole atoms."""
        return self.of_weights(span, columns, self.calls.weights)

    def of_weights(self, span: Array, columns: int, weights: Pair[Array]) -> Float[Array, "Tp columns"]:
        """Of the span's tiles, whose weights may lie elsewhere."""
        calls, operands = self.calls, self.calls.operands(weights)
        given = calls.cases, operands, self.factors, span, columns, calls.plan.direction
        return calls.student.host.launch(kl_dlogits, calls.student.generation, *given)

    def from_cache(self, span: Array, columns: int, _: Array) -> Float[Array, "Tp columns"]:
        """Of tiles that are kept, in the place of their exponentials."""
        assert self.cache is not None
        calls, given = self.calls, (self.factors, self.cache, span, columns)
        operands = calls.operands(calls.weights)
        launch = calls.student.host.launch
        return launch(cached_kl_dlogits, calls.cases, operands, *given, calls.plan.direction)


def _factors(
    rows: KLCoefficients | MixtureCoefficients, length: int, direction: Direction
) -> Float[Array, "fields Tp"]:
    """In base 2, where u_p - v_q is log2 e times that of eq. 8; 0 from the call's tokens to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        return _mixture.factors(rows, length)
    if direction == "reverse":
        rows = rows._replace(of_p=rows.of_p * (1.0 / LOG2E), mean=rows.mean * LOG2E)
    factors = jnp.stack(rows)
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))


@jax.named_scope("edge")
def _update_dhidden_at_the_edge(gradient: Gradient, sums: Array) -> Array:
    """``sums`` with the true columns added of the tile where padding begins: `_edge.update_dhidden` of two heads."""
    call = gradient.calls.student
    tile = _edge.contracted_tiles(call)
    column = tile * call.shape.tile
    copied = Pair(*(_edge.weight(own, tile) for own in gradient.calls.heads))
    depth = call.prepared.num_columns - column
    span = call.span(column=column, num_tiles=least(depth, 1), depth=depth, adds=1)
    d = gradient.of_weights(span, call.shape.tile, copied)
    return call.host.launch(update_dhidden, call.generation, sums, d, copied.student, call.case, span)
