"""A block of a tile as a warpgroup holds it in registers, and the per-token vectors beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic._operands import LOG2E, RowFactors
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic.common._tiles import TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

PADDING = -1e15  # stands for the raw products of columns that do not count: exp2 of it is 0, its square is finite


class Held(NamedTuple):
    """Rows of a tile in the registers of a warpgroup."""

    num_rows: int

    @property
    def layout(self) -> Any:
        """That of wgmma's results. It is of registers alone: every generation has it."""
        return plgpu.Layout.WGMMA

    @property
    def per_row(self) -> Any:
        """The layout of one number per row."""
        return self.layout.reduce(1)

    @property
    def per_column(self) -> Any:
        """The layout of one number per column."""
        return self.layout.reduce(0)

    def load_rows(self, ref: Any, rows: Any) -> Float[Array, "rows"]:
        """The part of a per-token vector for these rows, from GMEM."""
        return plgpu.load(ref.at[rows], layout=self.per_row, optimized=False)

    def load_factors(self, factors: Any, rows: Any) -> RowFactors:
        """The same part of the stacked `RowFactors`."""
        highest, target, constant = (self.load_rows(factors.at[i], rows) for i in range(3))
        return RowFactors(
            highest, target, constant, self.load_rows(factors.at[3], rows) if factors.shape[0] == 4 else None
        )

    def along_rows(self, values: Float[Array, "rows"], columns: int = TILE_N) -> Float[Array, "rows n"]:
        """One value per row, broadcast."""
        return lax.broadcast_in_dim(values, (self.num_rows, columns), (0,))

    def with_target(self, d: Float[Array, "rows n"], rows: RowFactors, label: Float[Array, "rows"], holds: Any) -> Any:
        """A block of dlogits with eq. 4's target at the label, which counts from the block's first column.

        ``holds`` says whether the tile has any.
        """

        def replace() -> Array:
            columns = plgpu.broadcasted_iota(jnp.int32, d.shape, 1, layout=self.layout)
            return jnp.where(columns == self.along_rows(label, d.shape[1]), self.along_rows(rows.target, d.shape[1]), d)

        return lax.cond(holds, replace, lambda: d)

    def reaching(self, x: Float[Array, "rows n"], floor: Float[Array, "rows"] | None) -> Float[Array, "rows n"]:
        """A block with `PADDING` on what is below the rows' floor. The label's own logit counts all the same."""
        return x if floor is None else jnp.where(x < self.along_rows(floor, x.shape[1]), PADDING, x)

    def gradient(self, x: Float[Array, "rows n"], row_scale: Array, rows: RowFactors) -> Float[Array, "rows n"]:
        """Eq. 4 on a block of columns, but for the label. u has the bits of the forward's."""

        def along(values: Array) -> Array:
            return self.along_rows(values, x.shape[1])

        u = (x - along(rows.max)) * along(row_scale)
        e = jnp.exp2(u)
        d = along(rows.constant) * e
        return d if rows.slope is None else d + along(rows.slope) * (u * e)


def softcap(z: Any, cap: float, options: Options) -> Any:
    """The tanh of eq. 0, to the last digits of fp32: the hardware's own tanh has eleven bits."""
    return 1.0 - 2.0 / (jnp.exp2(z * (2.0 * LOG2E * options.logit_scale / cap)) + 1.0)
