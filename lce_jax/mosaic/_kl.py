"""`lce_jax.linear_kl` on one shard with kernels: neither head's logits leave the registers and the shared memory.

forward    both heads' products tile by tile, statistics (eq. 6) from the accumulators, merged by eq. 7
mixture    the same tiles again, when the whole vocabulary's statistics are known: the sums of eq. 9
backward   the same tiles again, turned into the gradient in the student's raw products (eq. 8 or 10): `gradients`

With ``cache_bytes`` the first pass keeps what the backward needs of the first tiles. The functions are those of
`lce_jax.xla._kl`, with the same arguments and results.

The backward computes dlogits chunk by chunk, and two products of each. The tiles that the forward kept come first, as
one chunk whose dlogits take their place. The others come from the kernel that computes both heads' tiles again. The
tile where padding begins is contracted after them (`_edge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import (
    Direction,
    KLCoefficients,
    KLStatistics,
    Mixture,
    MixtureCoefficients,
    MixtureSums,
    Pair,
)
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mosaic import _chunks, _edge
from lce_jax.mosaic._backward import Carry, parts_of, walk_chunks
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._host import least
from lce_jax.mosaic._operands import LOG2E, Geometry
from lce_jax.mosaic.common._kl import (
    KLCache,
    KLHead,
    KLOperands,
    cached_kl_dlogits,
    kl_dlogits,
    kl_mixture_sums,
    kl_statistics,
    mixture_factors,
)
from lce_jax.mosaic.common._products import update_dhidden
from lce_jax.types import _jax
from lce_jax.types._types import Call, Operands, Primals
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


FIELDS = len(KLStatistics._fields)
MERGED = FIELDS + 3  # numbers of each token and tile: XLA stores three more as it merges them


class Calls(NamedTuple):
    """What every step of a pass needs to know."""

    plan: KLPlan
    heads: Pair[KernelCall]

    @classmethod
    def prepare(cls, plan: KLPlan, shard: Shard, generation: Generation) -> Calls:
        """The call of each head, padded and marked. Both have the columns that both have."""
        columns: Any = shard.num_columns
        if columns is None and plan.columns < max(head.weight.shape[0] for head in shard.heads):
            columns = plan.columns

        def call(case: Call, i: int) -> KernelCall:
            tokens, weight = shard.tokens[i], shard.heads[i].weight
            case = dataclasses.replace(case, num_tokens=tokens.hidden.shape[0], columns=weight.shape[0])
            targets = jnp.full((case.num_tokens,), -1, jnp.int32)
            given = Operands(tokens.hidden, weight, targets, tokens.inverse_temperature, shard.num_rows, columns)
            return KernelCall.prepare(given, case, generation)

        return cls(plan, Pair(*(call(case, i) for i, case in enumerate(plan.cases))))

    @property
    def student(self) -> KernelCall:
        """Its geometry is that of the tiles."""
        return self.heads.student

    @property
    def cases(self) -> tuple[Call, Call]:
        """That of p first."""
        return Pair(*(call.case for call in self.heads)).ordered(self.plan.student_first)

    @property
    def scales(self) -> tuple[Any, Any]:
        """The k of eq. 0, that of p first."""
        each = (_logprobs.compute_row_scale(call.case, call.operands.inverse_temperature) for call in self.heads)
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


def statistics(
    plan: KLPlan, shard: Shard, generation: Generation, keep_cache: bool
) -> tuple[KLStatistics, KLCache | None]:
    """Eqs. 1 and 6 of the whole shard, [T] each, and what ``cache_bytes`` hold of the first tiles."""
    calls = Calls.prepare(plan, shard, generation)
    call, operands = calls.student, calls.operands(calls.weights)
    cached = num_cached_tiles(plan, call.shape) if keep_cache else 0

    def launch(span: Array, parts: Array, cache: KLCache | None) -> tuple[Array, KLCache | None]:
        return call.host.launch(kl_statistics, generation, calls.cases, operands, span, parts, cache, plan.direction)

    def join(running: KLStatistics | None, parts: Array, count: Any) -> KLStatistics:
        own = _kl.merge(_of_tiles(parts, count), calls.scales)
        if running is None:
            return own
        return _kl.merge(jax.tree.map(lambda *x: jnp.stack(x), running, own), calls.scales)

    start = _kl.no_columns(call.case.num_tokens, jnp.float32)
    kept = _empty_cache(call, plan, cached) if cached else None
    found, cache = _over_tiles(calls, shard, FIELDS, launch, join, start, kept)
    max_p, max_q, at_p = (jnp.where(found.sum_p == 0.0, MASKED, x) for x in found.references)
    return found._replace(max_p=max_p, max_q=max_q, at_p=at_p), cache


def num_cached_tiles(plan: KLPlan, shape: Geometry) -> int:
    """The vocabulary tiles of which ``cache_bytes`` hold what spares the backward their products."""
    return min(shape.tiles_of(plan.columns), plan.cases.student.cache_budget // tile_bytes(plan, shape))


def tile_bytes(plan: KLPlan, shape: Geometry) -> int:
    """Of one of them."""
    return shape.padded_tokens * (plan.kept_item_bytes * shape.tile + 4 * _kl.REFERENCES)


def _empty_cache(call: KernelCall, plan: KLPlan, num_tiles: int) -> KLCache:
    shape = (call.shape.padded_tokens, num_tiles * call.shape.tile)
    e, ratio = (call.host.empty(shape, dtype) for dtype in plan.kept_dtypes)
    references = (num_tiles, _kl.REFERENCES, call.shape.padded_tokens)
    return KLCache(e, ratio, call.host.empty(references, jnp.float32))


def mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture, generation: Generation) -> MixtureSums:
    """Eq. 9 of the whole shard, [T] each."""
    calls = Calls.prepare(plan, shard, generation)
    call, operands = calls.student, calls.operands(calls.weights)
    factors = mixture_factors(rows, call.shape.padded_tokens)

    def launch(span: Array, parts: Array, cache: None) -> tuple[Array, None]:
        return call.host.launch(kl_mixture_sums, generation, calls.cases, operands, factors, span, parts), cache

    def join(running: Array | None, parts: Array, count: Any) -> Array:
        parts = parts if count is None else jnp.where(_there(parts, count)[..., None], parts, 0.0)
        own = jnp.sum(parts, axis=0)
        return own if running is None else running + own

    zeros = jnp.zeros((len(MixtureSums._fields), call.case.num_tokens), jnp.float32)
    found, _ = _over_tiles(calls, (shard, rows), len(MixtureSums._fields), launch, join, zeros, None)
    return MixtureSums(*(found * (1.0 / LOG2E)))


def _over_tiles[S](
    calls: Calls,
    given: Any,
    fields: int,
    launch: Callable[[Array, Array, Any], tuple[Array, Any]],
    join: Callable[[S | None, Array, Any], S],
    start: S,
    cache: KLCache | None,
) -> tuple[S, KLCache | None]:
    """What ``join`` makes of ``launch``'s numbers of each tile, so many tiles at a time as the budget holds.

    ``join`` gets None where there is one launch, and as ``count`` how many of the tiles were computed, if not all.
    The first tiles are launched with the cache that keeps them.
    """
    call = calls.student
    num_tiles = call.shape.tiles_of(calls.plan.columns)
    most = launch_tiles(call.shape, call.generation.budget, calls.plan.columns)
    cached = 0 if cache is None else cache.references.shape[0]

    pieces = [piece for piece in ((0, cached, True), (cached, num_tiles, False)) if piece[0] < piece[1]]

    def window(first: Any, carry: tuple[S, KLCache | None]) -> tuple[S, KLCache | None]:
        running, cache = carry
        count = least(num_tiles - first, most)
        parts = call.host.empty((most, fields, call.shape.padded_tokens), jnp.float32)
        parts = _jax.vary_like(parts, given)
        for begin, num_launched, (_, _, keeps) in _chunks.launches(first, first + count, pieces):
            column = begin * call.shape.tile
            span = call.span(column=column, num_tiles=num_launched, offset=column, slot=begin - first)
            parts, kept = launch(span, parts, cache if keeps else None)
            cache = kept if keeps else cache
        with jax.named_scope("join_tiles"):
            parts = parts[..., : call.case.num_tokens]
            return join(None, parts, None) if num_tiles <= most else join(running, parts, count), cache

    return call.host.loop(range(0, num_tiles, most), window, _jax.vary_like((start, cache), given))


def launch_tiles(shape: Geometry, budget: Budget, columns: int) -> int:
    """Vocabulary tiles whose partial statistics exist at a time: within the budget, even launches."""
    num_tiles = shape.tiles_of(columns)
    most = max(budget.statistics_bytes // (4 * MERGED * shape.padded_tokens), 1)
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
    wanted, sums = call.case.wanted, _chunks.empty_dhidden(call.host, call.case, shape, rounds=False)
    total = call.host.empty(call.prepared.weight.shape, call.case.dtype)
    carry: Carry = sums if wanted.hidden else None, total if wanted.weight else None
    carry = _jax.vary_like(carry, (shard, rows, cache))
    cached = 0 if cache is None else cache.references.shape[0]
    for i, part in enumerate(parts_of(call, cached, gradient.from_cache, gradient.recomputed, overwrites=True)):
        carry = walk_chunks(call, part, None, carry, i > 0)
    sums, dweight = carry
    if wanted.hidden and _edge.is_left(call):
        sums = _update_dhidden_at_the_edge(gradient, sums)
    return Primals(_chunks.total_dhidden(sums, call.case), dweight)


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
        launch, generation = calls.student.host.launch, calls.student.generation
        return launch(cached_kl_dlogits, generation, calls.cases, operands, *given, calls.plan.direction)


def _factors(
    rows: KLCoefficients | MixtureCoefficients, length: int, direction: Direction
) -> Float[Array, "fields Tp"]:
    """In base 2, where u_p - v_q is log2 e times that of eq. 8; 0 from the call's tokens to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        return mixture_factors(rows, length)
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
