"""Which tiles carry gradient, from the forward's own maxima.

A tile, a row block by a vocabulary tile, is live if it holds a label or a probability of at least the threshold. What
the forward keeps of each tile tells that as soon as the whole vocabulary's lse is known, so the backward never touches
the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from lce_jax import _statistics
from lce_jax._statistics import Normalizer
from lce_jax._types import Case, ShardStatistics
from lce_jax.mosaic._call import Call

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

ALWAYS = -_statistics.MASKED  # stands for the maximum of a tile that is live whatever its probabilities are


class TileStatistics(NamedTuple):
    """What the forward keeps of each vocabulary tile."""

    max: Float[Array, "tiles T"]  # the largest x; `ALWAYS` where the tile holds the token's label
    sumexp: Float[Array, "tiles T"] | None  # None where no ``dropped_mass`` is asked for


def of_tiles(case: Case, parts: ShardStatistics) -> TileStatistics:
    """Of unmerged statistics, what `tile_statistics` reads."""
    return TileStatistics(parts.max, parts.sumexp if case.options.reports_dropped_mass else None)


def tile_statistics(call: Call, parts: TileStatistics) -> TileStatistics:
    """Of the shard's first vocabulary tiles; the tiles after them are padding."""
    shape, targets = call.shape, call.prepared.targets[: call.case.num_tokens]
    missing = ((0, shape.num_tiles - parts.max.shape[0]), (0, 0))
    highest = jnp.pad(parts.max, missing, constant_values=_statistics.MASKED)
    tile = jnp.arange(shape.num_tiles, dtype=jnp.int32)[:, None]
    always = (targets >= 0) & (targets // shape.tile == tile)
    if call.operands.num_columns is not None:  # `_edge` contracts the tile where padding begins
        always |= tile == call.prepared.num_columns // shape.tile
    sumexp = None if parts.sumexp is None else jnp.pad(parts.sumexp, missing)
    return TileStatistics(jnp.where(always, ALWAYS, highest), sumexp)


def select(
    case: Case, tiles: TileStatistics, row_block: int, of_rows: Normalizer, rows: Bool[Array, "T"] | None
) -> tuple[Bool[Array, "tiles blocks"], Float[Array, "T"] | None]:
    """The live tiles, and the probability of each token in the others. ``rows`` are those that count; None: all.

    A row whose sum is NaN makes its row block live everywhere, so that its gradient is NaN as well.
    """
    largest = (tiles.max - of_rows.max) * of_rows.scale - of_rows.log_sumexp  # log-probability of each tile
    below = largest < math.log(case.options.gradient_threshold)
    if rows is not None:
        below |= ~rows
    padded = jnp.pad(below, ((0, 0), (0, -below.shape[1] % row_block)), constant_values=True)
    live = ~jnp.all(padded.reshape(below.shape[0], -1, row_block), axis=2)
    if tiles.sumexp is None:
        return live, None
    dead = ~jnp.repeat(live, row_block, axis=1)[:, : below.shape[1]]
    mass = jnp.exp(jnp.minimum(largest, 0.0)) * tiles.sumexp
    return live, jnp.sum(jnp.where(dead, mass, 0.0), axis=0)
