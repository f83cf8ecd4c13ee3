"""What is fixed about Blackwell (compute capabilities 10.0, 10.3): its tensor memory, its balance."""

from __future__ import annotations

from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N

TMEM_COLUMNS = 512  # of fp32, of 128 lanes: a lane is a row of a tile
ACCUMULATORS = TMEM_COLUMNS // TILE_N  # that take turns: one is multiplied during the other's epilogue
TMEM_ADDRESS_BYTES = 4  # of shared memory, where the hardware says what it has allocated
WARPGROUPS = 2  # one copies and issues the products, a warp for each; the other has the epilogue

# Waves of tiles that reading and writing one token's dhidden takes: 8 H bytes at 7.7 TB/s against 2 · 128 · 256 · H
# operations of one multiprocessor at 2.25 PFLOP/s over 148 of them (NVIDIA's data sheet of the B200; not measured).
DHIDDEN_WAVES = (8 / 7.7e12) / (2 * ROW_BLOCK * TILE_N / (2.25e15 / 148))
