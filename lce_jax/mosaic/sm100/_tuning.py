"""The free choices of the Blackwell kernels, and which of them a call gets. None has been timed: they are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lce_jax._types import Case
from lce_jax.mosaic.common._tiles import (
    BARRIER_BYTES,
    ROW_BLOCK,
    SMEM_ALIGNMENT,
    STAGING_BYTES,
    STAGING_COLUMNS,
    TILE_N,
)
from lce_jax.mosaic.sm100._hardware import ACCUMULATORS, TMEM_ADDRESS_BYTES


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The free choices of one kernel. Everything else follows from the shapes."""

    stages: int = 4  # buffers of one [128, tile_k] and one [tile_n / cluster, tile_k] operand tile each
    cluster: int = 1  # 2: pairs of blocks, one below the other, that multiply together: each holds half of rhs
    snake: int = 16  # row blocks (``minor`` 0) or tiles of columns (1) at a time, for L2 to reuse: 16 x 8 is square
    minor: int = 0  # 0: row blocks, 1: vocabulary tiles
    slots: int = 2  # staging slots, where tiles are stored
    tile_k: int = STAGING_COLUMNS  # of a step: the widest swizzle of 16-bit numbers
    tile_n: int = TILE_N

    def __post_init__(self) -> None:
        if self.cluster not in (1, 2) or self.stages < 1 or self.snake % self.cluster:
            raise ValueError(f"cluster must be 1 or 2 and divide snake, and stages be at least 1, got {self}")
        if self.slots < 1 or self.tile_n // STAGING_COLUMNS % self.slots:
            raise ValueError(f"slots must divide a tile's blocks of columns, got {self}")

    def smem_bytes(self, itemsize: int, staged: bool) -> int:
        """Shared memory of a block: operand stages, their barriers and, where tiles are stored, the staging slots."""
        sizes = [
            self.stages * ROW_BLOCK * self.tile_k * itemsize,
            self.stages * self.tile_n // self.cluster * self.tile_k * itemsize,
        ]
        if staged:
            sizes.append(self.slots * ROW_BLOCK * STAGING_BYTES)
        barriers = 2 * (self.stages + ACCUMULATORS) * BARRIER_BYTES  # full, empty; done, drained
        in_tiles = sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size in sizes)
        return in_tiles + barriers + TMEM_ADDRESS_BYTES


ALONE = Tuning()
# A block reads half as much of rhs from L2 and from shared memory. Nobody has timed it, and a pair's two halves are
# tested by a reading of JAX's guide, so it is not the default.
PAIRS = Tuning(stages=6, cluster=2)

KERNELS = ("forward", "dlogits", "dhidden", "dweight", "live_dhidden", "live_dweight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunings:
    """Which tuning a kernel gets, by kernel."""

    by_kernel: Mapping[str, Tuning] = dataclasses.field(default_factory=dict)
    otherwise: Tuning = ALONE

    def of(self, case: Case, kernel: str) -> Tuning:
        """The tuning of a kernel. Entries of a list of live tiles have no neighbours: there blocks multiply alone."""
        choice = self.by_kernel.get(kernel, self.otherwise)
        return dataclasses.replace(choice, cluster=1, stages=ALONE.stages) if _is_live(case, kernel) else choice

    def smem_bytes(self, case: Case) -> dict[str, int]:
        """What a block of each kernel needs of shared memory. The forward stores tiles for a cache only."""
        staged = {kernel: kernel != "forward" or case.options.cache_bytes > 0 for kernel in KERNELS}
        return {kernel: self.of(case, kernel).smem_bytes(case.dtype.itemsize, staged[kernel]) for kernel in KERNELS}


def _is_live(case: Case, kernel: str) -> bool:
    return kernel.startswith("live_") or (kernel == "dlogits" and case.options.gradient_threshold > 0)
