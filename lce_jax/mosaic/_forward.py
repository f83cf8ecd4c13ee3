"""The forward kernel: statistics (eq. 1) of each [64, 256] tile of logits straight from the accumulator.

Inside, everything is in bits: exp2 is one instruction, and log2(e) folds into the row's scale. Each unit of work
writes one row of partial statistics per token; `_math.merge` joins them outside (eq. 2). With a cache, a tile's
exponentials leave through shared memory, rounded, relative to the tile's own maximum, which is kept beside them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _math
from lce_jax._compat import plgpu
from lce_jax._types import Case, Operands, Options, ShardStatistics
from lce_jax.mosaic import _config, _mean, _operands, _pipeline
from lce_jax.mosaic._cached import FP16_SHIFT, Cache
from lce_jax.mosaic._config import ATOM_ROWS, STAGING_COLUMNS, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic._operands import FLOOR, LOG2E, PADDING, Prepared
from lce_jax.mosaic._pipeline import Logits, Tile

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def statistics(
    operands: Operands, case: Case, keep_cache: bool, interpret: Any = None
) -> tuple[ShardStatistics, Cache | None]:
    """Eq. 1 of the whole shard, and as many tiles' exponentials as ``cache_bytes`` pays for."""
    prepared = _operands.prepare(operands, case)
    num_tiles = _live_tiles(operands, case)
    cached = min(_config.cached_tiles(case), num_tiles) if keep_cache else 0
    parts, cache = [], None
    if cached:
        part, cache = _launch(prepared, case, 0, cached, True, interpret)
        parts.append(part)
    if cached < num_tiles:
        parts.append(_launch(prepared, case, cached, num_tiles - cached, False, interpret)[0])
    columns = [_to_nats(case, part) for part in parts]
    if _config.geometry(case).tail:
        columns.append(jax.tree.map(lambda x: x[None], _tail_statistics(operands, case)))
    stats = _math.merge(jax.tree.map(lambda *fields: jnp.concatenate(fields), *columns))
    return stats._replace(total=_mean.total(operands, case) if case.options.mean_logit else None), cache


def _tail_statistics(operands: Operands, case: Case) -> ShardStatistics:
    """Eq. 1 of the columns, at most 15, that are no whole swizzle atom. Their weight is [n, H]: "hv" has none."""
    shape = _config.geometry(case)
    weight = operands.weight[shape.columns :]
    raw = lax.dot_general(operands.hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    z, _ = _math.transform_logits(raw, case.options, operands.inverse_temperature)
    live = _math.live_columns(shape.columns, shape.tail, operands.num_columns)
    return _math.tile_statistics(z, operands.targets - shape.columns, live, case.options)._replace(total=None)


def _live_tiles(operands: Operands, case: Case) -> int:
    """The tiles to visit: where the number of live columns is static, none of padding alone."""
    shape = _config.geometry(case)
    if isinstance(operands.num_columns, int):
        return max(1, min(shape.tiles, -(-operands.num_columns // TILE_N)))
    return shape.tiles


def _launch(
    prepared: Prepared, case: Case, first_tile: int, num_tiles: int, save: bool, interpret: Any
) -> tuple[Float[Array, "units fields T"], Cache | None]:
    """Partial statistics of tiles [first_tile, first_tile + num_tiles), and their cache."""
    shape, options = _config.geometry(case), case.options
    fields = 3 + options.entropy + options.stats
    spec = _pipeline.logits(case, "forward", num_tiles, min(num_tiles, _config.walk(case, fields)))
    outputs = [jax.ShapeDtypeStruct((spec.num_units, fields, shape.padded_tokens), jnp.float32)]
    if save:
        outputs.append(jax.ShapeDtypeStruct((shape.tokens, num_tiles * TILE_N), case.dtype))
        outputs.append(jax.ShapeDtypeStruct((num_tiles, shape.padded_tokens), jnp.float32))
    # Nothing is cut where V is a multiple of 8; else XLA passes the kernel a view, for TMA counts whole atoms of rows.
    atoms = case.vocab_size // ATOM_ROWS * ATOM_ROWS
    weight = lax.slice_in_dim(prepared.weight, 0, atoms, axis=options.vocab_dim)
    name = "lce_statistics_cached" if save else "lce_statistics"
    scalars = jnp.stack([_pipeline.row_groups(spec.matmul, prepared.num_rows), prepared.num_columns])
    run = _pipeline.kernel(spec.matmul, functools.partial(_kernel, spec, first_tile, save), outputs, name, interpret)
    part, *kept = run(
        prepared.hidden, weight, prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, scalars
    )
    return part, Cache(*kept) if save else None


def _kernel(
    spec: Logits,
    first_tile: int,
    save: bool,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    scalars: Any,  # live row groups, live columns
    partial: Any,  # [units, fields, Tp]
    exponentials: Any = None,  # [T, columns of the launch]
    tile_max: Any = None,  # [tiles of the launch, Tp]
) -> None:
    options = spec.matmul.case.options
    first_column = first_tile * TILE_N
    num_columns = scalars[1]

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _pipeline.load_rows(scale, tile.rows)
        target = _pipeline.load_rows(targets, tile.rows) - (first_column + tile.column)
        place = tile.place
        holds = holds_target[place.row_block, first_tile + place.position] > 0
        before = None
        if spec.walk > 1:
            before = [_pipeline.load_rows(partial.at[place.unit, i], tile.rows) for i in range(partial.shape[1])]
        z = multiply()
        if options.logit_softcap is not None:
            z = _pipeline.softcap(z, options.logit_softcap, options)
        real = functools.partial(_pipeline.without_padding, z, first_column + tile.column, num_columns, mask)
        lowest = jnp.min(real(-PADDING), axis=1) * row_scale if options.stats else None
        z = real(PADDING)
        highest = jnp.maximum(jnp.max(z, axis=1), FLOOR) * row_scale
        if save:  # the target before the exponentials, so that z dies block by block; else after: each spills otherwise
            at_target = _target_logit(z, target, holds)
            send = functools.partial(_send_exponentials, slots, tile, exponentials)
            sumexp, weighted = _sums(z, row_scale, highest, options, STAGING_COLUMNS, send)
            tile_max.at[place.position, tile.rows][...] = highest
        else:
            sumexp, weighted = _sums(z, row_scale, highest, options, spec.matmul.tiles.columns, None)
            at_target = _target_logit(z, target, holds)
        stats = ShardStatistics(highest, sumexp, weighted, at_target * row_scale, lowest)
        if before is not None:
            before = jax.tree.unflatten(jax.tree.structure(stats), before)
            stats = lax.cond(place.step > 0, functools.partial(_join, before, stats), lambda: stats)
        for i, field in enumerate(jax.tree.leaves(stats)):
            partial.at[place.unit, i, tile.rows][...] = field

    slots = _pipeline.staging(spec.matmul, TILE_N, hidden.dtype) if save else None
    _pipeline.walk_logits(spec, hidden, weight, first_column, scalars[0], consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sums(
    z: Array, row_scale: Array, highest: Array, options: Options, width: int, send: Any
) -> tuple[Array, Array | None]:
    """Σ e and Σ u·e of the tile, ``width`` columns at a time, each block's e handed to ``send``."""
    sums: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, width)):
        u = z[:, start : start + width] * _pipeline.along_rows(row_scale, width) - _pipeline.along_rows(highest, width)
        e = jnp.exp2(u)
        parts = [jnp.sum(e, axis=1)] + ([jnp.sum(e * u, axis=1)] if options.entropy else [])
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if send is not None:
            send(i, e)
    return sums[0], sums[1] if options.entropy else None


def _send_exponentials(slots: Any, tile: Tile, output: Any, i: int, e: Array) -> None:
    if output.dtype == jnp.float16:
        e = e * 2.0**FP16_SHIFT
    _pipeline.send(e, i, slots, tile.rows, output, tile.column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit at each row's target, 0 where the tile does not have it; only tiles that hold some target look."""

    def look() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=_pipeline.MATRIX)
        return jnp.sum(jnp.where(columns == _pipeline.along_rows(target), z, 0.0), axis=1)

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _pipeline.PER_ROW)

    return lax.cond(holds, look, none)


def _join(before: ShardStatistics, stats: ShardStatistics) -> ShardStatistics:
    """Eq. 2, in bits, of a unit's tiles so far and the next one."""
    highest = jnp.maximum(before.max, stats.max)
    shifts = before.max - highest, stats.max - highest
    factors = jnp.exp2(shifts[0]), jnp.exp2(shifts[1])
    weighted = None
    if before.weighted is not None and stats.weighted is not None:
        weighted = (before.weighted + shifts[0] * before.sumexp) * factors[0]
        weighted = weighted + (stats.weighted + shifts[1] * stats.sumexp) * factors[1]
    return ShardStatistics(
        max=highest,
        sumexp=before.sumexp * factors[0] + stats.sumexp * factors[1],
        weighted=weighted,
        target=before.target + stats.target,
        min=None if before.min is None or stats.min is None else jnp.minimum(before.min, stats.min),
    )


def _to_nats(case: Case, part: Float[Array, "units fields T"]) -> ShardStatistics:
    """The partial statistics of the call's own tokens as eq. 1 has them, [units, T] each."""
    fields = iter(part[:, i, : case.num_tokens] for i in range(part.shape[1]))
    options = case.options
    highest, sumexp = next(fields), next(fields)
    weighted = next(fields) if options.entropy else None
    target = next(fields)
    lowest = next(fields) if options.stats else None
    empty = sumexp == 0.0  # a tile of padding alone
    stats = ShardStatistics(highest, sumexp, weighted, target, lowest)
    stats = jax.tree.map(lambda x: x * (1.0 / LOG2E), stats)._replace(sumexp=sumexp)
    return stats._replace(
        max=jnp.where(empty, _math.MASKED, stats.max),
        min=None if stats.min is None else jnp.where(empty, -_math.MASKED, stats.min),
    )
