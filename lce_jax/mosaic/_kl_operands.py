"""The operands of the kernels of `lce_jax.linear_kl`, which see a tile of both heads' logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
