"""The kernel set for Hopper GPUs (compute capability 9.0): wgmma from tiles that TMA brings into shared memory.

statistics       _statistics.py       eq. 1 of each tile of logits; the exponentials for a cache
join             _join.py             their union, in an order that the tiles alone decide
                 _parts.py            where tiles and groups lie in a vocabulary in parts, for both
dlogits          _dlogits.py          the same tiles again, turned into the gradient in the raw products
cached dlogits   _cached_dlogits.py   the same from cached exponentials, without a product
products         _products.py         dhidden and dweight from dlogits
tokens           _tokens.py           the steps between them on a few numbers per token, for lists of launches
per token        _per_token.py        the same for programs that JAX traces: any function of a few numbers per token
hidden rows      _hidden_rows.py      the steps between them on rows of H numbers
candidates       _candidates.py       logits of a few columns per token, and their places in dlogits
                 _candidate_tokens.py the steps between them, for lists of launches
with a threshold _live_kernels.py     what a ``gradient_threshold`` adds: live tiles, their lists, and their gradients
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lce_jax._types import Case
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._geometry import Tiling
from lce_jax.mosaic._kernel_set import KernelSet, Parted
from lce_jax.mosaic._operands import Marked, Prepared
from lce_jax.mosaic.sm90 import _refusal
from lce_jax.mosaic.sm90._candidate_kernels import CandidateKernels
from lce_jax.mosaic.sm90._hardware import DHIDDEN_WAVES, SCALED, TILING
from lce_jax.mosaic.sm90._live_kernels import LiveKernels
from lce_jax.mosaic.sm90._tuning import Tunings

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernels(LiveKernels, CandidateKernels, KernelSet):
    """The launches import the kernel language, which takes half a second, when they are first called."""

    compute_capability: str = "9.0"
    devices: tuple[str, ...] = ("H100", "H200", "GH200", "H800", "H20")
    tiling: Tiling = TILING
    budget: Budget = Budget(dhidden_waves=DHIDDEN_WAVES)  # noqa: RUF009 - frozen
    scaled_numbers: int = SCALED
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

    def statistics(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
        parts: Float[Array, "tiles fields Tp"],
        cache: Cache | None,
    ) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
        """The forward's tiles, straight from the accumulators."""
        from lce_jax.mosaic.sm90 import _statistics

        return _statistics.statistics(prepared, weight, case, self.tunings.of(case, "forward"), span, parts, cache)

    def join(
        self,
        scale: Float[Array, "Tp"],
        parts: Float[Array, "parts fields Tp"],
        joined: Float[Array, "groups fields Tp"],
        case: Case,
        group: int,
        numbers: Int[Array, "3"],
        in_nats: bool = False,
        parted: Parted | None = None,
    ) -> Float[Array, "groups fields Tp"]:
        """One thread per token and group."""
        from lce_jax.mosaic.sm90 import _join

        return _join.join(scale, parts, joined, case, group, numbers, in_nats, parted)[0]

    def per_token(self, function: Callable[..., Any], *operands: Any) -> Any:
        """One thread per token."""
        from lce_jax.mosaic.sm90 import _per_token

        return _per_token.per_token(function, *operands)

    def dlogits(
        self,
        prepared: Prepared,
        weight: Float[Array, "V H"],
        case: Case,
        factors: Float[Array, "factors Tp"],
        span: Int[Array, "fields"],
        columns: int,
    ) -> Float[Array, "T columns"]:
        """A chunk's gradient in the raw products, recomputed."""
        from lce_jax.mosaic.sm90 import _dlogits

        return _dlogits.dlogits(prepared, weight, case, self.tunings.of(case, "dlogits"), factors, span, columns)

    def cached_dlogits(
        self,
        prepared: Prepared,
        case: Case,
        factors: Float[Array, "factors Tp"],
        cache: Cache,
        span: Int[Array, "fields"],
        columns: int,
        overwrites: bool,
    ) -> Float[Array, "T columns"]:
        """The same from the cache, at the speed of memory."""
        from lce_jax.mosaic.sm90 import _cached_dlogits

        return _cached_dlogits.dlogits(prepared, case, factors, cache, span, columns, overwrites)

    def update_dhidden(
        self,
        sums: Float[Array, "splits Tp Hp"],
        dlogits: Float[Array, "T columns"],
        weight: Float[Array, "V H"],
        case: Case,
        span: Int[Array, "fields"],
    ) -> Float[Array, "splits Tp Hp"]:
        """The product dlogits · weight, its contraction cut into as many parts as there are arrays of sums."""
        from lce_jax.mosaic.sm90 import _products

        return _products.update_dhidden(sums, dlogits, weight, case, self.tunings.of(case, "dhidden"), span)

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

    def prepare(
        self,
        case: Case,
        labels: Int[Array, "R 2"] | Int[Array, "R"],
        temperatures: Float[Array, "n"] | None,
        field: int,
        numbers: Int[Array, "4"],
        ids: Int[Array, "R"] | None = None,
    ) -> tuple[Marked, Int[Array, "R"] | None]:
        """One thread per token."""
        from lce_jax.mosaic.sm90 import _tokens

        return _tokens.prepare(case, labels, temperatures, field, numbers, ids)

    def finish(
        self,
        case: Case,
        joined: Float[Array, "1 fields Tp"],
        ids: Int[Array, "R"],
        temperatures: Float[Array, "R"] | None,
        numbers: Int[Array, "2"],
        kept: Float[Array, "n"],
        vocab_size: int,
        megatron: bool,
        sizes: Float[Array, "groups fields Tp"] | None = None,
    ) -> tuple[list[Float[Array, "R"]], Float[Array, "n"]]:
        """The same, through `_math`."""
        from lce_jax.mosaic.sm90 import _tokens

        return _tokens.finish(case, joined, ids, temperatures, numbers, kept, vocab_size, megatron, sizes)

    def coefficients(
        self,
        case: Case,
        kept: Float[Array, "n"],
        has_temperature: bool,
        seeds: dict[str, Float[Array, "R"]],
        numbers: Int[Array, "2"],
        vocab_size: int,
        terms: Float[Array, "(K+1)*R"] | None = None,
    ) -> Float[Array, "factors Tp"]:
        """The same, through `_math`."""
        from lce_jax.mosaic.sm90 import _tokens

        return _tokens.coefficients(case, kept, has_temperature, seeds, numbers, vocab_size, terms)

    def total(
        self, case: Case, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]
    ) -> Float[Array, "R H"]:
        """A few rows for each block."""
        from lce_jax.mosaic.sm90 import _hidden_rows

        return _hidden_rows.total(case, sums, dtype, numbers)

    def rows(self, case: Case, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
        """A few rows for each block."""
        from lce_jax.mosaic.sm90 import _hidden_rows

        return _hidden_rows.rows(case, hidden, numbers)

    def copy(
        self, case: Case, weight: Float[Array, "atoms n"], numbers: Int[Array, "2"]
    ) -> Float[Array, "tile_atoms n"]:
        """A piece of an atom for each block."""
        from lce_jax.mosaic.sm90 import _hidden_rows

        return _hidden_rows.copy(case, weight, numbers)

    def scale(self, x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any) -> Float[Array, "n"]:
        """At the speed of memory."""
        from lce_jax.mosaic.sm90 import _hidden_rows

        return _hidden_rows.scale(x, factor, dtype)


KERNELS = Kernels()
