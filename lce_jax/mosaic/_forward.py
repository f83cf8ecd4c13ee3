"""The forward: statistics (eq. 1) of each vocabulary tile from the kernels, joined by eq. 2.

With many tokens the partial statistics are merged several times on the way, one launch each, so that they stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math, _statistics
from lce_jax._types import Case, Operands, ShardStatistics
from lce_jax.mosaic import _cache, _candidates, _chunks, _live, _mean, _partial_statistics, _remainder
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._live import TileStatistics
from lce_jax.mosaic._span import Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def statistics(
    operands: Operands, case: Case, kernels: KernelSet, keep_cache: bool
) -> tuple[ShardStatistics, Cache | TileStatistics | None]:
    """Eq. 1 of the whole shard, and as many tiles' exponentials as fit ``cache_bytes``.

    With a ``gradient_threshold``, what tells which tiles carry gradient instead.
    """
    call = Call.prepare(operands, case, kernels)
    keep_tiles = _keeps_tiles(case, keep_cache)
    scale = _math.row_scale(case.options, operands.inverse_temperature)
    num_tiles = _num_live_tiles(call)
    cached = min(_cache.num_cached_tiles(case, call.shape), num_tiles) if keep_cache else 0
    parts, cache, tiles = [], None, None
    if cached:
        part, cache, _ = _visit(call, scale, range(cached), _cache.empty(case, call.shape, cached), False)
        parts.append(part)
    if cached < num_tiles:
        part, _, tiles = _visit(call, scale, range(cached, num_tiles), None, keep_tiles)
        parts.append(part)
    if call.shape.tail:
        parts.append(jax.tree.map(lambda x: x[None], _remainder.tail_statistics(call, scale)))
    with jax.named_scope("merge_tiles"):
        stats = _statistics.merge(jax.tree.map(lambda *fields: jnp.concatenate(fields), *parts), scale)
        stats = _partial_statistics.without_floor(stats)
    total = _mean.total(operands, case) if case.options.mean_logit else None
    kept = cache if tiles is None else _live.tile_statistics(call, tiles)
    return stats._replace(total=total, candidates=_candidates.unscaled(call)), kept


def _keeps_tiles(case: Case, keep_cache: bool) -> bool:
    """Whether what is left out of the gradients must be known: for a backward, or as a result."""
    return case.options.gradient_threshold > 0 and (keep_cache or case.options.reports_dropped_mass)


def _num_live_tiles(call: Call) -> int:
    """The tiles to visit: not those of padding alone, if the number of live columns is static."""
    num_columns = call.operands.num_columns
    if isinstance(num_columns, int):
        return max(1, min(call.shape.num_tiles, -(-num_columns // call.shape.tile)))
    return call.shape.num_tiles


def _visit(
    call: Call, scale: Float[Array, "T"] | float, tiles: range, cache: Cache | None, keep_tiles: bool
) -> tuple[ShardStatistics, Cache | None, ShardStatistics | None]:
    """Eq. 1 of a range of vocabulary tiles, in unmerged parts [n, T], and the cache, if any, that they fill.

    With ``keep_tiles``, also the maximum and Σ e^u of each tile.
    """
    most = _chunks.launch_tiles(call.case, call.shape, call.kernels.budget, len(tiles))
    starts = tiles[::most]

    def launch(cache: Cache | None, first: Any) -> tuple[Cache | None, ShardStatistics]:
        num_tiles = jnp.minimum(tiles.stop - first, most) if len(tiles) % most else most
        part, cache = _launch(call, first, num_tiles, most, cache)
        return cache, _partial_statistics.to_nats(call.case, part, num_tiles)

    def merged(cache: Cache | None, first: Any) -> tuple[Cache | None, Any]:
        cache, parts = launch(cache, first)
        with jax.named_scope("merge_tiles"):
            return cache, (_statistics.merge(parts, scale), _of_tiles(parts) if keep_tiles else None)

    cache = _compat.vary_like(cache, call.prepared)
    if len(starts) == 1:
        cache, parts = launch(cache, jnp.int32(tiles.start))
        return parts, cache, _of_tiles(parts) if keep_tiles else None
    cache, (parts, kept) = lax.scan(merged, cache, jnp.asarray(starts, jnp.int32))
    return parts, cache, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[: len(tiles)], kept)


def _of_tiles(parts: ShardStatistics) -> ShardStatistics:
    return _statistics.of_fields({"max": parts.max, "sumexp": parts.sumexp})


def _launch(
    call: Call, first: Any, num_tiles: Any, most: int, cache: Cache | None
) -> tuple[Float[Array, "tiles fields T"], Cache | None]:
    """Partial statistics of ``num_tiles`` tiles from ``first`` on, unwritten from there to ``most``; their cache."""
    prepared, case, shape = call.prepared, call.case, call.shape
    # Copies into shared memory count whole atoms. If V is a multiple of the atom, nothing is cut; otherwise
    # XLA passes the kernel a view.
    in_atoms = case.vocab_size // shape.atom * shape.atom
    weight = lax.slice_in_dim(prepared.weight, 0, in_atoms, axis=case.options.vocab_dim)
    column = first * shape.tile
    span = Span(prepared.num_rows, prepared.num_columns, column, num_tiles, offset=column).pack()
    return call.kernels.statistics(prepared, weight, case, span, most, cache)
