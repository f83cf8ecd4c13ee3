"""The cache: the exponentials that the forward keeps, which spare the backward their recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from lce_jax._types import Case
from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic._host import Host

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


class Cache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare their recomputation."""

    exponentials: Float[Array, "T columns"]  # e^((x - max) k), in the weight's dtype; whole tiles
    max: Float[Array, "tiles Tp"]  # each tile's largest x


def empty(host: Host, case: Case, shape: Geometry, num_tiles: int) -> Cache:
    """Memory for the forward to fill."""
    return Cache(
        host.empty((shape.tokens, num_tiles * shape.tile), case.dtype),
        host.empty((num_tiles, shape.padded_tokens), jnp.float32),
    )


def num_cached_tiles(case: Case, shape: Geometry) -> int:
    """The vocabulary tiles whose exponentials fit ``cache_bytes``; none if the backward visits live tiles alone."""
    if case.options.gradient_threshold:
        return 0
    return min(shape.num_tiles, case.options.cache_bytes // tile_bytes(case, shape))


def tile_bytes(case: Case, shape: Geometry) -> int:
    """The bytes of one tile's exponentials and of its maximum per token."""
    return shape.tokens * shape.tile * case.dtype.itemsize + shape.padded_tokens * 4


def can_be_overwritten(shape: Geometry) -> bool:
    """Whether dlogits can take the place of the exponentials, all cached tiles as one chunk.

    Where V is no multiple of the atom, a chunk's part of the weight is copied, so chunks must stay small.
    """
    return shape.whole_atoms
