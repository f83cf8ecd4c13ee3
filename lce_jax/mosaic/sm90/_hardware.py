"""What is fixed about Hopper (compute capability 9.0): its instructions' shapes, its registers, its balance."""

from __future__ import annotations

from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N

WARPGROUP_ROWS = 64  # the M of one wgmma
# A third leaves 128 registers a thread, fewer than the accumulator and its epilogue need.
COMPUTE_WARPGROUPS = ROW_BLOCK // WARPGROUP_ROWS
NARROW_TILE_N = 192  # of the products, where it divides H and TILE_N does not: no tile is part empty
MEMORY_REGISTERS = 40  # a thread of the memory warpgroup; the compute warpgroups share the others
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8

# Waves of tiles that reading and writing one token's dhidden takes: 8 H bytes at 4.3 TB/s against 2 · 128 · 256 · H
# operations of one multiprocessor at 5.5 TFLOP/s (H200).
DHIDDEN_WAVES = (8 / 4.3e12) / (2 * ROW_BLOCK * TILE_N / 5.5e12)
