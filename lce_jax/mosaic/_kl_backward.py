"""The backward of `lce_jax.linear_kl` on one shard with kernels: dlogits chunk by chunk, and two products of each.

The tiles that the forward kept come first, as one chunk whose dlogits take their place. The others come from the kernel
that computes both heads' tiles again. The tile where padding begins is contracted after them (`_edge`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax import _jax
from lce_jax._types import Primals
from lce_jax.mathematics._kl import Direction, KLCoefficients, Pair
from lce_jax.mathematics._kl_mixture import MixtureCoefficients
from lce_jax.mosaic import _chunks, _dhidden, _edge, _mixture
from lce_jax.mosaic._backward import Carry, is_after
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._host import greatest, least
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._kl import Calls
from lce_jax.mosaic._kl_kernel_set import KLCache
from lce_jax.mosaic._operands import LOG2E
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


class Part(NamedTuple):
    """A range of vocabulary tiles whose dlogits come from the same kernel."""

    chunks: range  # the first tile of each; the step is the number of tiles of a chunk
    dlogits: Callable[[Array, int], Array]  # (packed span, columns) -> dlogits


def gradients(
    plan: KLPlan,
    shard: Shard,
    rows: KLCoefficients | MixtureCoefficients,
    cache: KLCache | None,
    kernels: KernelSet,
) -> Primals:
    """The student's part of dhidden, in float32, and its dweight in the weight's dtype."""
    calls = Calls.prepare(plan, shard, kernels)
    call, shape = calls.student, calls.student.shape
    gradient = Gradient(calls, kernels, _factors(rows, shape.padded_tokens, plan.direction), cache)
    carry: Carry = (
        _dhidden.empty_sums(call.host, call.case, shape, rounds=False),
        call.host.empty(call.prepared.weight.shape, call.case.dtype),
    )
    carry = _jax.vary_like(carry, (shard, rows, cache))
    for i, part in enumerate(_parts(gradient)):
        carry = _walk_chunks(call, part, carry, i > 0)
    sums, dweight = carry
    if _edge.is_left(call):
        sums = _update_dhidden_at_the_edge(gradient, sums)
    return Primals(_dhidden.total(sums, call.case), dweight)


class Gradient(NamedTuple):
    """What makes a tile's dlogits."""

    calls: Calls
    kernels: KernelSet
    factors: Float[Array, "fields Tp"]  # the coefficients as the kernels take them
    cache: KLCache | None

    def recomputed(self, span: Array, columns: int, weights: Pair[Array] | None = None) -> Float[Array, "Tp columns"]:
        """Of the span's tiles, whose weights may lie elsewhere."""
        calls = self.calls
        operands = calls.operands(calls.weights if weights is None else weights)
        return self.kernels.kl_dlogits(calls.cases, operands, self.factors, span, columns, calls.plan.direction)

    def from_cache(self, span: Array, columns: int) -> Float[Array, "Tp columns"]:
        """Of tiles that are kept, in the place of their exponentials."""
        assert self.cache is not None
        calls, given = self.calls, (self.factors, self.cache, span, columns)
        operands = calls.operands(calls.weights)
        return self.kernels.cached_kl_dlogits(calls.cases, operands, *given, calls.plan.direction)


def _parts(gradient: Gradient) -> list[Part]:
    """The tiles in the cache, if any, as one chunk, and the tiles to recompute, if any, in chunks."""
    call, shape = gradient.calls.student, gradient.calls.student.shape
    cached = 0 if gradient.cache is None else gradient.cache.references.shape[0]
    parts = [Part(range(0, cached, cached), gradient.from_cache)] if cached else []
    if cached < shape.num_tiles:
        step = _chunks.chunk_tiles(call.case, shape, gradient.kernels.budget, shape.num_tiles - cached)
        parts.append(Part(range(cached, shape.num_tiles, step), gradient.recomputed))
    return parts


def _walk_chunks(call: KernelCall, part: Part, carry: Carry, follows: bool) -> Carry:
    """As `_backward._walk_chunks`. The kernels read both weights where they lie."""
    case, kernels, tile = call.case, call.kernels, call.shape.tile
    contracted = _edge.contracted_columns(call)

    @jax.named_scope("chunk")
    def step(first: Any, carry: Carry) -> Carry:
        sums, dweight = carry
        column, num_tiles = first * tile, least(part.chunks.stop - first, part.chunks.step)
        depth = least(greatest(contracted - column, 0), num_tiles * tile)
        adds = 1 if follows else is_after(first, part.chunks.start)
        span = call.span(column=column, num_tiles=num_tiles, depth=depth, offset=column, adds=adds)
        d = part.dlogits(span, part.chunks.step * tile)
        sums = kernels.update_dhidden(sums, d, call.prepared.weight, case, span)
        return sums, kernels.write_dweight(dweight, d, call.prepared.hidden, case, span)

    return call.host.loop(part.chunks, step, carry)


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
    d = gradient.recomputed(span, call.shape.tile, copied)
    return call.kernels.update_dhidden(sums, d, copied.student, call.case, span)
