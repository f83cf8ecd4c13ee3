"""Two heads' [64, 256] tiles in one warpgroup: the first waits in shared memory for the second.

Two accumulators of 64 x 256 would take all 256 registers of a thread, and narrower tiles read the operands more often.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._held import softcap
from lce_jax.mosaic.common._kl import Where
from lce_jax.mosaic.common._machine import swizzled
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS, TILE_N
from lce_jax.mosaic.sm90._epilogue import HELD
from lce_jax.mosaic.sm90._hardware import COMPUTE_WARPGROUPS, WARPGROUP_ROWS
from lce_jax.mosaic.sm90._vocabulary_mask import without_padding

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

BLOCKS = TILE_N // STAGING_COLUMNS
STRIP = 32  # columns


def held() -> Any:
    """Shared memory for a tile of each compute warpgroup."""
    shape = (COMPUTE_WARPGROUPS, BLOCKS, WARPGROUP_ROWS, STAGING_COLUMNS)
    return plgpu.SMEM(shape, jnp.float32, transforms=swizzled(STAGING_COLUMNS, 4))


class HeldTile(NamedTuple):
    """A tile of x that waits for that of the other head."""

    blocks: Any  # [blocks, 64, 64], of this warpgroup

    @classmethod
    def of(cls, x: Float[Array, "64 256"], scratch: Any) -> HeldTile:
        """``x``, written to ``scratch``."""
        blocks = scratch.at[lax.axis_index("wg")]
        plgpu.commit_smem()  # all threads have read the tile before
        for i in range(BLOCKS):
            blocks.at[i][...] = block_of(x, i)
        return cls(blocks)

    def block(self, i: int) -> Float[Array, "64 64"]:
        """Columns 64 i to 64 i + 63."""
        # A barrier, beyond which the compiler moves no load: the whole tile at once would spill registers.
        plgpu.commit_smem()
        return plgpu.load(self.blocks.at[i], layout=HELD.layout)

    def strip(self, column: int) -> Float[Array, "64 32"]:
        """Half of a block, for what takes many registers for each column."""
        plgpu.commit_smem()
        block, first = divmod(column, STAGING_COLUMNS)
        return plgpu.load(self.blocks.at[block, :, pl.ds(first, STRIP)], layout=HELD.layout)


def block_of(x: Float[Array, "64 256"], i: int) -> Float[Array, "64 64"]:
    """The same of a tile in registers."""
    return x[:, i * STAGING_COLUMNS : (i + 1) * STAGING_COLUMNS]


def strip_of(x: Float[Array, "64 256"], column: int) -> Float[Array, "64 32"]:
    """The same of a tile in registers."""
    return x[:, column : column + STRIP]


def x_of(options: Options, z: Float[Array, "64 256"], mask: Any, where: Where) -> Float[Array, "64 256"]:
    """The x of eq. 0 from raw products but for the scale, padding marked."""
    x = z if options.logit_softcap is None else softcap(z, options.logit_softcap, options)
    return without_padding(x, where.column, where.num_columns, mask)


along = functools.partial(HELD.along_rows, columns=STAGING_COLUMNS)
