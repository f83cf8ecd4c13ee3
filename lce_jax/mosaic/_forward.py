"""The forward kernel: statistics (eq. 1) of each [64, 256] tile of logits straight from the accumulator.

Inside, everything is in bits: exp2 is one instruction, and log2(e) folds into the row's scale. Each tile writes its
own statistics per token; `_statistics.merge` joins them outside (eq. 2). With many tokens that is done several times
on the way, a launch each, so that they stay small. With a cache, a tile's exponentials leave through shared memory,
rounded, relative to the tile's own maximum, which is kept beside them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math, _statistics
from lce_jax._compat import plgpu
from lce_jax._types import Case, Operands, Options, ShardStatistics
from lce_jax.mosaic import _cached, _config, _mean, _operands, _pipeline
from lce_jax.mosaic._cached import FP16_SHIFT, Cache
from lce_jax.mosaic._config import ATOM_ROWS, STAGING_COLUMNS, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic._operands import FLOOR, LOG2E, PADDING, Prepared, Span
from lce_jax.mosaic._pipeline import Matmul, Tile

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def statistics(
    operands: Operands, case: Case, keep_cache: bool, interpret: Any = None
) -> tuple[ShardStatistics, Cache | None]:
    """Eq. 1 of the whole shard, and as many tiles' exponentials as ``cache_bytes`` pays for."""
    prepared = _operands.prepare(operands, case)
    scale = _math.row_scale(case.options, operands.inverse_temperature)
    num_tiles = _live_tiles(operands, case)
    cached = min(_config.cached_tiles(case), num_tiles) if keep_cache else 0
    parts, cache = [], None
    if cached:
        part, cache = _visit(prepared, case, scale, range(cached), _cached.empty(case, cached), interpret)
        parts.append(part)
    if cached < num_tiles:
        parts.append(_visit(prepared, case, scale, range(cached, num_tiles), None, interpret)[0])
    if _config.geometry(case).tail:
        parts.append(jax.tree.map(lambda x: x[None], _tail_statistics(operands, case, scale)))
    stats = _statistics.merge(jax.tree.map(lambda *fields: jnp.concatenate(fields), *parts), scale)
    stats = _statistics.to_logits(stats, scale)
    return stats._replace(total=_mean.total(operands, case) if case.options.mean_logit else None), cache


def _tail_statistics(operands: Operands, case: Case, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Eq. 1 of the columns, at most 15, that are no whole swizzle atom. Their weight is [n, H]: "hv" has none."""
    shape = _config.geometry(case)
    weight = operands.weight[shape.columns :]
    raw = lax.dot_general(operands.hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    x = _math.unscaled_logits(raw, case.options)
    live = _math.live_columns(shape.columns, shape.tail, operands.num_columns)
    return _math.tile_statistics(x, scale, operands.targets - shape.columns, live, case.options)._replace(total=None)


def _live_tiles(operands: Operands, case: Case) -> int:
    """The tiles to visit: where the number of live columns is static, none of padding alone."""
    shape = _config.geometry(case)
    if isinstance(operands.num_columns, int):
        return max(1, min(shape.tiles, -(-operands.num_columns // TILE_N)))
    return shape.tiles


def _visit(
    prepared: Prepared,
    case: Case,
    scale: Float[Array, "T"] | float,
    tiles: range,
    cache: Cache | None,
    interpret: Any,
) -> tuple[ShardStatistics, Cache | None]:
    """Eq. 1 of parts [n, T] of a range of vocabulary tiles, yet to be merged, and the cache, if any, filled by them."""
    most = _config.launch_tiles(case, len(tiles))
    starts = tiles[::most]

    def launch(cache: Cache | None, first: Any) -> tuple[Cache | None, ShardStatistics]:
        num_tiles = jnp.minimum(tiles.stop - first, most) if len(tiles) % most else most
        part, cache = _launch(prepared, case, first, num_tiles, most, cache, interpret)
        return cache, _to_nats(case, part, num_tiles)

    def merged(cache: Cache | None, first: Any) -> tuple[Cache | None, ShardStatistics]:
        cache, parts = launch(cache, first)
        return cache, _statistics.merge(parts, scale)

    cache = _compat.vary_like(cache, prepared)
    if len(starts) == 1:
        cache, parts = launch(cache, jnp.int32(tiles.start))
    else:
        cache, parts = lax.scan(merged, cache, jnp.asarray(starts, jnp.int32))
    return parts, cache


def _launch(
    prepared: Prepared, case: Case, first: Any, num_tiles: Any, most: int, cache: Cache | None, interpret: Any
) -> tuple[Float[Array, "tiles fields T"], Cache | None]:
    """Partial statistics of ``num_tiles`` tiles from ``first`` on, unwritten up to ``most``; the cache with theirs."""
    matmul = _pipeline.logits(case, "forward")
    partial = jax.ShapeDtypeStruct(_config.statistics_shape(case, most), jnp.float32)
    kept = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(cache)]
    # Nothing is cut where V is a multiple of 8; else XLA passes the kernel a view, for TMA counts whole atoms of rows.
    atoms = case.vocab_size // ATOM_ROWS * ATOM_ROWS
    weight = lax.slice_in_dim(prepared.weight, 0, atoms, axis=case.options.vocab_dim)
    column = first * TILE_N
    span = Span(prepared.num_rows, prepared.num_columns, column, num_tiles, origin=column)
    operands = [
        prepared.hidden, weight, prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, span.pack(),
    ]  # fmt: skip
    run = _pipeline.kernel(
        matmul,
        functools.partial(_kernel, matmul),
        [partial, *kept],
        "lce_statistics_cached" if kept else "lce_statistics",
        interpret,
        updated={len(operands) + i: 1 + i for i in range(len(kept))},
    )
    part, *kept = run(*operands, *jax.tree.leaves(cache))
    return part, Cache(*kept) if kept else None


def _kernel(
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    scalars: Any,  # a `Span`
    *results: Any,  # [tiles, fields, Tp]; with a cache: the cache as it was, these, and the cache as it will be
) -> None:
    cache: Any = Cache(*results[3:]) if len(results) > 1 else None
    partial = results[0 if cache is None else 2]
    options, span = matmul.case.options, Span.unpack(scalars)
    first_tile = span.first_tile

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _pipeline.load_rows(scale, tile.rows)
        column, position = span.column + tile.column, tile.place.position
        target = _pipeline.load_rows(targets, tile.rows) - column
        holds = holds_target[tile.place.row_block, first_tile + position] > 0
        z = multiply()
        if options.logit_softcap is not None:
            z = _pipeline.softcap(z, options.logit_softcap, options)
        real = functools.partial(_pipeline.without_padding, z, column, span.num_columns, mask)
        lowest = jnp.min(real(-PADDING), axis=1) if options.stats else None
        z = real(PADDING)
        highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
        # The target before the exponentials, so that z dies block by block; without them after: each spills otherwise.
        if cache is not None:
            at_target = _target_logit(z, target, holds)
            send = functools.partial(_send_exponentials, slots, tile.rows, cache.exponentials, column)
            sumexp, weighted = _sums(z, row_scale, highest, options, STAGING_COLUMNS, send)
            cache.max.at[first_tile + position, tile.rows][...] = highest * row_scale
        else:
            sumexp, weighted = _sums(z, row_scale, highest, options, matmul.tiles.columns, None)
            at_target = _target_logit(z, target, holds)
        owned = (target >= 0) & (target < TILE_N)
        at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
        stats = ShardStatistics(highest, sumexp, weighted, at_target, lowest)
        for i, field in enumerate(jax.tree.leaves(stats)):
            partial.at[position, i, tile.rows][...] = field

    slots = None if cache is None else _pipeline.staging(matmul, TILE_N, hidden.dtype)
    _pipeline.walk_logits(matmul, hidden, weight, span, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sums(
    z: Array, row_scale: Array, highest: Array, options: Options, width: int, send: Any
) -> tuple[Array, Array | None]:
    """Σ e and Σ u·e of the tile, ``width`` columns at a time, each block's e handed to ``send``.

    One instruction more than a fused multiply-add, which would not be 0 at the largest column (`_math`).
    """
    sums: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, width)):
        u = z[:, start : start + width] - _pipeline.along_rows(highest, width)
        u = u * _pipeline.along_rows(row_scale, width)
        e = jnp.exp2(u)
        parts = [jnp.sum(e, axis=1)] + ([jnp.sum(e * u, axis=1)] if options.entropy else [])
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if send is not None:
            send(i, e)
    return sums[0], sums[1] if options.entropy else None


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    if output.dtype == jnp.float16:
        e = e * 2.0**FP16_SHIFT
    _pipeline.send(e, i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit, unscaled, at each row's target, 0 where the tile has none; only tiles that hold some target look."""

    def look() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=_pipeline.MATRIX)
        return jnp.sum(jnp.where(columns == _pipeline.along_rows(target), z, 0.0), axis=1)

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _pipeline.PER_ROW)

    return lax.cond(holds, look, none)


def _to_nats(case: Case, part: Float[Array, "tiles fields T"], num_tiles: Any) -> ShardStatistics:
    """The partial statistics of the call's own tokens as eq. 1 has them, [tiles, T] each.

    A tile of padding alone has the sums of no columns and `FLOOR` for its maximum, and so have those never written.
    """
    options = case.options
    sums, lowest = 0.0 if options.entropy else None, -FLOOR if options.stats else None
    empty: Any = ShardStatistics(*cast("Any", (FLOOR, 0.0, sums, -jnp.inf, lowest)))
    if not isinstance(num_tiles, int):
        written = jnp.arange(part.shape[0], dtype=jnp.int32) < num_tiles
        unwritten = jnp.asarray(jax.tree.leaves(empty), jnp.float32)
        part = jnp.where(written[:, None, None], part, unwritten[None, :, None])
    fields = [part[:, i, : case.num_tokens] for i in range(part.shape[1])]
    stats: ShardStatistics = jax.tree.unflatten(jax.tree.structure(empty), fields)
    weighted = None if stats.weighted is None else stats.weighted * (1.0 / LOG2E)
    return stats._replace(weighted=weighted, target=stats.target * (1.0 / LOG2E))
