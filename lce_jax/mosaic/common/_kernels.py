"""The launches of a kernel set: the same for all generations, with a generation's tunings and its `Machine`.

They import the kernel language, which takes half a second, when they are first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._kernel_set import KernelSet, Parted
from lce_jax.mosaic._operands import Marked, Prepared
from lce_jax.mosaic.common._candidate_kernels import CandidateKernels
from lce_jax.mosaic.common._kl_kernels import KLKernels
from lce_jax.mosaic.common._live_kernels import LiveKernels

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class Kernels(LiveKernels, CandidateKernels, KLKernels, KernelSet, Protocol):
    """The part of a `KernelSet` that every generation has in common."""

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
        from lce_jax.mosaic.common import _statistics

        tuning = self.tunings.of(case, "forward")
        return _statistics.statistics(self.machine, prepared, weight, case, tuning, span, parts, cache)

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
        from lce_jax.mosaic.common import _join

        return _join.join(scale, parts, joined, case, group, numbers, in_nats, parted)[0]

    def per_token(self, function: Callable[..., Any], *operands: Any) -> Any:
        """One thread per token."""
        from lce_jax.mosaic.common import _per_token

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
        from lce_jax.mosaic.common import _dlogits

        tuning = self.tunings.of(case, "dlogits")
        return _dlogits.dlogits(self.machine, prepared, weight, case, tuning, factors, span, columns)

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
        from lce_jax.mosaic.common import _cached_dlogits

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
        from lce_jax.mosaic.common import _products

        tuning = self.tunings.of(case, "dhidden")
        return _products.update_dhidden(self.machine, sums, dlogits, weight, case, tuning, span)

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
        from lce_jax.mosaic.common import _products

        tuning = self.tunings.of(case, "dweight")
        return _products.write_dweight(self.machine, dweight, dlogits, hidden, case, tuning, span, add)

    def prepare(
        self,
        case: Case,
        labels: Int[Array, "R 2"] | Int[Array, "R"],
        temperatures: Float[Array, "n"] | None,
        field: int,
        numbers: Int[Array, "4"],
        ids: Int[Array, "R"] | None = None,
        floors: Float[Array, "n"] | None = None,
        floor_field: int = 0,
    ) -> tuple[Marked, Int[Array, "R"] | None]:
        """One thread per token."""
        from lce_jax.mosaic.common import _tokens

        return _tokens.prepare(case, labels, temperatures, field, numbers, ids, floors, floor_field)

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
        floors: Float[Array, "R"] | None = None,
    ) -> tuple[list[Float[Array, "R"]], Float[Array, "n"]]:
        """The same, through `mathematics._logprobs`."""
        from lce_jax.mosaic.common import _tokens

        given = numbers, kept, vocab_size, megatron, sizes, floors
        return _tokens.finish(case, joined, ids, temperatures, *given)

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
        """The same, through `mathematics._logprobs`."""
        from lce_jax.mosaic.common import _tokens

        return _tokens.coefficients(case, kept, has_temperature, seeds, numbers, vocab_size, terms)

    def total(
        self, case: Case, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]
    ) -> Float[Array, "R H"]:
        """A few rows for each block."""
        from lce_jax.mosaic.common import _hidden_rows

        return _hidden_rows.total(case, sums, dtype, numbers)

    def rows(self, case: Case, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
        """A few rows for each block."""
        from lce_jax.mosaic.common import _hidden_rows

        return _hidden_rows.rows(case, hidden, numbers)

    def copy(
        self, case: Case, weight: Float[Array, "atoms n"], numbers: Int[Array, "2"]
    ) -> Float[Array, "tile_atoms n"]:
        """A piece of an atom for each block."""
        from lce_jax.mosaic.common import _hidden_rows

        return _hidden_rows.copy(case, weight, numbers)

    def scale(self, x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any) -> Float[Array, "n"]:
        """At the speed of memory."""
        from lce_jax.mosaic.common import _hidden_rows

        return _hidden_rows.scale(x, factor, dtype)
