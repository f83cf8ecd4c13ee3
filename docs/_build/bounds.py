"""The cost of a tile on GPUs where no kernel was timed, counted from the tiles and from NVIDIA's specifications."""

from __future__ import annotations

import re
from typing import NamedTuple

from bench_tables import ROOT, markdown

from lce_jax.mosaic import mma
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic.common._tiles import COMPUTE_WARPGROUPS, ROW_BLOCK, TILE_N

HIDDEN_SIZE, ITEMSIZE = 4096, 2
WARPS = 4 * COMPUTE_WARPGROUPS
SMEM_BYTES_A_CYCLE = 128  # of a multiprocessor, on all these cards


class Card(NamedTuple):
    """A card's speeds: of dense bfloat16 products with float32 sums, at the boost clock."""

    name: str
    table: str  # names the file in tests/compiled with its registers
    generation: Generation
    flops: float  # a second
    core_count: int
    clock: float  # Hz
    dram: float  # bytes a second


CARDS = (
    Card("A100 SXM 80 GB", "a100", mma.SM80, 312e12, 108, 1.41e9, 2.04e12),
    Card("L40S", "l40s", mma.SM89, 362e12, 142, 2.52e9, 0.864e12),
    Card("RTX 4090", "l40s", mma.SM89, 165.2e12, 128, 2.52e9, 1.01e12),
    Card("RTX 5090", "rtx5090", mma.SM120, 209.5e12, 170, 2.41e9, 1.79e12),
)


def bounds() -> str:
    """Returns a table with a row per card: shares of the tensor cores' time for a tile, and the bytes from L2 in it."""
    head = ["", "registers", "shared memory of a block", "tile, µs", "shared memory", "DRAM", "from L2"]
    return markdown(head, [line(card) for card in CARDS])


def line(card: Card) -> list[str]:
    """Returns the row of a card."""
    tuning = card.generation.tunings.tuning
    seconds = 2 * ROW_BLOCK * TILE_N * HIDDEN_SIZE / (card.flops / card.core_count)
    # A warp reads 32 rows and half of the columns. Every operand is written to shared memory once.
    numbers = WARPS * (ROW_BLOCK // 4 + TILE_N // COMPUTE_WARPGROUPS) + ROW_BLOCK + TILE_N
    shared = numbers * HIDDEN_SIZE * ITEMSIZE / (SMEM_BYTES_A_CYCLE * card.clock)
    tile_bytes = (ROW_BLOCK + TILE_N) * HIDDEN_SIZE * ITEMSIZE
    # A wave of tiles, `snake` row blocks high, reads its rows and its columns from DRAM once.
    wave = (tuning.snake * ROW_BLOCK + card.core_count / tuning.snake * TILE_N) * HIDDEN_SIZE * ITEMSIZE
    return [
        card.name,
        f"{registers(card.table)}",
        f"{smem(card.table) / 1024:.0f} KiB",
        f"{1e6 * seconds:.0f}",
        f"{100 * shared / seconds:.0f} %",
        f"{100 * wave / card.dram / seconds:.0f} %",
        f"{card.core_count * tile_bytes / seconds / 1e12:.1f} TB/s",
    ]


def _column(table: str, number: int) -> int:
    text = (ROOT / "tests" / "compiled" / f"kernels-0.12.0.1-{table}.txt").read_text()
    return max(int(row[number]) for row in re.findall(r"^statistics .*?(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.M))


def registers(table: str) -> int:
    """Returns the registers of a thread of the forward, at most."""
    return _column(table, 0)


def smem(table: str) -> int:
    """Returns the bytes of shared memory of a block of the forward, at most."""
    return _column(table, 4)
