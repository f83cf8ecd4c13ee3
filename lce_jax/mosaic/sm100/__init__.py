"""The kernel set for Blackwell GPUs (compute capabilities 10.0, 10.3): tcgen05.mma into tensor memory.

pipeline    _pipeline.py             tiles of a product: copies, products, the accumulators
statistics  _statistics_epilogue.py  the forward's epilogue: eq. 1 of a tile of logits; the exponentials for a cache
dlogits     _dlogits_epilogue.py     the backward's: the same tile again, turned into the gradient in the raw products

Nothing of it has run on a GPU. It is interpreted on the CPU, with a detector of races, and compiled to machine code.
So a call gets these kernels only if it asks for them by name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lce_jax._types import Case
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic.common import _kernels
from lce_jax.mosaic.common._refusal import refusal
from lce_jax.mosaic.common._tiles import SCALED, TILING
from lce_jax.mosaic.sm100._hardware import DHIDDEN_WAVES
from lce_jax.mosaic.sm100._tuning import Tunings

if TYPE_CHECKING:
    from lce_jax.mosaic.common._machine import Machine

UNPROVEN = (
    'the kernels for Blackwell have never run on a GPU, so only implementation="mosaic_gpu" gets them; '
    "python -m lce_jax.bench doctor checks them on one"
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernels(_kernels.Kernels):
    """Those of Blackwell."""

    compute_capabilities: tuple[str, ...] = ("10.0", "10.3")
    devices: tuple[str, ...] = ("B200", "GB200", "B300", "GB300")
    unproven: str | None = UNPROVEN
    tiling: Tiling = TILING
    budget: Budget = Budget(dhidden_waves=DHIDDEN_WAVES)  # noqa: RUF009 - frozen
    scaled_numbers: int = SCALED
    tunings: Tunings = Tunings()  # noqa: RUF009 - frozen

    def refusal(self, case: Case) -> str | None:
        """As those of Hopper: a dtype, a shape or an option that no kernel knows. Also a vocabulary in parts."""
        if case.options.vocab_part_size is not None:
            return "vocab_part_size is known to Hopper's kernels alone"
        return refusal(case, self.tunings.smem_bytes(case))

    def kl_refusal(self, cases: Pair[Case]) -> str | None:
        """Always: the epilogues are not written."""
        del cases
        return "linear_kl has kernels for Hopper alone"

    @property
    def machine(self) -> Machine:
        """tcgen05.mma."""
        from lce_jax.mosaic.sm100._machine import MACHINE

        return MACHINE

    def tile_sizes(self, case: Case) -> dict[str, int]:
        """Of the kernels that contract H."""
        tuning = self.tunings.of(case, "forward")
        return {"hidden": tuning.tile_k, "stages": tuning.stages, "blocks that multiply together": tuning.cluster}

    def kl_tile_sizes(self, cases: Pair[Case]) -> dict[str, int]:
        """There are none."""
        del cases
        return {}


KERNELS = Kernels()
