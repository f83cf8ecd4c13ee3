"""What the host code asks of the kernels of `lce_jax.linear_kl`, which see a tile of both heads' logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from lce_jax._types import Case
from lce_jax.mathematics._kl import Direction, Pair

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class KLHead(NamedTuple):
    """One head's operands, as the kernels take them."""

    hidden: Float[Array, "T H"]  # as in `Prepared`
    weight: Float[Array, "V H"]  # holds a span's part at its offset; zeros are read after its last row
    scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2


class KLOperands(NamedTuple):
    """Both heads, that of p first, and the columns that are padding."""

    heads: tuple[KLHead, KLHead]
    mask: Int[Array, "2*tile"]  # as in `Prepared`


class KLCache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare both heads' products: `_kept_ratios.Kept`."""

    e: Float[Array, "Tp columns"]  # whole tiles
    ratio: Float[Array, "Tp columns"]  # in base 2
    references: Float[Array, "tiles 3 Tp"]  # of each tile


class KLKernelSet(Protocol):
    """The part of a `KernelSet` that two heads need. Cases come as the heads do, that of p first."""

    def kl_refusal(self, cases: Pair[Case]) -> str | None:
        """Why the kernels cannot serve two heads; None if they can. Each head alone is `KernelSet.refusal`'s."""

    def kl_tile_sizes(self, cases: Pair[Case]) -> dict[str, int]:
        """What a plan says of the kernels' tiles, by name."""

    def kl_statistics(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        span: Int[Array, "fields"],
        parts: Float[Array, "n 6 Tp"],
        cache: KLCache | None,
        direction: Direction,
    ) -> tuple[Float[Array, "n 6 Tp"], KLCache | None]:
        """``parts`` with the `KLStatistics` of the span's tiles: the fields in order, ``cross`` in base 2.

        The cache, if any, gets what the direction's gradient needs of these tiles.

        A tile of padding alone has a maximum of `_partial_statistics.FLOOR` and sums of 0. Tiles after the span and row
        blocks without a live row are left unwritten.
        """

    def kl_mixture_sums(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        factors: Float[Array, "14 Tp"],
        span: Int[Array, "fields"],
        parts: Float[Array, "n 2 Tp"],
    ) -> Float[Array, "n 2 Tp"]:
        """``parts`` with the `MixtureSums` of the span's tiles (eq. 9), in base 2; ``factors``: `MixtureFactors`.

        A tile of padding alone has sums of 0. What is left unwritten is as with `kl_statistics`.
        """

    def kl_dlogits(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        factors: Float[Array, "fields Tp"],
        span: Int[Array, "fields"],
        columns: int,
        direction: Direction,
    ) -> Float[Array, "Tp columns"]:
        """Eq. 8 or 10 in the student's raw products, in its weight's dtype, at the beginning of ``columns``.

        ``factors`` are the `KLCoefficients` in base 2, where u_p - v_q is log2 e times that of eq. 8, or of "jsd" the
        `MixtureFactors`. Zero on columns that are padding or do not exist; tiles after the span and row blocks without
        a live row are left unwritten.
        """

    def cached_kl_dlogits(
        self,
        cases: tuple[Case, Case],
        operands: KLOperands,
        factors: Float[Array, "fields Tp"],
        cache: KLCache,
        span: Int[Array, "fields"],
        columns: int,
        direction: Direction,
    ) -> Float[Array, "Tp columns"]:
        """The same from all of a cache, in the place of its exponentials."""
