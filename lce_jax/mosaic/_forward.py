"""The forward: statistics (eq. 1) of each vocabulary tile from the kernels, joined by eq. 2.

The tiles' numbers alone say which tiles are joined first and in what order. So a token's statistics have the same bits
whatever else is in the call, and however many launches it takes. With many tokens there are several, so that the
partial statistics stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax._types import Case, Operands, ShardStatistics
from lce_jax.mosaic import _cache, _candidates, _chunks, _edge, _live, _mean, _partial_statistics
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._chunks import GROUP
from lce_jax.mosaic._host import greatest, least
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._live import TileStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def statistics(
    operands: Operands, case: Case, kernels: KernelSet, keep_cache: bool
) -> tuple[ShardStatistics, Cache | TileStatistics | None]:
    """Eq. 1 of the whole shard, and as many tiles' exponentials as fit ``cache_bytes``.

    With a ``gradient_threshold``, what tells which tiles carry gradient instead.
    """
    call = Call.prepare(operands, case, kernels)
    num_tiles = num_live_tiles(call)
    cached = min(_cache.num_cached_tiles(case, call.shape), num_tiles) if keep_cache else 0
    cache = _cache.empty(call.host, case, call.shape, cached) if cached else None
    groups, cache, maxima = joined(call, num_tiles, cache, _kept_fields(case, keep_cache))
    stats = _partial_statistics.to_nats(_partial_statistics.unstacked(case, join_all(call, groups)[0]))
    total = _mean.total(operands, case) if case.options.mean_logit else None
    kept = cache if maxima is None else _live.tile_statistics(call, maxima)
    return stats._replace(total=total, candidates=_candidates.unscaled(call)), kept


def _kept_fields(case: Case, keep_cache: bool) -> int:
    """What is kept of each tile, where what is left out of the gradients must be known: for a backward, as a result."""
    if not case.options.gradient_threshold:
        return 0
    return 2 if case.options.reports_dropped_mass else int(keep_cache)


def num_live_tiles(call: Call) -> int:
    """The tiles to visit: not those of padding alone, if the number of live columns is static."""
    num_columns = call.operands.num_columns
    if isinstance(num_columns, int):
        return max(1, min(call.shape.num_tiles, -(-num_columns // call.shape.tile)))
    return call.shape.num_tiles


def joined(
    call: Call, num_tiles: int, cache: Cache | None, kept_fields: int = 0
) -> tuple[Float[Array, "groups fields Tp"], Cache | None, Float[Array, "tiles kept Tp"] | None]:
    """Eq. 1 of each group of the shard's first ``num_tiles`` tiles, in base 2; the cache with the first tiles' part.

    Also the first ``kept_fields`` of each tile, whole groups of tiles.
    """
    case, shape, kernels, host = call.case, call.shape, call.kernels, call.host
    most = _chunks.launch_tiles(case, shape, kernels.budget, num_tiles)
    firsts = range(0, num_tiles, most)

    def memory(count: int) -> Any:
        return host.empty(_partial_statistics.array_shape(case, shape, count), jnp.float32)

    def window(first: Any, carry: Any) -> Any:
        cache, groups, maxima = carry
        last = least(first + most, num_tiles)
        parts, cache = _window(call, first, last, memory(most), cache)
        with jax.named_scope("join_tiles"):
            numbers = host.numbers(call.prepared.num_rows, last - first, first // GROUP)
            if maxima is None:
                groups = kernels.join(call.prepared, parts, groups, case, GROUP, numbers)
            else:
                groups, maxima = kernels.join_keeping(call.prepared, parts, groups, case, GROUP, numbers, maxima)
        return cache, groups, maxima

    kept = maxima_shape(call, num_tiles, kept_fields)
    start = cache, memory(kept[0] // GROUP), host.empty(kept, jnp.float32) if kept_fields else None
    cache, groups, maxima = host.loop(firsts, window, host.vary_like(start, call.prepared))
    return groups, cache, maxima


def maxima_shape(call: Call, num_tiles: int, kept_fields: int) -> tuple[int, int, int]:
    """What `joined` keeps of each tile: [tiles, fields, Tp]."""
    most = _chunks.launch_tiles(call.case, call.shape, call.kernels.budget, num_tiles)
    launches = -(-num_tiles // most)
    return launches * -(-most // GROUP) * GROUP, kept_fields, call.shape.padded_tokens


def join_all(
    call: Call, groups: Float[Array, "groups fields Tp"], into: Float[Array, "1 fields Tp"] | None = None
) -> Float[Array, "1 fields Tp"]:
    """The union of all groups, in memory that is given or new."""
    numbers = call.host.numbers(call.prepared.num_rows, len(groups), 0)
    joined = call.host.empty((1, *groups.shape[1:]), groups.dtype) if into is None else into
    joined = call.host.vary_like(joined, groups)
    with jax.named_scope("join_tiles"):
        return call.kernels.join(call.prepared, groups, joined, call.case, -(-len(groups) // GROUP) * GROUP, numbers)


def _window(
    call: Call, first: Any, last: Any, parts: Float[Array, "tiles fields Tp"], cache: Cache | None
) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
    """Partial statistics of the tiles from ``first`` to ``last``, and the cache with theirs.

    A launch for the tiles that the cache keeps, one for the others, one for the tile that is copied: each may be empty.
    """
    case, shape, whole = call.case, call.shape, _edge.whole_tiles(call)
    # Copies into shared memory count whole atoms.
    in_atoms = case.vocab_size // shape.atom * shape.atom
    weight = call.host.prefix(call.prepared.weight, in_atoms, case.options.vocab_dim)
    cached = 0 if cache is None else cache.max.shape[0]
    parts = call.host.vary_like(parts, call.prepared)
    for start, stop, copied in _pieces(cached, whole, shape.num_tiles):
        begin, keeps = greatest(first, start), stop <= cached
        count = greatest(least(last, stop) - begin, 0)
        if isinstance(count, int) and count == 0:
            continue
        column = begin * shape.tile
        span = call.span(column=column, num_tiles=count, offset=0 if copied else column, slot=begin - first)
        source = _edge.weight(call, start) if copied else weight
        parts, kept = call.kernels.statistics(call.prepared, source, case, span, parts, cache if keeps else None)
        cache = kept if keeps else cache
    return parts, cache


def _pieces(cached: int, whole: int, num_tiles: int) -> list[tuple[int, int, bool]]:
    """The tiles [start, stop) of each kind of launch, and whether it reads a copy."""
    middle = min(cached, whole)
    pieces = [(0, middle, False), (middle, whole, False), (whole, num_tiles, True)]
    return [piece for piece in pieces if piece[0] < piece[1]]
