"""What dhidden is summed in, and where it is rounded.

The product of each chunk of dlogits with its part of the weight adds to fp32 sums, which the caller rounds once. Where
one launch writes all of dhidden, and the caller allows it, the kernel rounds: its output then has the weight's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from lce_jax._types import Case
from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic._host import Host

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

MAX_SPLITS = 4  # of the contraction over the vocabulary


def sums_shape(case: Case, shape: Geometry) -> tuple[int, int, int]:
    """(splits, tokens, hidden): whole tiles, and several arrays where one has fewer tiles than there are cores."""
    rows, columns = shape.padded_tokens, -(-case.hidden_size // shape.tile) * shape.tile
    num_tiles = rows // shape.row_block * (columns // shape.tile)
    most = MAX_SPLITS if num_tiles < case.device.core_count else 1  # each array is read and written once a chunk

    def waves(splits: int) -> float:
        return -(-num_tiles * splits // case.device.core_count) / splits

    return min(range(1, most + 1), key=waves), rows, columns


def empty_sums(host: Host, case: Case, shape: Geometry, rounds: bool) -> Float[Array, "splits Tp Hp"]:
    """The memory for the kernels' output, in the weight's dtype if they round.

    Splits are added up after the kernels, so they stay fp32.
    """
    splits = sums_shape(case, shape)
    return host.empty(splits, case.dtype if rounds and splits[0] == 1 else jnp.float32)


def total(sums: Float[Array, "splits Tp Hp"], case: Case) -> Float[Array, "T H"]:
    """The sum of the splits, without padding."""
    dhidden = sums[0] if sums.shape[0] == 1 else jnp.sum(sums, axis=0)
    return dhidden[: case.num_tokens, : case.hidden_size]
