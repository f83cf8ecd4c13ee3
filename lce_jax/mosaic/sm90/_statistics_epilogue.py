"""The epilogue of the forward's tiles: statistics (eq. 1) of [64, 256] logits in registers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._partial_statistics import FLOOR
from lce_jax.mosaic.common._held import softcap
from lce_jax.mosaic.common._label import LabelBelow, extent
from lce_jax.mosaic.common._machine import Tile
from lce_jax.mosaic.common._statistics import Refs, Where, as_cached, of_sums, store, sums
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS, TILE_N
from lce_jax.mosaic.sm90 import _epilogue, _vocabulary_mask
from lce_jax.mosaic.sm90._epilogue import HELD
from lce_jax.mosaic.sm90._hardware import WARPGROUP_ROWS

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def statistics(options: Options, refs: Refs, tile: Tile, where: Where, multiply: Any, slots: Any) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics and the cache."""
    rows = functools.partial(_epilogue.rows_of, tile.row)  # computed where they are needed: no register holds them
    row_scale = HELD.load_rows(refs.scale, rows())
    target = HELD.load_rows(refs.targets, rows()) - where.column
    holds = refs.holds_target[tile.row_block, where.first_tile + where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, rows())
    z = multiply()
    if options.logit_softcap is not None:
        z = softcap(z, options.logit_softcap, options)
    lowest = _vocabulary_mask.lowest(z, *where.edge) if options.stats and floor is None else None
    z = _vocabulary_mask.without_padding(z, *where.edge)
    at_target = None if floor is None else _target_logit(z, target, holds)
    label = None if floor is None or at_target is None else LabelBelow.of(at_target, target, floor)
    z = HELD.reaching(z, floor)
    highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
    highest = highest if label is None else label.highest(highest)
    # With a cache the target comes first, so that z dies block by block; without one the exponentials come first.
    # The other order spills registers, in either case. With a floor the target is known already.
    if refs.cache is not None:
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
        send = functools.partial(_send_exponentials, slots, rows(), refs.cache.exponentials, where.column)
        found = _sums(z, row_scale, highest, options, send)
        refs.cache.max.at[where.first_tile + where.number, rows()][...] = highest
    else:
        found = _sums(z, row_scale, highest, options, None)
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
    support = None
    if floor is not None and options.stats:
        lowest, support = _extent(z)
    owned = (target >= 0) & (target < TILE_N)
    at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
    of_tile = of_sums(options, found, max=highest, target=at_target, min=lowest, support=support)
    store(refs, where, rows, of_tile if label is None else label.added(of_tile, row_scale))


def _extent(z: Array) -> tuple[Array, Array]:
    """The smallest logit of each row that counts, and how many do, a block of columns at a time."""
    blocks = [extent(z[:, start : start + STAGING_COLUMNS]) for start in range(0, TILE_N, STAGING_COLUMNS)]
    lowest, support = zip(*blocks, strict=True)
    return functools.reduce(jnp.minimum, lowest), functools.reduce(jnp.add, support)


def _sums(z: Array, row_scale: Array, highest: Array, options: Options, send: Any) -> list[Array]:
    """The `sums` of the tile, a block of columns at a time, each block's e handed to ``send``.

    u takes one instruction more than a fused multiply-add, which would not be 0 at the largest column.
    """
    found: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = z[:, start : start + STAGING_COLUMNS] - HELD.along_rows(highest, STAGING_COLUMNS)
        u = u * HELD.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = sums(options, u, e)
        found = [a + b for a, b in zip(found, parts, strict=True)] if found else parts
        if send is not None:
            send(i, e)
    return found


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    _epilogue.send(as_cached(e, output.dtype), i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit, unscaled, at each row's target, 0 where the tile has none; only tiles that hold some target look."""

    def look() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=HELD.layout)
        return jnp.sum(jnp.where(columns == HELD.along_rows(target), z, 0.0), axis=1)

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), HELD.per_row)

    return lax.cond(holds, look, none)
