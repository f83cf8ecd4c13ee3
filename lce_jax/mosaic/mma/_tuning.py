"""The tuning parameters of the kernels that use mma.sync."""

from __future__ import annotations

import dataclasses

from lce_jax.mosaic.common._tiles import ROW_BLOCK, Tuning, stages_output
from lce_jax.types._types import Call

EXCHANGED = 8  # columns that the warpgroups exchange at a time
EXCHANGE_BYTES = 2 * ROW_BLOCK * EXCHANGED * 4

KERNELS = ("forward", "dlogits", "dhidden", "dweight", "active_dhidden", "active_dweight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTuning:
    """Gives all kernels the same tuning."""

    tuning: Tuning
    has_tma: bool = True  # whether the GPU has TMA; without it, nothing is stored through shared memory

    def of(self, call: Call, kernel: str) -> Tuning:
        """Returns the one tuning."""
        del call, kernel
        return self.tuning

    def smem_bytes(self, call: Call) -> dict[str, int]:
        """Returns the bytes of shared memory that a block of each kernel needs."""
        itemsize, tuning = call.dtype.itemsize, self.tuning
        staged = {kernel: self.has_tma and stages_output(call, kernel) for kernel in KERNELS}
        return {kernel: tuning.smem_bytes(itemsize, staged[kernel], EXCHANGE_BYTES) for kernel in KERNELS}
