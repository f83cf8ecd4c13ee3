"""The epilogue of the backward's tiles: the gradient (eqs. 4, 5) in [128, 256] raw products in tensor memory."""

from __future__ import annotations

from typing import Any

from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic.common._dlogits import Refs, Where
from lce_jax.mosaic.common._held import softcap
from lce_jax.mosaic.common._machine import Tile
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS
from lce_jax.mosaic.sm100 import _epilogue
from lce_jax.mosaic.sm100._epilogue import BLOCKS, HELD


def dlogits(options: Options, refs: Refs, tile: Tile, where: Where, multiply: Any, slots: Any) -> None:
    """A tile, from its products to the output, a block of columns at a time."""
    tile_rows, cap = _epilogue.rows_of(tile.row), options.logit_softcap
    row_scale = HELD.load_rows(refs.scale, tile_rows)
    rows = HELD.load_factors(refs.factors, tile_rows)
    target = HELD.load_rows(refs.targets, tile_rows) - where.column
    holds = refs.holds_target[tile.row_block, where.number] > 0
    output_rows = _epilogue.rows_of(where.output_row)
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, tile_rows)
    z = multiply()

    def block(i: Any, _: None) -> None:
        x = _epilogue.block_of(z, i)
        x = x if cap is None else softcap(x, cap, options)
        x = _epilogue.without_padding(x, i, where.column, where.num_columns)
        x = HELD.reaching(x, floor)
        d = HELD.gradient(x, row_scale, rows)
        d = d if cap is None else d * (1.0 - x * x)
        d = HELD.with_target(d, rows, target - i * STAGING_COLUMNS, holds)
        _epilogue.send(d, i, slots, output_rows, refs.output, where.output_column + i * STAGING_COLUMNS)

    lax.fori_loop(0, BLOCKS, block, None)
    z.release()
