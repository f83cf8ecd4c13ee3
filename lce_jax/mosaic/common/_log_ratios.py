"""`lce_jax.mathematics._kl` in a kernel: base 2, no division, and the hardware's own logarithm far from 1.

That one is off by up to 2^-22 wherever its result lies, so near 1 a polynomial is in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from lce_jax._shapes import Array

NEAR_ONE = 0.25
# (2^x - 1) / x up to 1 and log2(1 + x) / x up to NEAR_ONE: both are off by at most 3e-8 of what they are.
EXPM1 = (0.693147186, 0.2402266472, 0.0555040203, 0.0096169856, 0.0013335338, 0.0001563451, 0.0000152525)
LOG1P = (1.4426950194, -0.7213474397, 0.4809092734, -0.3606914640, 0.2876754352, -0.2394193308, 0.2276765902,
         -0.2020801817)  # fmt: skip


class Reference(NamedTuple):
    """What a logarithm is relative to, a number per row each: `lce_jax.mosaic._mixture.MixtureFactors`."""

    own: Any
    other: Any
    start: Any
    most: Any


def relative_log_ratio(d: Array, distance: Array, rows: Reference) -> Array:
    """The t - t₀ of eq. 9 in base 2, from d and d - d₀."""
    return relative_log_ratios(d, distance, rows)[0]


def relative_log_ratios(d: Array, distance: Array, rows: Reference) -> tuple[Array, Array]:
    """The t - t₀ and d + t - t₀ of eq. 9 in base 2, from d and d - d₀.

    The second is off by the rounding of d. It approaches -ln β: where that is small, the ratio is better taken from -d.
    """
    bounded = jnp.minimum(d, rows.most)
    e = jnp.exp2(bounded) * rows.other
    near = rows.start * (distance * _polynomial(EXPM1, distance))
    x = jnp.where(jnp.abs(distance) < 1.0, near, e - rows.start)
    log = jnp.where(jnp.abs(x) < NEAR_ONE, x * _polynomial(LOG1P, x), jnp.log2(e + rows.own))
    return -log - (d - bounded), bounded - log


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value
