"""The forward: kernels compute the statistics of each vocabulary tile, which are then joined (eqs. 1, 2; 6, 7).

The order in which tiles are joined depends only on their numbers. So a token's statistics have the same bits in every
call, however many launches it takes. With many tokens there are several launches, so that the partial statistics stay
small. A kernel joins the statistics of one head, and XLA those of two heads.

A mixture of two heads has a second pass over the same tiles, after the merge: the sums of eq. 9. The functions for two
heads have the arguments and results of `lce_jax.xla._kl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _kl, _statistics
from lce_jax.mathematics._kl import KLStatistics, Mixture, MixtureSums
from lce_jax.mathematics._statistics import MASKED, Parts
from lce_jax.mosaic import _candidates, _chunks, _edge, _mean, _operands, _threshold
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._chunks import GROUP, Cache, KLCache, Piece
from lce_jax.mosaic._host import TRACED, Host, greatest, least
from lce_jax.mosaic._operands import LOG2E, make_geometry
from lce_jax.mosaic._threshold import TileStatistics
from lce_jax.mosaic.common import _statistics as kernels
from lce_jax.mosaic.common._heads import mixture_factors
from lce_jax.mosaic.common._join import join, join_keeping
from lce_jax.mosaic.common._tiles import Parted
from lce_jax.types._types import Call, Operands, ShardStatistics
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


def statistics(
    operands: Operands, call: Call, generation: Generation, keep_cache: bool
) -> tuple[ShardStatistics, Cache | TileStatistics | None]:
    """Computes the statistics of the shard (eq. 1), and caches as many tiles as fit ``cache_bytes``.

    With a ``gradient_threshold``, it returns `TileStatistics` instead, which decide which tiles are active.
    """
    parts, cache = partial_statistics(operands, call, generation, keep_cache)
    return merge_statistics(
        jax.tree.map(lambda x: x[None], parts), call, generation, operands.inverse_temperature, operands.num_rows
    ), cache


def partial_statistics(
    operands: Operands, call: Call, generation: Generation, keep_cache: bool
) -> tuple[Parts, Cache | TileStatistics | None]:
    """Computes the statistics of each group of tiles in base 2, and separately those that no kernel computes."""
    kernel_call = KernelCall.prepare(operands, call, generation)
    num_tiles = count_visited_tiles(kernel_call)
    cached = min(_chunks.count_cached_tiles(call, kernel_call.shape), num_tiles) if keep_cache else 0
    cache = _chunks.empty_cache(kernel_call.host, call, kernel_call.shape, cached) if cached else None
    groups, cache, maxima = join_tiles(kernel_call, num_tiles, cache, _count_saved_fields(call, keep_cache))
    total = _mean.total(operands, call) if call.mean_logit else None
    x = None if operands.candidates is None else _candidates.unscaled(kernel_call, operands.candidates)
    beside = _statistics.make_statistics({"total": total, "candidates": x})
    return Parts(groups, beside), cache if maxima is None else _threshold.make_tile_statistics(kernel_call, maxima)


def merge_statistics(
    parts: Parts, call: Call, generation: Generation, inverse_temperature: Float[Array, "T"] | None, num_rows: Any
) -> ShardStatistics:
    """Merges the stacked `partial_statistics` of all shards, in the order of the groups.

    If the shards are whole groups, the result has the same bits for any number of shards.
    """
    shape = make_geometry(call, generation.tiling)
    row_scale = _operands.compute_row_scale(inverse_temperature, call, shape)
    num_rows = _operands.count_rows(num_rows, shape)
    groups = parts.groups.reshape(-1, *parts.groups.shape[2:])
    joined = join_groups(TRACED, call, row_scale, num_rows, groups)[0]
    total, candidates = parts.separate.total, parts.separate.candidates
    return _operands.unstack_statistics(call, joined)._replace(
        total=None if total is None else jnp.sum(total, axis=0),
        candidates=None if candidates is None else jnp.max(candidates, axis=0),
    )


def _count_saved_fields(call: Call, keep_cache: bool) -> int:
    """Returns how many fields of each tile are saved, to select the active tiles or to report the dropped mass."""
    if not call.gradient_threshold:
        return 0
    return 2 if call.reports_dropped_mass else int(keep_cache)


def count_visited_tiles(kernel_call: KernelCall) -> int:
    """Returns how many tiles to visit. Tiles that are only padding are skipped if the number of columns is static."""
    num_columns = kernel_call.operands.num_columns
    if isinstance(num_columns, int):
        return max(1, min(kernel_call.shape.num_tiles, kernel_call.shape.count_tiles(num_columns)))
    return kernel_call.shape.num_tiles


def join_tiles(
    kernel_call: KernelCall, num_tiles: int, cache: Cache | None, saved_fields: int = 0, more_fields: int = 0
) -> tuple[Float[Array, "groups fields Tp"], Cache | None, Float[Array, "tiles kept Tp"] | None]:
    """Computes the statistics of each group of tiles (eq. 1) in base 2, and fills the cache with the first tiles.

    Only the first ``num_tiles`` tiles are visited; the others are padding. The groups have room for ``more_fields``. It
    also returns the first ``saved_fields`` of each tile, in whole groups.
    """
    call, shape, host = kernel_call.call, kernel_call.shape, kernel_call.host
    most, per_launch = (
        of(call, shape, kernel_call.generation.budget)
        for of in (_chunks.choose_launch_tiles, _chunks.choose_launch_groups)
    )
    launches = range(0, _chunks.count_groups(shape), per_launch)
    parted = Parted(per_launch, shape.part_tiles) if shape.has_parts else None

    def memory(count: int, more_fields: int = 0) -> Any:
        return host.empty(_operands.statistics_shape(call, shape, count, more_fields), jnp.float32)

    def launch(span: Array, parts: Array, cache: Cache | None, weight: Array, *adapter: Array) -> Any:
        given = kernel_call.generation, kernel_call.arrays, weight, call, span, parts, cache
        return host.launch(kernels.statistics, *given, *adapter)

    def window(group: Any, carry: Any) -> Any:
        cache, groups, maxima = carry
        first = _chunks.first_tile(shape, group)
        last = greatest(least(_chunks.first_tile(shape, group + per_launch), num_tiles), first)
        parts = host.vary_like(memory(most), kernel_call.prepared)
        # Copies into shared memory move whole atoms.
        in_atoms = call.columns // shape.atom * shape.atom
        weights = [host.prefix(one.prepared.weight, in_atoms, call.vocab_dim) for one in kernel_call.sources]
        parts, cache = _launch_tiles(kernel_call, first, last, parts, cache, weights, launch)
        with jax.named_scope("join_tiles"):
            given = kernel_call.prepared.row_scale, parts, groups, call, GROUP
            numbers = host.numbers(kernel_call.prepared.num_rows, last - first, group)
            if maxima is None:
                groups = host.launch(join, *given, numbers, False, parted)
            else:
                groups, maxima = host.launch(join_keeping, *given, numbers, maxima)
        return cache, groups, maxima

    maxima = host.empty(maxima_shape(kernel_call, saved_fields), jnp.float32) if saved_fields else None
    start = cache, memory(_chunks.count_groups(shape), more_fields), maxima
    cache, groups, maxima = host.loop(launches, window, host.vary_like(start, kernel_call.prepared))
    return groups, cache, maxima


def maxima_shape(kernel_call: KernelCall, saved_fields: int) -> tuple[int, int, int]:
    """Returns the shape of the fields that `join_tiles` saves of each tile: [tiles, fields, Tp]."""
    most = _chunks.choose_launch_groups(kernel_call.call, kernel_call.shape, kernel_call.generation.budget)
    num_launches = -(-_chunks.count_groups(kernel_call.shape) // most)
    return num_launches * most * GROUP, saved_fields, kernel_call.shape.padded_tokens


def join_groups(
    host: Host,
    call: Call,
    row_scale: Float[Array, "Tp"],
    num_rows: Any,
    groups: Float[Array, "groups fields Tp"],
) -> Float[Array, "1 fields Tp"]:
    """Joins all groups, and returns the union in nats."""
    numbers = host.numbers(num_rows, len(groups), 0)
    joined = host.empty((1, len(_operands.list_statistics(call)), groups.shape[2]), groups.dtype)
    joined = host.vary_like(joined, (groups, row_scale))
    with jax.named_scope("join_tiles"):
        return host.launch(join, row_scale, groups, joined, call, -(-len(groups) // GROUP) * GROUP, numbers, True)


def _launch_tiles(
    kernel_call: KernelCall,
    first: Any,
    last: Any,
    parts: Float[Array, "tiles fields Tp"],
    cache: Any,
    weights: Sequence[Float[Array, "V H"]],
    launch: Callable[..., tuple[Array, Any]],
) -> tuple[Float[Array, "tiles fields Tp"], Any]:
    """Writes the statistics of the tiles from ``first`` to ``last`` to ``parts``, and caches the first tiles.

    It calls ``launch(span, parts, cache, *weights)`` for the cached tiles, for the other tiles, and for the copied
    tile. Each of these may be empty.
    """
    shape, whole = kernel_call.shape, _edge.count_whole_tiles(kernel_call)
    cached = 0 if cache is None else cache.num_tiles
    for begin, count, (start, stop, copied) in _chunks.plan_launches(
        first, last, _make_pieces(cached, whole, shape.num_tiles)
    ):
        keeps = stop <= cached
        offset = 0 if copied else shape.column(begin)
        span = kernel_call.span(column=begin * shape.tile, num_tiles=count, offset=offset, slot=begin - first)
        sources = [_edge.copy_tile(one, start) for one in kernel_call.sources] if copied else weights
        parts, kept = launch(span, parts, cache if keeps else None, *sources)
        cache = kept if keeps else cache
    return parts, cache


def _make_pieces(cached: int, whole: int, num_tiles: int) -> list[Piece]:
    """Returns the tiles [start, stop) of each kind of launch, and whether it reads a copy of the weight."""
    middle = min(cached, whole)
    pieces = [(0, middle, False), (middle, whole, False), (whole, num_tiles, True)]
    return [piece for piece in pieces if piece[0] < piece[1]]


def kl_statistics(
    plan: KLPlan, shard: Shard, generation: Generation, keep_cache: bool
) -> tuple[KLStatistics, KLCache | None]:
    """Computes the statistics of both heads (eqs. 1, 6), and caches as many tiles as fit ``cache_bytes``."""
    kernel_call = KernelCall.prepare_heads(plan, shard, generation)
    cached = _chunks.count_cached_kl_tiles(plan, kernel_call.shape) if keep_cache else 0

    def launch(span: Array, parts: Array, cache: KLCache | None, *weights: Array) -> tuple[Array, KLCache | None]:
        given = generation, kernel_call.kl_calls, kernel_call.kl_operands(weights), span, parts, cache, plan.direction
        return kernel_call.host.launch(kernels.kl_statistics, *given)

    def merge(running: KLStatistics | None, parts: Array, count: Any) -> KLStatistics:
        union = _kl.merge(_tile_statistics(parts, count), kernel_call.row_scales)
        if running is None:
            return union
        return _kl.merge(jax.tree.map(lambda *x: jnp.stack(x), running, union), kernel_call.row_scales)

    start = _kl.empty_statistics(kernel_call.call.num_tokens, jnp.float32)
    kept = _chunks.empty_kl_cache(kernel_call.host, plan, kernel_call.shape, cached) if cached else None
    found, cache = _fold_tiles(kernel_call, plan.columns, shard, _chunks.KL_FIELDS, launch, merge, start, kept)
    max_p, max_q, at_p = (jnp.where(found.sum_p == 0.0, MASKED, x) for x in found.references)
    return found._replace(max_p=max_p, max_q=max_q, at_p=at_p), cache


def kl_mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture, generation: Generation) -> MixtureSums:
    """Computes the sums of eq. 9 over the shard, [T] each."""
    kernel_call = KernelCall.prepare_heads(plan, shard, generation)
    factors = mixture_factors(rows, kernel_call.shape.padded_tokens)

    def launch(span: Array, parts: Array, cache: None, *weights: Array) -> tuple[Array, None]:
        given = generation, kernel_call.kl_calls, kernel_call.kl_operands(weights), factors, span, parts
        return kernel_call.host.launch(kernels.kl_mixture_sums, *given), cache

    def add(running: Array | None, parts: Array, count: Any) -> Array:
        parts = parts if count is None else jnp.where(_mask_tiles(parts, count)[..., None], parts, 0.0)
        total = jnp.sum(parts, axis=0)
        return total if running is None else running + total

    zeros = jnp.zeros((len(MixtureSums._fields), kernel_call.call.num_tokens), jnp.float32)
    found, _ = _fold_tiles(kernel_call, plan.columns, (shard, rows), len(zeros), launch, add, zeros, None)
    return MixtureSums(*(found * (1.0 / LOG2E)))


def _fold_tiles[S](
    kernel_call: KernelCall,
    columns: int,
    given: Any,
    fields: int,
    launch: Callable[..., tuple[Array, Any]],
    merge: Callable[[S | None, Array, Any], S],
    start: S,
    cache: KLCache | None,
) -> tuple[S, KLCache | None]:
    """Folds ``running = merge(running, parts, count)`` over windows of tiles of two heads that fit the budget.

    The first ``count`` tiles of ``parts`` are valid. If there is a single window, ``running`` and ``count`` are None.
    """
    host, shape = kernel_call.host, kernel_call.shape
    num_tiles, most = (
        shape.count_tiles(columns),
        _chunks.choose_kl_launch_tiles(shape, kernel_call.generation.budget, columns),
    )

    def window(first: Any, carry: tuple[S, KLCache | None]) -> tuple[S, KLCache | None]:
        running, cache = carry
        count = least(num_tiles - first, most)
        parts = host.vary_like(host.empty((most, fields, shape.padded_tokens), jnp.float32), given)
        weights = [one.prepared.weight for one in kernel_call.sources]  # V is whole atoms
        parts, cache = _launch_tiles(kernel_call, first, first + count, parts, cache, weights, launch)
        with jax.named_scope("join_tiles"):
            parts = parts[..., : kernel_call.call.num_tokens]
            return merge(None, parts, None) if num_tiles <= most else merge(running, parts, count), cache

    return host.loop(range(0, num_tiles, most), window, host.vary_like((start, cache), given))


def _tile_statistics(parts: Float[Array, "tiles 6 T"], count: Any) -> KLStatistics:
    """Returns the statistics of each tile, with ``cross`` in nats. Tiles after the first ``count`` are empty."""
    stats = KLStatistics(*(parts[:, i] for i in range(_chunks.KL_FIELDS)))
    stats = stats._replace(cross=stats.cross * (1.0 / LOG2E))
    if count is None:
        return stats
    computed, none = _mask_tiles(parts, count), _kl.empty_statistics(1, parts.dtype)
    return jax.tree.map(lambda x, other: jnp.where(computed, x, other), stats, none)


def _mask_tiles(parts: Float[Array, "tiles fields T"], count: Any) -> Bool[Array, "tiles 1"]:
    """Returns a mask of the first ``count`` tiles."""
    return jnp.arange(parts.shape[0], dtype=jnp.int32)[:, None] < count
