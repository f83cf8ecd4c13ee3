"""The mask of the vocabulary: padding columns of a tile of logits get a value that adds nothing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._held import PADDING
from lce_jax.mosaic.common._tiles import TILE_N
from lce_jax.mosaic.sm90._epilogue import HELD
from lce_jax.mosaic.sm90._hardware import WARPGROUP_ROWS

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


def without_padding(
    z: Float[Array, "64 n"], column: Any, num_columns: Any, mask: Any, start: Any = 0
) -> Float[Array, "64 n"]:
    """A tile, or its columns from ``start`` on, with `PADDING` on those that are padding, whatever they held.

    Only a tile that holds padding reads the mask. The first half of the mask says which columns of the ragged tile are
    padding, the second half says it of a tile of nothing but padding. A comparison with an iota would cost every tile,
    because the compiler hoists it out of the branch.
    """
    replace = functools.partial(_replaced, z, column, num_columns, mask, PADDING, start)
    return lax.cond(column + TILE_N > num_columns, replace, lambda: z)


def lowest(z: Float[Array, "64 256"], column: Any, num_columns: Any, mask: Any, start: Any = 0) -> Float[Array, "64"]:
    """The smallest number of each row that is no padding.

    Inside the branch, so that no second tile is alive beside ``z``, which would spill its registers.
    """

    def of_real() -> Array:
        return jnp.min(_replaced(z, column, num_columns, mask, -PADDING, start), axis=1)

    return lax.cond(column + TILE_N > num_columns, of_real, lambda: jnp.min(z, axis=1))


def _replaced(z: Array, column: Any, num_columns: Any, mask: Any, value: float, start: Any = 0) -> Array:
    ragged, width = lax.div(num_columns, TILE_N) * TILE_N, z.shape[1]
    first = jnp.clip(column - ragged, 0, TILE_N) + start
    padding = plgpu.load(mask.at[pl.ds(first, width)], layout=HELD.per_column, optimized=False)
    padding = lax.broadcast_in_dim(padding, (WARPGROUP_ROWS, width), (1,))
    return jnp.where(padding > 0, value, z)
