"""The epilogue of the backward's tiles: the gradient (eqs. 4, 5) in [64, 256] raw products that registers hold."""

from __future__ import annotations

import functools
from typing import Any

from lce_jax._types import Options
from lce_jax.mosaic.common._dlogits import Refs, Where
from lce_jax.mosaic.common._held import softcap
from lce_jax.mosaic.common._machine import Tile
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS, TILE_N
from lce_jax.mosaic.sm90 import _epilogue
from lce_jax.mosaic.sm90._epilogue import HELD
from lce_jax.mosaic.sm90._vocabulary_mask import without_padding


def dlogits(options: Options, refs: Refs, tile: Tile, where: Where, multiply: Any, slots: Any) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    output_rows, cap = _epilogue.rows_of(where.output_row), options.logit_softcap
    row_scale = HELD.load_rows(refs.scale, _epilogue.rows_of(tile.row))
    rows = HELD.load_factors(refs.factors, _epilogue.rows_of(tile.row))
    target = HELD.load_rows(refs.targets, _epilogue.rows_of(tile.row)) - where.column
    holds = refs.holds_target[tile.row_block, where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, _epilogue.rows_of(tile.row))
    z = multiply()
    real = functools.partial(without_padding, column=where.column, num_columns=where.num_columns, mask=refs.mask)
    z = real(z) if cap is None else z
    for i in range(TILE_N // STAGING_COLUMNS):
        start = i * STAGING_COLUMNS
        block = z[:, start : start + STAGING_COLUMNS]
        if cap is not None:  # a block at a time: a second tile beside the first would spill its registers
            block = real(softcap(block, cap, options), start=start)
        block = HELD.reaching(block, floor)
        d = HELD.gradient(block, row_scale, rows)
        d = d if cap is None else d * (1.0 - block * block)
        d = HELD.with_target(d, rows, target - start, holds)
        _epilogue.send(d, i, slots, output_rows, refs.output, where.output_column + start)
