"""In which order the tiles of a product are taken: what runs side by side shares operands in L2, and ends together.

A launch gives its tiles in turn to the clusters of blocks that run at the same time: one wave of tiles after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import plgpu

if TYPE_CHECKING:
    from lce_jax.mosaic.common._machine import Tiles


def snake_index(tuning: Tiles, index: Any, row_groups: Any, columns: Any) -> tuple[Any, Any]:
    """The (row group, tile of columns) of a linear index, in the order that reuses the most of L2."""
    along = tuning.snake // tuning.cluster if tuning.minor == 0 else tuning.snake
    return plgpu.planar_snake(index, (row_groups, columns), tuning.minor, along)


def turning_snake_index(tuning: Tiles, clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """The (list, tile of columns) of a linear index, where lists are contracted for all tiles, the longest first.

    As `snake_index`, a band of lists for one tile of columns, then for the next. But every other wave takes them
    backwards, counted by where their tile of columns begins, so that no cluster gets the longest of each.
    """
    of_list, of_tile = snake_index(tuning, index, lists, tiles)
    along = tuning.snake // tuning.cluster
    band, place = lax.div(of_list, jnp.int32(along)), lax.rem(of_list, jnp.int32(along))
    width = jnp.minimum(jnp.int32(along), lists - band * along)
    tiles_before = jnp.where(lax.rem(band, jnp.int32(2)) == 0, of_tile, tiles - 1 - of_tile)
    begin = band * along * tiles + tiles_before * width
    wave = lax.div(begin + clusters // 2, jnp.int32(clusters))  # the nearest
    return band * along + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, width - 1 - place, place), of_tile


def longest_first_index(clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """The same, all tiles of one list, then those of the next. Every other wave is taken backwards."""
    wave, place = lax.div(index, jnp.int32(clusters)), lax.rem(index, jnp.int32(clusters))
    last = jnp.minimum(jnp.int32(clusters), lists * tiles - wave * clusters) - 1
    index = wave * clusters + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, last - place, place)
    return lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))
