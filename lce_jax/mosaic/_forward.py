"""The forward: kernels compute the statistics of each vocabulary tile, which are then joined (eqs. 1, 2; 6, 7).

The order in which tiles are joined depends only on their numbers. So a token's statistics have the same bits in every
call, whatever the number of launches. With many tokens there are several, so that the partial statistics stay small.

A mixture of two heads has a second pass over the same tiles, after the merge, for the sums of eq. 9 or 11. The
functions for two heads have the arguments and results of those in `lce_jax.xla._kl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _statistics
from lce_jax.mathematics._kl import KLStatistics, Mixture, MixtureSums
from lce_jax.mathematics._statistics import Parts
from lce_jax.mosaic import _candidates, _chunks, _edge, _mean_logit, _operands, _threshold
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._chunks import GROUP, Cache, KLCache, Piece
from lce_jax.mosaic._host import TRACED, Host, greatest, least
from lce_jax.mosaic._operands import make_geometry
from lce_jax.mosaic._threshold import TileStatistics
from lce_jax.mosaic.common import _statistics as kernels
from lce_jax.mosaic.common._heads import mixture_factors
from lce_jax.mosaic.common._join import Joined, Rules, join, join_keeping
from lce_jax.mosaic.common._tiles import Parted
from lce_jax.types._types import Call, Operands, ShardStatistics
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


def statistics(
    operands: Operands, call: Call, generation: Generation, keep_cache: bool
) -> tuple[ShardStatistics, Cache | TileStatistics | None]:
    """Computes the statistics of the shard (eq. 1), and caches as many tiles as fit ``cache_bytes``.

    With a ``gradient_threshold``, returns `TileStatistics` instead of a cache; they decide which tiles are active.
    """
    parts, cache = partial_statistics(operands, call, generation, keep_cache)
    return merge_statistics(
        jax.tree.map(lambda x: x[None], parts), call, generation, operands.inverse_temperature, operands.num_rows
    ), cache


def partial_statistics(
    operands: Operands, call: Call, generation: Generation, keep_cache: bool
) -> tuple[Parts, Cache | TileStatistics | None]:
    """Computes the statistics of each group of tiles in base 2, and those that no kernel computes, over the shard."""
    kernel_call = KernelCall.prepare(operands, call, generation)
    num_tiles = count_visited_tiles(kernel_call)
    cached = min(_chunks.count_cached_tiles(call, kernel_call.shape), num_tiles) if keep_cache else 0
    cache = _chunks.empty_cache(kernel_call.host, call, kernel_call.shape, cached) if cached else None
    groups, cache, maxima = join_tiles(kernel_call, num_tiles, cache, _count_saved_fields(call, keep_cache))
    total = _mean_logit.total(operands, call) if call.mean_logit else None
    x = None if operands.candidates is None else _candidates.unscaled(kernel_call, operands.candidates)
    separate = _statistics.make_statistics({"total": total, "candidates": x})
    return Parts(groups, separate), cache if maxima is None else _threshold.make_tile_statistics(kernel_call, maxima)


def merge_statistics(
    parts: Parts, call: Call, generation: Generation, inverse_temperature: Float[Array, "T"] | None, num_rows: Any
) -> ShardStatistics:
    """Merges the stacked `partial_statistics` of all shards, in the order of the groups.

    If each shard consists of whole groups, the result has the same bits for any number of shards.
    """
    shape = make_geometry(call, generation.tiling)
    row_scale = _operands.compute_row_scale(inverse_temperature, call, shape)
    num_rows = _operands.count_rows(num_rows, shape)
    groups = parts.groups.reshape(-1, *parts.groups.shape[2:])
    joined = join_groups(TRACED, call, (row_scale,), num_rows, groups)[0]
    total, candidates = parts.separate.total, parts.separate.candidates
    return _operands.unstack_statistics(call, joined)._replace(
        total=None if total is None else _statistics.sum_in_order(total),
        candidates=None if candidates is None else jnp.max(candidates, axis=0),
    )


def _count_saved_fields(call: Call, keep_cache: bool) -> int:
    """Returns how many fields of each tile are saved, to select the active tiles or to report the dropped mass."""
    if not call.gradient_threshold:
        return 0
    return 2 if call.reports_dropped_mass else int(keep_cache)


def count_visited_tiles(kernel_call: KernelCall) -> int:
    """Returns how many tiles to visit. If the number of columns is static, tiles of only padding are skipped."""
    num_columns = kernel_call.operands.num_columns
    if isinstance(num_columns, int):
        return max(1, min(kernel_call.shape.num_tiles, kernel_call.shape.count_tiles(num_columns)))
    return kernel_call.shape.num_tiles


def join_tiles(
    kernel_call: KernelCall, num_tiles: int, cache: Cache | None, saved_fields: int = 0, more_fields: int = 0
) -> tuple[Float[Array, "groups fields Tp"], Cache | None, Float[Array, "tiles saved Tp"] | None]:
    """Computes the statistics of each group of tiles (eq. 1) in base 2, and fills the cache with the first tiles.

    Only the first ``num_tiles`` tiles are visited; the others are padding. Each group ends with ``more_fields`` free
    fields. Also returns the first ``saved_fields`` fields of each tile, for whole groups of tiles.
    """
    call, host = kernel_call.call, kernel_call.host

    def launch(span: Array, parts: Array, cache: Cache | None, weight: Array, *adapter: Array) -> Any:
        arguments = kernel_call.generation, kernel_call.arrays, weight, call, span, parts, cache
        return host.launch(kernels.statistics, *arguments, *adapter)

    maxima = host.empty(maxima_shape(kernel_call, saved_fields), jnp.float32) if saved_fields else None
    scales = (kernel_call.prepared.row_scale,)
    return _join_windows(kernel_call, call, scales, num_tiles, launch, cache, maxima, more_fields)


def _join_windows[C, M](
    kernel_call: KernelCall,
    of: Joined,
    row_scales: tuple[Float[Array, "Tp"], ...],
    num_tiles: int,
    launch: Callable[..., tuple[Array, Any]],
    cache: C,
    maxima: M,
    more_fields: int,
    factors: Any = None,
) -> tuple[Float[Array, "groups fields Tp"], C, M]:
    """Launches as many tiles at a time as fit the budget, and joins each group. Returns what `join_tiles` does."""
    shape, host, fields = kernel_call.shape, kernel_call.host, len(Rules.of(of).none)
    budget = fields, shape, kernel_call.generation.budget
    most, per_launch = _chunks.choose_launch_tiles(*budget), _chunks.choose_launch_groups(*budget)
    launches = range(0, _chunks.count_groups(shape), per_launch)
    parted = Parted(per_launch, shape.part_tiles) if shape.has_parts else None
    inputs = [one.prepared for one in kernel_call.heads], factors

    def memory(count: int, more_fields: int = 0) -> Any:
        return host.empty((count, fields + more_fields, shape.padded_tokens), jnp.float32)

    def window(group: Any, carry: Any) -> Any:
        cache, groups, maxima = carry
        first = _chunks.first_tile(shape, group)
        last = greatest(least(_chunks.first_tile(shape, group + per_launch), num_tiles), first)
        parts = host.vary_like(memory(most), inputs)
        # Copies into shared memory move whole atoms.
        dim, weights = kernel_call.call.vocab_dim, [one.prepared.weight for one in kernel_call.sources]
        weights = [host.prefix(x, x.shape[dim] // shape.atom * shape.atom, dim) for x in weights]
        parts, cache = _launch_tiles(kernel_call, first, last, parts, cache, weights, launch)
        with jax.named_scope("join_tiles"):
            operands = row_scales, parts, groups, of, GROUP
            numbers = host.numbers(kernel_call.prepared.num_rows, last - first, group)
            if maxima is None:
                groups = host.launch(join, *operands, numbers, False, parted)
            else:
                groups, maxima = host.launch(join_keeping, *operands, numbers, maxima)
        return cache, groups, maxima

    start = cache, memory(_chunks.count_groups(shape), more_fields), maxima
    cache, groups, maxima = host.loop(launches, window, host.vary_like(start, inputs))
    return groups, cache, maxima


def maxima_shape(kernel_call: KernelCall, saved_fields: int) -> tuple[int, int, int]:
    """Returns the shape of the fields that `join_tiles` saves of each tile: [tiles, fields, Tp]."""
    fields = len(_operands.list_statistics(kernel_call.call))
    most = _chunks.choose_launch_groups(fields, kernel_call.shape, kernel_call.generation.budget)
    num_launches = -(-_chunks.count_groups(kernel_call.shape) // most)
    return num_launches * most * GROUP, saved_fields, kernel_call.shape.padded_tokens


def join_groups(
    host: Host,
    of: Joined,
    row_scales: tuple[Float[Array, "Tp"], ...],
    num_rows: Any,
    groups: Float[Array, "groups fields Tp"],
) -> Float[Array, "1 fields Tp"]:
    """Joins the statistics of all groups, and returns their union in nats."""
    numbers = host.numbers(num_rows, len(groups), 0)
    joined = host.empty((1, len(Rules.of(of).none), groups.shape[2]), groups.dtype)
    joined = host.vary_like(joined, (groups, row_scales))
    with jax.named_scope("join_tiles"):
        return host.launch(join, row_scales, groups, joined, of, -(-len(groups) // GROUP) * GROUP, numbers, True)


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

    Calls ``launch(span, parts, cache, *weights)`` up to three times: for the cached tiles, for the other tiles, and for
    the tile that is read from a copy.
    """
    shape, uncopied = kernel_call.shape, _edge.count_whole_tiles(kernel_call)
    cached = 0 if cache is None else cache.num_tiles
    for begin, count, (start, stop, copied) in _chunks.plan_launches(
        first, last, _make_pieces(cached, uncopied, shape.num_tiles)
    ):
        keeps = stop <= cached
        offset = 0 if copied else shape.column(begin)
        span = kernel_call.span(column=begin * shape.tile, num_tiles=count, offset=offset, slot=begin - first)
        sources = [_edge.copy_tile(one, start) for one in kernel_call.sources] if copied else weights
        parts, updated = launch(span, parts, cache if keeps else None, *sources)
        cache = updated if keeps else cache
    return parts, cache


def _make_pieces(cached: int, uncopied: int, num_tiles: int) -> list[Piece]:
    """Returns the `Piece` of each kind of launch: cached tiles, other tiles, and tiles read from a copy, if any."""
    middle = min(cached, uncopied)
    pieces = [(0, middle, False), (middle, uncopied, False), (uncopied, num_tiles, True)]
    return [piece for piece in pieces if piece[0] < piece[1]]


def kl_statistics(
    plan: KLPlan, shard: Shard, generation: Generation, keep_cache: bool
) -> tuple[KLStatistics, KLCache | None]:
    """Computes the statistics of both heads (eqs. 1, 6), and caches as many tiles as fit ``cache_bytes``."""
    kernel_call = KernelCall.prepare_heads(plan, shard, generation)
    groups, cache = join_heads(kernel_call, keep_cache)
    joined = join_groups(TRACED, KLStatistics, kernel_call.kernel_scales, kernel_call.prepared.num_rows, groups)
    return KLStatistics(*joined[0, :, : kernel_call.call.num_tokens]), cache


def kl_mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture, generation: Generation) -> MixtureSums:
    """Computes the sums of eq. 9 or 11 over the shard, [T] each."""
    kernel_call = KernelCall.prepare_heads(plan, shard, generation)
    groups = join_mixture(kernel_call, mixture_factors(rows, kernel_call.shape.padded_tokens))
    joined = join_groups(TRACED, MixtureSums, (), kernel_call.prepared.num_rows, groups)
    return MixtureSums(*joined[0, :, : kernel_call.call.num_tokens])


def join_heads(
    kernel_call: KernelCall, keep_cache: bool, more_fields: int = 0
) -> tuple[Float[Array, "groups fields Tp"], KLCache | None]:
    """Computes the statistics of both heads for each group of tiles, in base 2, and fills the cache.

    `join_tiles` does this for one head.
    """
    plan, shape, host = kernel_call.plan, kernel_call.shape, kernel_call.host
    assert plan is not None
    cached = _chunks.count_cached_kl_tiles(plan, shape) if keep_cache else 0
    cache = _chunks.empty_kl_cache(host, plan, shape, cached) if cached else None

    def launch(span: Array, parts: Array, cache: KLCache | None, *weights: Array) -> tuple[Array, KLCache | None]:
        arguments = kernel_call.generation, kernel_call.kl_calls, kernel_call.kl_operands(weights), span, parts, cache
        return host.launch(kernels.kl_statistics, *arguments, plan.direction)

    arguments = KLStatistics, kernel_call.kernel_scales, shape.count_tiles(plan.columns), launch, cache, None
    groups, cache, _ = _join_windows(kernel_call, *arguments, more_fields)
    return groups, cache


def join_mixture(kernel_call: KernelCall, factors: Float[Array, "14 Tp"]) -> Float[Array, "groups 2 Tp"]:
    """Computes the sums of eq. 9 or 11 for each group of tiles, in base 2."""
    plan = kernel_call.plan
    assert plan is not None

    def launch(span: Array, parts: Array, cache: None, *weights: Array) -> tuple[Array, None]:
        arguments = kernel_call.generation, kernel_call.kl_calls, kernel_call.kl_operands(weights), factors, span, parts
        return kernel_call.host.launch(kernels.kl_mixture_sums, *arguments, plan.direction), cache

    num_tiles = kernel_call.shape.count_tiles(plan.columns)
    return _join_windows(kernel_call, MixtureSums, (), num_tiles, launch, None, None, 0, factors)[0]
