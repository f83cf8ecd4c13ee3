"""The forward kernel: statistics (eq. 1) of each [64, 256] tile of logits straight from the accumulator.

Inside, everything is in base 2: exp2 is one instruction, and log2(e) folds into the row's scale. Each tile writes its
own statistics per token, which are merged outside (eq. 2). With a cache, a tile's exponentials leave through shared
memory, rounded, relative to the tile's own maximum, which is kept beside them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case, Options, ShardStatistics
from lce_jax.mosaic._cache import FP16_SHIFT, Cache
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._operands import Prepared
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._partial_statistics import FLOOR
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.sm90 import _epilogue, _logits, _parts, _pipeline, _vocabulary_mask
from lce_jax.mosaic.sm90._hardware import STAGING_COLUMNS, TILE_N, TILING, WARPGROUP_ROWS
from lce_jax.mosaic.sm90._pipeline import Matmul, Tile
from lce_jax.mosaic.sm90._tuning import Tuning

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def statistics(
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Case,
    tuning: Tuning,
    span: Int[Array, "fields"],
    parts: Float[Array, "tiles fields Tp"],
    cache: Cache | None,
) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
    """``parts`` with the partial statistics of the span's tiles, and the cache, if any, with their exponentials."""
    matmul = _logits.logits(case, tuning)
    updated = [parts, *jax.tree.leaves(cache)]
    operands = [
        prepared.hidden, weight, prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, span,
    ]  # fmt: skip
    run = _pipeline.kernel(
        matmul,
        functools.partial(_kernel, matmul),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        "lce_statistics" if cache is None else "lce_statistics_cached",
        updated={len(operands) + i: i for i in range(len(updated))},
    )
    parts, *kept = run(*operands, *updated)
    return parts, Cache(*kept) if kept else None


def _kernel(
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512], or [1024] with parts
    scalars: Any,  # a `Span`
    *results: Any,  # [tiles, fields, Tp] and the cache, if any, as they were; both as they will be, in the same places
) -> None:
    partial, *kept = results[len(results) // 2 :]
    cache: Any = Cache(*kept) if kept else None
    options, span = matmul.case.options, Span.unpack(scalars)
    first_tile, shape = _logits.first_tile(span), geometry(matmul.case, TILING)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _epilogue.load_rows(scale, tile.rows)
        number = tile.vocabulary_tile
        column = span.column + (number * TILE_N if shape.has_parts else tile.column)
        target = _epilogue.load_rows(targets, tile.rows) - column
        holds = holds_target[tile.row_block, first_tile + number] > 0
        z = multiply()
        if options.logit_softcap is not None:
            z = _epilogue.softcap(z, options.logit_softcap, options)
        edge: Any = (column, span.num_columns, mask)
        if shape.has_parts:
            edge = _parts.edge(shape, first_tile + number, span.num_columns, mask)
        lowest = _vocabulary_mask.lowest(z, *edge) if options.stats else None
        z = _vocabulary_mask.without_padding(z, *edge)
        highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
        # With a cache the target comes first, so that z dies block by block; without one the exponentials come first.
        # The other order spills registers, in either case.
        if cache is not None:
            at_target = _target_logit(z, target, holds)
            send = functools.partial(_send_exponentials, slots, tile.rows, cache.exponentials, column)
            sumexp, weighted = _sums(z, row_scale, highest, options, send)
            cache.max.at[first_tile + number, tile.rows][...] = highest
        else:
            sumexp, weighted = _sums(z, row_scale, highest, options, None)
            at_target = _target_logit(z, target, holds)
        owned = (target >= 0) & (target < TILE_N)
        at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
        stats = ShardStatistics(highest, sumexp, weighted, at_target, lowest)
        for i, field in enumerate(jax.tree.leaves(stats)):
            partial.at[span.slot + number, i, tile.rows][...] = field

    slots = None if cache is None else _epilogue.staging(matmul, TILE_N, hidden.dtype)
    _logits.walk_logits(matmul, hidden, weight, span, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sums(z: Array, row_scale: Array, highest: Array, options: Options, send: Any) -> tuple[Array, Array | None]:
    """Σ e and Σ u·e of the tile, a block of columns at a time, each block's e handed to ``send``.

    u takes one instruction more than a fused multiply-add, which would not be 0 at the largest column (`_math`).
    """
    sums: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = z[:, start : start + STAGING_COLUMNS] - _epilogue.along_rows(highest, STAGING_COLUMNS)
        u = u * _epilogue.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = [jnp.sum(e, axis=1)] + ([jnp.sum(e * u, axis=1)] if options.entropy else [])
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if send is not None:
            send(i, e)
    return sums[0], sums[1] if options.entropy else None


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    if output.dtype == jnp.float16:
        e = e * 2.0**FP16_SHIFT
    _epilogue.send(e, i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit, unscaled, at each row's target, 0 where the tile has none; only tiles that hold some target look."""

    def look() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=_epilogue.MATRIX)
        return jnp.sum(jnp.where(columns == _epilogue.along_rows(target), z, 0.0), axis=1)

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _epilogue.PER_ROW)

    return lax.cond(holds, look, none)
