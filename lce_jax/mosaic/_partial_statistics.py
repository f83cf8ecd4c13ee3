"""The forward kernels' output: eq. 1 of each vocabulary tile, in base 2, as an array [tiles, fields, tokens]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax._types import RESULTS, Case, Options, ShardStatistics
from lce_jax.mathematics import _statistics
from lce_jax.mosaic._geometry import Geometry
from lce_jax.mosaic._operands import LOG2E

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

FLOOR = -1e10  # a tile's maximum where all its columns are padding: below every raw product, and finite
UNWRITTEN: Any = _statistics.NO_COLUMNS._replace(max=FLOOR, min=-FLOOR)


def names(options: Options) -> list[str]:
    """The fields of `ShardStatistics` that the kernels compute, one number per token each.

    Σ z (`_mean`) and the logits of candidates (`_candidates`) are computed beside them.
    """
    return [name for name in options.statistics if name not in _statistics.BESIDE]


def kept(options: Options) -> list[str]:
    """Those of them that gradients have, which `lce_jax.kernels` saves of each token."""
    return [name for name in names(options) if name not in _statistics.WITHOUT_GRADIENT]


def results(options: Options) -> list[str]:
    """Those of `RESULTS` that the call has."""
    there = {"entropy": options.entropy, "support": options.stats and options.has_floor}
    return [name for i, name in enumerate(RESULTS) if there.get(name, i < 3 or options.stats)]


def array_shape(case: Case, shape: Geometry, num_tiles: int, more_fields: int = 0) -> tuple[int, int, int]:
    """(tiles, fields, tokens)."""
    return num_tiles, len(names(case.options)) + more_fields, shape.padded_tokens


def unstacked(case: Case, parts: Float[Array, "*n fields Tp"]) -> ShardStatistics:
    """The fields of the call's own tokens, in base 2, [..., T] each."""
    fields = zip(names(case.options), jnp.moveaxis(parts[..., : case.num_tokens], -2, 0), strict=True)
    return _statistics.of_fields(dict(fields))


def to_nats(stats: ShardStatistics) -> ShardStatistics:
    """Statistics as eq. 1 has them, [T] each."""
    none, lowest = stats.sumexp == 0.0, stats.min
    return stats._replace(
        max=jnp.where(none, _statistics.MASKED, stats.max),
        min=None if lowest is None else jnp.where(none, -_statistics.MASKED, lowest),
        weighted=None if stats.weighted is None else stats.weighted * (1.0 / LOG2E),
        target=stats.target * (1.0 / LOG2E),
    )
