"""The figures of "A roofline on paper" in docs/blackwell.md, from the tiles that the kernels use."""

from __future__ import annotations

from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N
from lce_jax.mosaic.sm100._tuning import ALONE, PAIRS
from tests.devices import B200

T = H = 4096
V = 151_936
PER_CYCLE = 4096  # multiplications of bfloat16 on one multiprocessor
CLOCK = 1.9 * 1e9
SHARED_BYTES, EXPONENTIALS = 128, 16  # a cycle, on one multiprocessor
MEMORY_RATE = 8e12  # bytes a second


def test_products_and_epilogues() -> None:
    assert ROW_BLOCK * TILE_N * H // PER_CYCLE == 8 * H == 8 * T == 32_768
    assert ROW_BLOCK * TILE_N * 33_024 // PER_CYCLE == 264_192
    assert ROW_BLOCK * TILE_N // EXPONENTIALS == 2048
    numbers_of_a_row = 4  # max, sum, sum of x eˣ, logit of the label
    assert ROW_BLOCK * numbers_of_a_row * 4 / 2**10 == 2
    assert ROW_BLOCK * TILE_N * 2 / 2**10 == 64  # a cache, dlogits, dweight: 16-bit numbers
    assert ROW_BLOCK * TILE_N * 4 / 2**10 == 128  # dhidden: float32


def test_shared_memory() -> None:
    """A step's operands are written once and read once."""
    assert ROW_BLOCK * TILE_N * ALONE.tile_k // PER_CYCLE == 512
    alone, pairs = ((ROW_BLOCK + TILE_N // tuning.cluster) * tuning.tile_k * 2 for tuning in (ALONE, PAIRS))
    assert (alone / 2**10, pairs / 2**10) == (48, 32)
    assert (2 * alone // SHARED_BYTES, 2 * pairs // SHARED_BYTES) == (768, 512)


def test_the_weight_from_memory() -> None:
    read = 2 * V * H * 2  # twice
    assert round(read / 1e9, 1) == 2.5
    assert round(read / MEMORY_RATE * 1e3, 1) == 0.3  # ms
    assert round(T * V * H / (PER_CYCLE * B200.core_count * CLOCK) * 1e3, 1) == 2.2
