"""The epilogue of the forward's tiles: statistics (eq. 1) of [128, 256] logits in tensor memory.

It reads a tile twice, once for the maximum and once for the sums: a row of 256 does not fit in a thread's registers.
The cap is monotonic, so the maximum of the capped logits is the cap of their maximum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._partial_statistics import FLOOR
from lce_jax.mosaic.common._held import PADDING, softcap
from lce_jax.mosaic.common._label import LabelBelow, extent
from lce_jax.mosaic.common._machine import Tile
from lce_jax.mosaic.common._statistics import Refs, Where, as_cached, of_sums, store, sums
from lce_jax.mosaic.common._tiles import ROW_BLOCK, STAGING_COLUMNS, TILE_N
from lce_jax.mosaic.sm100 import _epilogue
from lce_jax.mosaic.sm100._epilogue import BLOCKS, HELD, without_padding
from lce_jax.mosaic.sm100._pipeline import Product

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def statistics(options: Options, refs: Refs, tile: Tile, where: Where, multiply: Any, slots: Any) -> None:
    """A tile, from its products to the partial statistics and the cache."""
    rows = _epilogue.rows_of(tile.row)
    row_scale = HELD.load_rows(refs.scale, rows)
    target = HELD.load_rows(refs.targets, rows) - where.column
    holds = refs.holds_target[tile.row_block, where.first_tile + where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, rows)
    z = multiply()
    extremes = _extremes(z, options, where) if floor is None else _reaching(z, options, where, floor, target, holds)
    highest, label = extremes.highest, extremes.label
    if refs.cache is not None:
        refs.cache.max.at[where.first_tile + where.number, rows][...] = highest

    def add(i: Any, found: list[Array]) -> list[Array]:
        u = _distances(z, i, highest, row_scale, options, where, floor)
        e = jnp.exp2(u)
        if refs.cache is not None:
            exponentials = refs.cache.exponentials
            column = where.column + i * STAGING_COLUMNS
            _epilogue.send(as_cached(e, exponentials.dtype), i, slots, rows, exponentials, column)
        at_target = _along(0.0) if label is not None else _at_target(u, target - i * STAGING_COLUMNS, holds)
        return [a + b for a, b in zip(found, [at_target, *sums(options, u, e)], strict=True)]

    none = [_along(0.0)] * (2 + options.entropy + options.stats)
    at_target, *found = lax.fori_loop(0, BLOCKS, add, none)
    z.release()
    at_target = at_target if label is None else (label.x - highest) * row_scale
    owned = (target >= 0) & (target < TILE_N)
    at_target = jnp.where(owned, at_target, -jnp.inf)
    of_tile = of_sums(options, found, max=highest, target=at_target, min=extremes.lowest, support=extremes.support)
    store(refs, where, lambda: rows, of_tile if label is None else label.added(of_tile, row_scale))


def _along(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((ROW_BLOCK,), value, jnp.float32), HELD.per_row)


class _Extremes(NamedTuple):
    """Of each row, over the columns that count."""

    highest: Array  # unscaled, capped
    lowest: Array | None = None  # if it is asked for
    support: Array | None = None  # likewise, with a floor
    label: LabelBelow | None = None  # with a floor


def _reaching(z: Product, options: Options, where: Where, floor: Array, target: Array, holds: Any) -> _Extremes:
    """With a floor, which takes the cap of every column. The label's x is found on the way."""

    def step(i: Any, found: list[Array]) -> list[Array]:
        x = _capped(_epilogue.block_of(z, i), options)
        at_target = found[0] + _at_target(x, target - i * STAGING_COLUMNS, holds)
        x = HELD.reaching(without_padding(x, i, where.column, where.edge[1]), floor)
        highest = jnp.maximum(found[1], jnp.max(x, axis=1))
        if not options.stats:
            return [at_target, highest]
        lowest, support = extent(x)
        return [at_target, highest, jnp.minimum(found[2], lowest), found[3] + support]

    start = [_along(0.0), _along(FLOOR), _along(-PADDING), _along(0.0)][: 2 + 2 * options.stats]
    at_target, highest, *extents = lax.fori_loop(0, BLOCKS, step, start)
    label = LabelBelow.of(at_target, target, floor)
    lowest, support = extents or (None, None)
    return _Extremes(label.highest(highest), lowest, support, label)


def _extremes(z: Product, options: Options, where: Where) -> _Extremes:
    """The largest logit of each row, and the smallest if it is asked for: unscaled, capped."""

    def step(i: Any, found: list[Array]) -> list[Array]:
        block = _epilogue.block_of(z, i)
        real = without_padding(block, i, where.column, where.edge[1])
        highest = jnp.maximum(found[0], jnp.max(real, axis=1))
        if not options.stats:
            return [highest]
        real = without_padding(block, i, where.column, where.edge[1], -PADDING)
        return [highest, jnp.minimum(found[1], jnp.min(real, axis=1))]

    start = [_along(PADDING), _along(-PADDING)][: 1 + options.stats]
    highest, *lowest = lax.fori_loop(0, BLOCKS, step, start)
    cap = options.logit_softcap
    if cap is not None:
        highest = jnp.where(highest > FLOOR, softcap(highest, cap, options), FLOOR)
        lowest = [softcap(x, cap, options) for x in lowest]
    return _Extremes(jnp.maximum(highest, FLOOR), lowest[0] if lowest else None)


def _capped(x: Array, options: Options) -> Array:
    return x if options.logit_softcap is None else softcap(x, options.logit_softcap, options)


def _distances(
    z: Product, i: Any, highest: Array, row_scale: Array, options: Options, where: Where, floor: Array | None
) -> Array:
    """The u of eq. 1 of a block of columns, at most 0.

    It takes one instruction more than a fused multiply-add, which would not be 0 at the largest column.
    """
    x = _capped(_epilogue.block_of(z, i), options)
    x = HELD.reaching(without_padding(x, i, where.column, where.edge[1]), floor)
    below = x - HELD.along_rows(highest, STAGING_COLUMNS)
    if options.logit_softcap is not None:  # the hardware's exp2 may not be monotonic in its last digit
        below = jnp.minimum(below, 0.0)
    return below * HELD.along_rows(row_scale, STAGING_COLUMNS)


def _at_target(u: Array, target: Array, holds: Any) -> Array:
    """The u at each row's target, 0 where the block has none; only tiles that hold some target look."""

    def look() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, u.shape, 1, layout=HELD.layout)
        return jnp.sum(jnp.where(columns == HELD.along_rows(target, STAGING_COLUMNS), u, 0.0), axis=1)

    return lax.cond(holds, look, lambda: _along(0.0))
