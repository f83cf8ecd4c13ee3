"""The kernel set for Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

pipeline    _pipeline.py             tiles of a product: copies, wgmma, the registers of two warpgroups
statistics  _statistics_epilogue.py  the forward's epilogue: eq. 1 of a tile of logits; the exponentials for a cache
dlogits     _dlogits_epilogue.py     the backward's: the same tile again, turned into the gradient in the raw products
two heads   _kl.py, _kl_tile.py      both epilogues of `lce_jax.linear_kl`; the tile that waits for the other head's
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lce_jax._types import Case
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic.common import _kernels
from lce_jax.mosaic.common._refusal import kl_refusal, refusal
from lce_jax.mosaic.common._tiles import SCALED, TILING
from lce_jax.mosaic.sm90._hardware import DHIDDEN_WAVES
from lce_jax.mosaic.sm90._tuning import Tunings

if TYPE_CHECKING:
    from lce_jax.mosaic.common._machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernels(_kernels.Kernels):
    """Those of Hopper."""

    compute_capabilities: tuple[str, ...] = ("9.0",)
    devices: tuple[str, ...] = ("H100", "H200", "GH200", "H800", "H20")
    tiling: Tiling = TILING
    budget: Budget = Budget(dhidden_waves=DHIDDEN_WAVES)  # noqa: RUF009 - frozen
    scaled_numbers: int = SCALED
    tunings: Tunings = Tunings()  # noqa: RUF009 - frozen

    def refusal(self, case: Case) -> str | None:
        """A dtype without exact products, a shape that cannot be tiled, or an option that no kernel knows."""
        return refusal(case, self.tunings.smem_bytes(case))

    def kl_refusal(self, cases: Pair[Case]) -> str | None:
        """What the kernels of two heads need beyond those of each."""
        return kl_refusal(cases)

    @property
    def machine(self) -> Machine:
        """Wgmma."""
        from lce_jax.mosaic.sm90._machine import MACHINE

        return MACHINE

    def tile_sizes(self, case: Case) -> dict[str, int]:
        """Of the two kernels that contract H."""
        forward, backward = self.tunings.of(case, "forward"), self.tunings.of(case, "dlogits")
        return {
            "hidden forward": forward.tile_k,
            "stages forward": forward.stages,
            "hidden backward": backward.tile_k,
            "stages backward": backward.stages,
        }

    def kl_tile_sizes(self, cases: Pair[Case]) -> dict[str, int]:
        """Of both kernels that see two heads."""
        forward, backward = (self.tunings.of(cases.student, f"kl_{kernel}") for kernel in ("statistics", "dlogits"))
        return {
            "hidden": forward.tile_k,
            "stages forward": forward.stages,
            "stages backward": backward.stages,
        }


KERNELS = Kernels()
