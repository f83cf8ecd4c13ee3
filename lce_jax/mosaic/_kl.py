"""`lce_jax.linear_kl` on one shard with kernels: neither head's logits leave the registers and the shared memory.

forward    both heads' products tile by tile, statistics (eq. 6) from the accumulators, merged by eq. 7
mixture    the same tiles again, when the whole vocabulary's statistics are known: the sums of eq. 9
backward   the same tiles again, turned into the gradient in the student's raw products (eq. 8 or 10), one chunk of the
           vocabulary at a time, and the two products of `_backward`

The functions are those of `lce_jax.xla._kl`, with the same arguments and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax import _jax
from lce_jax._types import Case, Operands, Primals
from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import KLCoefficients, KLStatistics, Pair
from lce_jax.mathematics._kl_mixture import Mixture, MixtureCoefficients, MixtureSums
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic import _chunks, _dhidden, _edge, _mixture
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic._host import greatest, least
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._kl_kernel_set import Direction, KLHead, KLOperands
from lce_jax.mosaic._operands import LOG2E
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float

FIELDS = len(KLStatistics._fields)
MERGED = FIELDS + 3  # numbers of each token and tile: XLA stores three more as it merges them


class Calls(NamedTuple):
    """What every step of a pass needs to know."""

    plan: KLPlan
    heads: Pair[KernelCall]

    @classmethod
    def prepare(cls, plan: KLPlan, shard: Shard, kernels: KernelSet) -> Calls:
        """The call of each head, padded and marked. Both have the columns that both have."""
        columns: Any = shard.num_columns
        if columns is None and plan.columns < max(head.weight.shape[0] for head in shard.heads):
            columns = plan.columns

        def call(case: Case, i: int) -> KernelCall:
            tokens, weight = shard.tokens[i], shard.heads[i].weight
            case = dataclasses.replace(case, num_tokens=tokens.hidden.shape[0], vocab_size=weight.shape[0])
            targets = jnp.full((case.num_tokens,), -1, jnp.int32)
            given = Operands(tokens.hidden, weight, targets, tokens.inverse_temperature, shard.num_rows, columns)
            return KernelCall.prepare(given, case, kernels)

        return cls(plan, Pair(*(call(case, i) for i, case in enumerate(plan.cases))))

    @property
    def student(self) -> KernelCall:
        """Its geometry is that of the tiles."""
        return self.heads.student

    @property
    def cases(self) -> tuple[Case, Case]:
        """That of p first."""
        return Pair(*(call.case for call in self.heads)).ordered(self.plan.student_first)

    @property
    def scales(self) -> tuple[Any, Any]:
        """The k of eq. 0, that of p first."""
        each = (_logprobs.row_scale(call.case.options, call.operands.inverse_temperature) for call in self.heads)
        return Pair(*each).ordered(self.plan.student_first)

    def operands(self, weights: Pair[Array]) -> KLOperands:
        """As the kernels take them."""
        own = (
            KLHead(call.prepared.hidden, weight, call.prepared.scale)
            for call, weight in zip(self.heads, weights, strict=True)
        )
        return KLOperands(Pair(*own).ordered(self.plan.student_first), self.student.prepared.mask)

    @property
    def weights(self) -> Pair[Array]:
        """Where they lie."""
        student, teacher = self.heads
        return Pair(student.prepared.weight, teacher.prepared.weight)


def statistics(plan: KLPlan, shard: Shard, kernels: KernelSet) -> KLStatistics:
    """Eqs. 1 and 6 of the whole shard, [T] each."""
    calls = Calls.prepare(plan, shard, kernels)
    call, operands = calls.student, calls.operands(calls.weights)

    def launch(span: Array, parts: Array) -> Array:
        return kernels.kl_statistics(calls.cases, operands, span, parts)

    def join(running: KLStatistics | None, parts: Array, count: Any) -> KLStatistics:
        own = _kl.merge(_of_tiles(parts, count), calls.scales)
        if running is None:
            return own
        return _kl.merge(jax.tree.map(lambda *x: jnp.stack(x), running, own), calls.scales)

    start = _kl.no_columns(call.case.num_tokens, jnp.float32)
    found = _over_tiles(calls, shard, kernels, FIELDS, launch, join, start)
    max_p, max_q, at_p = (jnp.where(found.sum_p == 0.0, MASKED, x) for x in found.references)
    return found._replace(max_p=max_p, max_q=max_q, at_p=at_p)


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture, kernels: KernelSet) -> MixtureSums:
    """Eq. 9 of the whole shard, [T] each."""
    calls = Calls.prepare(plan, shard, kernels)
    call, operands = calls.student, calls.operands(calls.weights)
    factors = _mixture.factors(rows, call.shape.padded_tokens)

    def launch(span: Array, parts: Array) -> Array:
        return kernels.kl_mixture_sums(calls.cases, operands, factors, span, parts)

    def join(running: Array | None, parts: Array, count: Any) -> Array:
        parts = parts if count is None else jnp.where(_there(parts, count)[..., None], parts, 0.0)
        own = jnp.sum(parts, axis=0)
        return own if running is None else running + own

    zeros = jnp.zeros((len(MixtureSums._fields), call.case.num_tokens), jnp.float32)
    found = _over_tiles(calls, (shard, rows), kernels, len(MixtureSums._fields), launch, join, zeros)
    return MixtureSums(*(found * (1.0 / LOG2E)))


def _over_tiles[S](
    calls: Calls,
    given: Any,
    kernels: KernelSet,
    fields: int,
    launch: Callable[[Array, Array], Array],
    join: Callable[[S | None, Array, Any], S],
    start: S,
) -> S:
    """What ``join`` makes of ``launch``'s numbers of each tile, so many tiles at a time as the budget holds.

    ``join`` gets None where there is one launch, and as ``count`` how many of the tiles were computed, if not all.
    """
    call = calls.student
    num_tiles, most = call.shape.tiles_of(calls.plan.columns), launch_tiles(call.shape, kernels, calls.plan.columns)

    def window(first: Any, running: S) -> S:
        count = least(num_tiles - first, most)
        column = first * call.shape.tile
        span = call.span(column=column, num_tiles=count, offset=column, slot=0)
        parts = call.host.empty((most, fields, call.shape.padded_tokens), jnp.float32)
        parts = launch(span, _jax.vary_like(parts, given))
        with jax.named_scope("join_tiles"):
            parts = parts[..., : call.case.num_tokens]
            return join(None, parts, None) if num_tiles <= most else join(running, parts, count)

    return call.host.loop(range(0, num_tiles, most), window, _jax.vary_like(start, given))


def launch_tiles(shape: Geometry, kernels: KernelSet, columns: int) -> int:
    """Vocabulary tiles whose partial statistics exist at a time: within the budget, even launches."""
    num_tiles = shape.tiles_of(columns)
    most = max(kernels.budget.statistics_bytes // (4 * MERGED * shape.padded_tokens), 1)
    return -(-num_tiles // -(-num_tiles // most))


def _of_tiles(parts: Float[Array, "tiles 6 T"], count: Any) -> KLStatistics:
    """The statistics of each tile, with ``cross`` in nats. Those after the first ``count`` have no columns."""
    stats = KLStatistics(*(parts[:, i] for i in range(FIELDS)))
    stats = stats._replace(cross=stats.cross * (1.0 / LOG2E))
    if count is None:
        return stats
    there, none = _there(parts, count), _kl.no_columns(1, parts.dtype)
    return jax.tree.map(lambda x, other: jnp.where(there, x, other), stats, none)


def _there(parts: Float[Array, "tiles fields T"], count: Any) -> Bool[Array, "tiles 1"]:
    """The first ``count`` tiles."""
    return jnp.arange(parts.shape[0], dtype=jnp.int32)[:, None] < count


def gradients(plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients, kernels: KernelSet) -> Primals:
    """The student's part of dhidden, in float32, and its dweight in the weight's dtype."""
    calls = Calls.prepare(plan, shard, kernels)
    call, shape = calls.student, calls.student.shape
    gradient = _Gradient.of(rows, shape.padded_tokens, plan.student_first)
    chunks = range(0, shape.num_tiles, _chunks.chunk_tiles(call.case, shape, kernels.budget, shape.num_tiles))
    contracted = _edge.contracted_columns(call)
    operands = calls.operands(calls.weights)
    start = (
        _dhidden.empty_sums(call.host, call.case, shape, rounds=False),
        call.host.empty(call.prepared.weight.shape, call.case.dtype),
    )

    @jax.named_scope("chunk")
    def step(first: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, dweight = carry
        column, num_tiles = first * shape.tile, least(shape.num_tiles - first, chunks.step)
        depth = least(greatest(contracted - column, 0), num_tiles * shape.tile)
        span = call.span(column=column, num_tiles=num_tiles, depth=depth, offset=column, adds=least(first, 1))
        d = _dlogits(calls, kernels, operands, gradient, span, chunks.step * shape.tile)
        sums = kernels.update_dhidden(sums, d, call.prepared.weight, call.case, span)
        return sums, kernels.write_dweight(dweight, d, call.prepared.hidden, call.case, span)

    sums, dweight = call.host.loop(chunks, step, _jax.vary_like(start, (shard, rows)))
    if _edge.is_left(call):
        sums = _update_dhidden_at_the_edge(calls, kernels, gradient, sums)
    return Primals(_dhidden.total(sums, call.case), dweight)


class _Gradient(NamedTuple):
    """The coefficients as the kernels take them: in base 2, where u_p - v_q is log2 e times that of eq. 8."""

    factors: Float[Array, "fields Tp"]
    direction: Direction

    @classmethod
    def of(cls, rows: KLCoefficients | MixtureCoefficients, length: int, student_first: bool) -> _Gradient:
        """0 from the call's tokens to ``length``."""
        if isinstance(rows, MixtureCoefficients):
            return cls(_mixture.factors(rows, length), "mixture")
        if student_first:
            rows = rows._replace(of_p=rows.of_p * (1.0 / LOG2E), mean=rows.mean * LOG2E)
        factors = jnp.stack(rows)
        factors = jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))
        return cls(factors, "reverse" if student_first else "forward")


def _dlogits(
    calls: Calls, kernels: KernelSet, operands: KLOperands, gradient: _Gradient, span: Array, columns: int
) -> Float[Array, "Tp columns"]:
    return kernels.kl_dlogits(calls.cases, operands, gradient.factors, span, columns, gradient.direction)


@jax.named_scope("edge")
def _update_dhidden_at_the_edge(calls: Calls, kernels: KernelSet, gradient: _Gradient, sums: Array) -> Array:
    """``sums`` with the true columns added of the tile where padding begins: `_edge.update_dhidden` of two heads."""
    call = calls.student
    tile = _edge.contracted_tiles(call)
    column = tile * call.shape.tile
    copied = Pair(*(_edge.weight(own, tile) for own in calls.heads))
    depth = call.prepared.num_columns - column
    span = call.span(column=column, num_tiles=least(depth, 1), depth=depth, adds=1)
    d = _dlogits(calls, kernels, calls.operands(copied), gradient, span, call.shape.tile)
    return kernels.update_dhidden(sums, d, copied.student, call.case, span)
