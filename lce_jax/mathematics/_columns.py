"""Which columns of the vocabulary count for a token: no padding, and with a floor those that reach it, and the label.

A floor f leaves the tokens {v : z_v >= f} and the label in the distribution. It is compared in the units of x (eq. 0),
x < f / k, so that a column costs one comparison and k, whose product with x is rounded, is not in it. A logit that is
NaN is not below anything, so it still reaches the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


def unscaled_floor(floor: Float[Array, "T"], scale: Float[Array, "T"] | float) -> Float[Array, "T"]:
    """The floor in the units of x; ``scale`` is the k of eq. 0. With k = 0 every logit is 0, and x reaches 0 / 0."""
    return floor / scale


def live_columns(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Bool[Array, "n"] | None:
    """Which of the columns [start, start + size) are true vocabulary; None if all are."""
    return None if num_columns is None else start + jnp.arange(size, dtype=jnp.int32) < num_columns


def without_padding(weight: Float[Array, "V H"], live: Bool[Array, "V"] | None, options: Options) -> Array:
    """The weight with its padding set to zero, because 0 times NaN or inf is NaN."""
    if live is None:
        return weight
    return jnp.where(jnp.expand_dims(live, options.hidden_dim), weight, jnp.zeros((), weight.dtype))


def counting(
    x: Float[Array, "T n"],
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    floor: Float[Array, "T"] | None,
) -> Bool[Array, "T n"] | Bool[Array, "1 n"] | None:
    """Which of a tile's columns count, the label's always; None if all do."""
    if floor is None:
        return None if live is None else live[None, :]
    counts = ~(x < floor[:, None]) | (lax.broadcasted_iota(jnp.int32, x.shape, 1) == targets[:, None])
    return counts if live is None else counts & live[None, :]


def without_empty(where: Bool[Array, "T"] | None, sumexp: Float[Array, "T"]) -> Bool[Array, "T"]:
    """``where``, without the rows whose distribution has no token: a label out of vocabulary, and all below the floor.

    Nothing else has a sum of 0. One that is NaN stays.
    """
    return sumexp != 0 if where is None else where & (sumexp != 0)
