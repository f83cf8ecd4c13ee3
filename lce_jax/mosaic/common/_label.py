"""With a floor: the label of each row, which counts also where its logit is below the floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax._types import ShardStatistics
from lce_jax.mathematics._statistics import SUMS
from lce_jax.mosaic._partial_statistics import FLOOR
from lce_jax.mosaic.common._held import PADDING
from lce_jax.mosaic.common._tiles import TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float


class LabelBelow(NamedTuple):
    """Where a tile holds the label of a row, below its floor: one column more beside those that reach it."""

    there: Bool[Array, "rows"]
    x: Float[Array, "rows"]

    @classmethod
    def of(cls, x: Array, target: Array, floor: Array) -> LabelBelow:
        """From the label's x, which is anything where the tile holds none, and its column, from the tile's first on."""
        return cls((target >= 0) & (target < TILE_N) & (x < floor), x)

    def or_else(self, value: float) -> Float[Array, "rows"]:
        """Its x, or ``value`` where it is not there."""
        return jnp.where(self.there, self.x, value)

    def highest(self, highest: Float[Array, "rows"]) -> Float[Array, "rows"]:
        """The largest x, from that of the columns that reach the floor."""
        return jnp.maximum(highest, self.or_else(FLOOR))

    def added(self, stats: ShardStatistics, row_scale: Float[Array, "rows"]) -> ShardStatistics:
        """``stats`` of the columns that reach the floor, relative to `highest`, with the label's."""
        u = (self.x - stats.max) * row_scale
        e = jnp.where(self.there, jnp.exp2(u), 0.0)
        there = {name: getattr(stats, name) for name in SUMS}
        sums: Any = {name: None if x is None else x + SUMS[name].term(u, e) for name, x in there.items()}
        return stats._replace(
            **sums,
            min=None if stats.min is None else jnp.minimum(stats.min, self.or_else(-PADDING)),
            support=None if stats.support is None else stats.support + jnp.where(self.there, 1.0, 0.0),
        )


def extent(x: Float[Array, "rows n"]) -> tuple[Float[Array, "rows"], Float[Array, "rows"]]:
    """The smallest number of each row of a block that is no `PADDING`, and how many are none."""
    counts = x > 0.5 * PADDING
    lowest = jnp.min(jnp.where(counts, x, -PADDING), axis=1)
    return lowest, jnp.sum(jnp.where(counts, 1.0, 0.0), axis=1)
