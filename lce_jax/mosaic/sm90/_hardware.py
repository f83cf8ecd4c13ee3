"""What is fixed about Hopper (compute capability 9.0): its instructions' shapes, its shared memory, its registers."""

from __future__ import annotations

from lce_jax.mosaic._geometry import Tiling

WARPGROUP_ROWS = 64  # the M of one wgmma
COMPUTE_WARPGROUPS = 2  # a third leaves 128 registers a thread, fewer than the accumulator and its epilogue need
ROW_BLOCK = COMPUTE_WARPGROUPS * WARPGROUP_ROWS
TILE_N = 256  # the largest N of wgmma: a 64 x 256 accumulator is 128 registers a thread
NARROW_TILE_N = 192  # of the products, where it divides H and TILE_N does not: no tile is part empty
STAGING_BYTES = 128  # of a row that an epilogue sends out at a time: the widest swizzle
STAGING_COLUMNS = STAGING_BYTES // 2  # 16-bit numbers in those bytes
ATOM_ROWS = 8  # rows of the smallest swizzled piece; TMA copies whole ones
SCALED = 4096  # numbers that a block multiplies, where a kernel multiplies many by one
COLUMN_GRAIN = 16  # the narrowest swizzle, 32 bytes of 16-bit numbers: a minor dimension must be a multiple of it
SMEM_LIMIT = 232_448  # bytes a block may use on compute capability 9.0 (CUDA programming guide, table of capabilities)
SMEM_ALIGNMENT = 1024  # of every allocation in a kernel
BARRIER_BYTES = 8
MEMORY_REGISTERS = 40  # a thread of the memory warpgroup; the compute warpgroups share the others
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8

TILING = Tiling(row_block=ROW_BLOCK, tile=TILE_N, atom=ATOM_ROWS, most_clustered=2)

# Waves of tiles that reading and writing one token's dhidden takes: 8 H bytes at 4.3 TB/s against 2 · 128 · 256 · H
# operations of one multiprocessor at 5.5 TFLOP/s (H200).
DHIDDEN_WAVES = (8 / 4.3e12) / (2 * ROW_BLOCK * TILE_N / 5.5e12)


def widest_swizzle(extent: int, itemsize: int) -> tuple[int, int]:
    """The widest swizzle, in bytes, and its elements that divide ``extent`` columns."""
    swizzle = next(s for s in (128, 64, 32) if extent * itemsize % s == 0)
    return swizzle, swizzle // itemsize
