"""A vocabulary in parts, as the forward's kernels see it: where each part's tiles lie, and where they end.

    columns    |      part 0      |      part 1      |
    tiles      |   0   |   1   |..|   2   |   3   |..|       tiles 1 and 3 are ragged

The tiles are numbered through all parts. Labels come as places in the row of tiles (`Geometry.place`). So only the
weight and the padding are found by column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic.common._tiles import TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int


class Parted(NamedTuple):
    """How `join` groups the tiles of a vocabulary in parts: a group ends where its part does."""

    groups: int  # of a launch, at most
    tiles: int  # of a part


def first_column(shape: Geometry, tile: Any) -> Int[Array, ""]:
    """`Geometry.column`, in a kernel."""
    return tile * TILE_N - _part(shape, tile) * shape.overhang


def edge(shape: Geometry, tile: Any, num_columns: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """What `_vocabulary_mask` is given of a tile: columns counted from its part's first one, and where its mask begins.

    The part in which padding begins has the second mask. In a part of nothing but padding every tile is like one after
    the tile with the first padding column.
    """
    part = _part(shape, tile)
    live = jnp.clip(num_columns - part * shape.part_columns, 0, shape.part_columns)
    column = (tile - part * shape.part_tiles) * TILE_N
    start = jnp.where(live < shape.part_columns, 2 * TILE_N, 0)
    return jnp.where(live > 0, column, TILE_N), live, mask, start


def tiles_of_group(parted: Parted, group: int, first: Any, number: Any, num_tiles: Any) -> tuple[Any, Any]:
    """Where the tiles of a launch's group begin and stop, if the shard's group ``first`` is the launch's first one."""
    groups = -(-parted.tiles // group)  # of a part

    def first_tile(of: Any) -> Any:
        return of * group - lax.div(of, jnp.int32(groups)) * (groups * group - parted.tiles)

    begin = first_tile(first + number) - first_tile(first)
    left = parted.tiles - lax.rem(first + number, jnp.int32(groups)) * group
    return begin, jnp.minimum(begin + jnp.minimum(left, group), num_tiles)


def _part(shape: Geometry, tile: Any) -> Int[Array, ""]:
    return lax.div(tile, jnp.int32(shape.part_tiles))
