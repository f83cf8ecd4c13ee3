"""The launches of the kernel set that serve two heads. They import the kernel language when they are first called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._kl_kernel_set import Direction, KLKernelSet, KLOperands

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int
    from lce_jax.mosaic.common._machine import KLMachine, Machine


class Tunings(Protocol):
    """A generation's free choices."""

    def of(self, case: Case, kernel: str) -> Any:
        """Those of a kernel."""


class KLKernels(KLKernelSet, Protocol):
    """Those of `KLKernelSet`, with the `KLMachine` of the generation."""

    tunings: Tunings

    @property
    def machine(self) -> Machine:
        """How the generation multiplies tiles."""

    def kl_statistics(
        self, cases: tuple[Case, Case], operands: KLOperands, span: Int[Array, "fields"], parts: Float[Array, "n 6 Tp"]
    ) -> Float[Array, "n 6 Tp"]:
        """Both heads' tiles, straight from the accumulators."""
        from lce_jax.mosaic.common import _kl

        tuning = self.tunings.of(cases[0], "kl_statistics")
        return _kl.statistics(self._of_two_heads, cases, tuning, operands, span, parts)

    def kl_mixture_sums(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        factors: Float[Array, "12 Tp"],
        span: Int[Array, "fields"],
        parts: Float[Array, "n 2 Tp"],
    ) -> Float[Array, "n 2 Tp"]:
        """Both heads' tiles once more, when the whole vocabulary's statistics are known."""
        from lce_jax.mosaic.common import _kl

        tuning = self.tunings.of(cases[0], "kl_mixture_sums")
        return _kl.mixture_sums(self._of_two_heads, cases, tuning, operands, factors, span, parts)

    def kl_dlogits(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        factors: Float[Array, "fields Tp"],
        span: Int[Array, "fields"],
        columns: int,
        direction: Direction,
    ) -> Float[Array, "Tp columns"]:
        """The same tiles again, turned into the gradient in the student's raw products."""
        from lce_jax.mosaic.common import _kl

        tuning = self.tunings.of(cases[0], "kl_dlogits")
        return _kl.dlogits(self._of_two_heads, cases, tuning, operands, factors, span, columns, direction)

    @property
    def _of_two_heads(self) -> KLMachine:
        found = self.machine.kl
        assert found is not None
        return found
