"""The forward kernels' output: eq. 1 of each vocabulary tile, in base 2, as an array [tiles, fields, tokens]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax import _statistics
from lce_jax._types import Case, Options, ShardStatistics
from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic._operands import LOG2E

if TYPE_CHECKING:
    from jaxtyping import Array, Float

FLOOR = -1e10  # a tile's maximum where all its columns are padding: below every raw product, and finite
UNWRITTEN: Any = _statistics.NO_COLUMNS._replace(max=FLOOR, min=-FLOOR)


def names(options: Options) -> list[str]:
    """The fields of `ShardStatistics` that the kernels compute, one number per token each.

    Σ z (`_mean`) and the logits of candidates (`_candidates`) are computed beside them.
    """
    return [name for name in options.statistics if name not in ("total", "candidates")]


def array_shape(case: Case, shape: Geometry, num_tiles: int) -> tuple[int, int, int]:
    """(tiles, fields, tokens)."""
    return num_tiles, len(names(case.options)), shape.padded_tokens


def without_floor(stats: ShardStatistics) -> ShardStatistics:
    """The extremes as eq. 1 has them where all columns are padding."""
    none, lowest = stats.sumexp == 0.0, stats.min
    return stats._replace(
        max=jnp.where(none, _statistics.MASKED, stats.max),
        min=None if lowest is None else jnp.where(none, -_statistics.MASKED, lowest),
    )


def to_nats(case: Case, part: Float[Array, "tiles fields T"], num_tiles: Any) -> ShardStatistics:
    """The statistics of the call's own tokens as eq. 1 has them, [tiles, T] each.

    Tiles from ``num_tiles`` on were never written: they get the statistics of 0 columns, which merge to nothing.
    """
    fields = names(case.options)
    if not isinstance(num_tiles, int):
        written = jnp.arange(part.shape[0], dtype=jnp.int32) < num_tiles
        unwritten = jnp.asarray([getattr(UNWRITTEN, name) for name in fields], jnp.float32)
        part = jnp.where(written[:, None, None], part, unwritten[None, :, None])
    stats = _statistics.of_fields({name: part[:, i, : case.num_tokens] for i, name in enumerate(fields)})
    weighted = None if stats.weighted is None else stats.weighted * (1.0 / LOG2E)
    return stats._replace(weighted=weighted, target=stats.target * (1.0 / LOG2E))
