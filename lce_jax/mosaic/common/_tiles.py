"""The sizes that all generations have in common: of tiles, and of pieces of shared memory and the whole of it."""

from __future__ import annotations

from lce_jax._types import Case
from lce_jax.mosaic._geometry import Tiling, geometry

ROW_BLOCK = 128  # rows of a tile, of one block: two wgmma of 64 rows each on Hopper
TILE_N = 256  # the largest N of wgmma and of tcgen05.mma
STAGING_BYTES = 128  # of a row that an epilogue sends out at a time: the widest swizzle
STAGING_COLUMNS = STAGING_BYTES // 2  # 16-bit numbers in those bytes
ATOM_ROWS = 8  # rows of the smallest swizzled piece; TMA copies whole ones
SCALED = 4096  # numbers that a block multiplies, where a kernel multiplies many by one
COLUMN_GRAIN = 16  # the narrowest swizzle, 32 bytes of 16-bit numbers: a minor dimension must be a multiple of it
SMEM_LIMIT = 232_448  # bytes a block may use on compute capabilities 9.0, 10.0 and 10.3 (CUDA programming guide)
SMEM_ALIGNMENT = 1024  # of every allocation in a kernel
BARRIER_BYTES = 8

TILING = Tiling(row_block=ROW_BLOCK, tile=TILE_N, atom=ATOM_ROWS, most_clustered=2)


def live_shape(case: Case) -> tuple[int, int]:
    """That of the tiles that `select` finds live: vocabulary tiles, and a row block for each thread."""
    shape = geometry(case, TILING)
    return shape.num_tiles, -(-shape.row_blocks // ROW_BLOCK) * ROW_BLOCK


def widest_swizzle(extent: int, itemsize: int) -> tuple[int, int]:
    """The widest swizzle, in bytes, and its elements that divide ``extent`` columns."""
    swizzle = next(s for s in (128, 64, 32) if extent * itemsize % s == 0)
    return swizzle, swizzle // itemsize
