"""The kernel set for Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

statistics       _statistics.py       eq. 1 of each tile of logits; the exponentials for a cache
dlogits          _dlogits.py          the same tiles again, turned into the gradient in the raw products
cached dlogits   _cached_dlogits.py   the same from cached exponentials, without a product
products         _products.py         dhidden and dweight from dlogits
live products    _live_products.py    the same from the live tiles of dlogits alone, with a ``gradient_threshold``
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lce_jax._types import Case
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._worklist import RowLists, Worklist
from lce_jax.mosaic.sm90 import _refusal
from lce_jax.mosaic.sm90._hardware import DHIDDEN_WAVES, TILING
from lce_jax.mosaic.sm90._tuning import Tunings

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(KernelSet):
    """The launches import the kernel language, which takes half a second, when they are first called."""

    compute_capability: str = "9.0"
    devices: tuple[str, ...] = ("H100", "H200", "GH200", "H800", "H20")
    tiling: Tiling = TILING
    budget: Budget = Budget(dhidden_waves=DHIDDEN_WAVES)  # noqa: RUF009 - frozen
    tunings: Tunings = Tunings()  # noqa: RUF009 - frozen

    def refusal(self, case: Case) -> str | None:
        """A dtype without exact products, a shape that cannot be tiled, or an option that no kernel knows."""
        return _refusal.refusal(case, self.tunings)

    def tile_sizes(self, case: Case) -> dict[str, int]:
        """Of the two kernels that contract H."""
        forward, backward = self.tunings.of(case, "forward"), self.tunings.of(case, "dlogits")
        return {
            "hidden forward": forward.tile_k,
            "stages forward": forward.stages,
            "hidden backward": backward.tile_k,
            "stages backward": backward.stages,
        }

    def depth_step(self, case: Case) -> int:
        """A step of the product's pipeline."""
        return self.tunings.of(case, "dhidden").tile_k

    def statistics(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        num_tiles: int,
        cache: Cache | None,
    ) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
        """The forward's tiles, straight from the accumulators."""
        from lce_jax.mosaic.sm90 import _statistics

        return _statistics.statistics(prepared, weight, case, self.tunings.of(case, "forward"), span, num_tiles, cache)

    def dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        rows: RowFactors,
        span: Int[Array, "fields"],
        columns: int,
    ) -> Float[Array, "T columns"]:
        """A chunk's gradient in the raw products, recomputed."""
        from lce_jax.mosaic.sm90 import _dlogits

        return _dlogits.dlogits(prepared, weight, case, self.tunings.of(case, "dlogits"), rows, span, columns)

    def cached_dlogits(
        self,
        prepared: Prepared,
        case: Case,
        rows: RowFactors,
        cache: Cache,
        span: Int[Array, "fields"],
        columns: int,
        overwrites: bool,
    ) -> Float[Array, "T columns"]:
        """The same from the cache, at the speed of memory."""
        from lce_jax.mosaic.sm90 import _cached_dlogits

        return _cached_dlogits.dlogits(prepared, case, rows, cache, span, columns, overwrites)

    def update_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "T columns"],
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        add: bool,
    ) -> Float[Array, "splits Tp Hp"]:
        """The product dlogits · weight, its contraction cut into as many parts as there are arrays of sums."""
        from lce_jax.mosaic.sm90 import _products

        return _products.update_dhidden(sums, dlogits, weight, case, self.tunings.of(case, "dhidden"), span, add)

    def write_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "T columns"],
        hidden: Float[Array, "T H"],
        case: Case,
        span: Int[Array, "fields"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """The product dlogitsᵀ · hidden."""
        from lce_jax.mosaic.sm90 import _products

        return _products.write_dweight(dweight, dlogits, hidden, case, self.tunings.of(case, "dweight"), span, add)

    def live_group(self, case: Case) -> int:
        """The blocks of a cluster, which share each tile of the weight."""
        return self.tunings.of(case, "dlogits").cluster

    def live_dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        rows: RowFactors,
        work: Worklist,
        batch: Int[Array, "fields"],
        slots: int,
    ) -> Float[Array, "slots*128 256"]:
        """The same kernel as `dlogits`, along a list."""
        from lce_jax.mosaic.sm90 import _dlogits

        tuning = self.tunings.of(case, "dlogits")
        return _dlogits.live_dlogits(prepared, weight, case, tuning, rows, work, batch, slots)

    def update_live_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "slots*128 256"],
        weight: Float[Array, "V H"],
        case: Case,
        work: Worklist,
        rows: RowLists,
        batch: Int[Array, "fields"],
    ) -> Float[Array, "splits Tp Hp"]:
        """The product dlogits · weight over each row block's list."""
        from lce_jax.mosaic.sm90 import _live_products

        tuning = self.tunings.of(case, "live_dhidden")
        return _live_products.update_dhidden(sums, dlogits, weight, case, tuning, work, rows, batch)

    def write_live_dweight(
        self,
        dweight: Float[Array, "V H"],
        dlogits: Float[Array, "slots*128 256"],
        hidden: Float[Array, "T H"],
        case: Case,
        work: Worklist,
        ranks: Int[Array, "ranks"],
        batch: Int[Array, "fields"],
        add: bool = False,
    ) -> Float[Array, "V H"]:
        """The product dlogitsᵀ · hidden over each vocabulary tile's list."""
        from lce_jax.mosaic.sm90 import _live_products

        tuning = self.tunings.of(case, "live_dweight")
        return _live_products.write_dweight(dweight, dlogits, hidden, case, tuning, work, ranks, batch, add)


KERNELS = Kernels()
