"""The logarithms of eq. 9: of a distribution and its mixture with another, exact to rounding wherever they cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics._kl import Pair

if TYPE_CHECKING:
    from lce_jax._shapes import Array

MOST_DISTANCE = 80.0  # of two log-probabilities whose exponential is taken: e^80 lies within float32


class Reference(NamedTuple):
    """What eq. 9's logarithms are relative to: those at another d, d₀."""

    ratio: Array | float  # e^{d₀}
    total: Array | float  # 1 - β + β e^{d₀}
    most: Array | float  # the d whose exponential is taken, so that the x below is at most e^MOST_DISTANCE

    @classmethod
    def at(cls, d: Array, weights: Pair[Array]) -> tuple[Reference, Array]:
        """That at ``d``, and its own logarithm: the d₀ and t₀ of eq. 9."""
        ratio, log = jnp.exp(d), log_ratio(d, weights)
        most = MOST_DISTANCE - jnp.maximum(log, 0.0)
        return cls(ratio, weights.student + weights.teacher * ratio, most), log


EQUAL = Reference(1.0, 1.0, MOST_DISTANCE)  # d₀ = 0, where the logarithm is 0


def log_ratios(d: Array, weights: Pair[Array]) -> tuple[Array, Array]:
    """The ln(p / m) and ln(q / m) of m = (1 - β) p + β q, from d = ln q - ln p; the weights are 1 - β and β."""
    return log_ratio(d, weights), log_ratio(-d, Pair(weights.teacher, weights.student))


def log_ratio(d: Array, weights: Pair[Array]) -> Array:
    """The t of eq. 9, -ln(1 - β + β e^d)."""
    return relative_log_ratio(d, d, weights, EQUAL)


def relative_log_ratio(d: Array, distance: Array, weights: Pair[Array], reference: Reference) -> Array:
    """The t - t₀ of eq. 9, -ln((1 - β + β e^d) / (1 - β + β e^{d₀})), from d and d - d₀.

    Near t₀ it is the logarithm of 1 + x, x = β (e^d - e^{d₀}) / (1 - β + β e^{d₀}), whose difference is exact because
    d - d₀ is. Where 1 + x is far below 1 it is that of a sum without a difference.
    """
    own, other = weights
    e = jnp.exp(jnp.minimum(d, reference.most))
    growth = jnp.sign(distance) * -jnp.expm1(-jnp.abs(distance)) * jnp.maximum(e, reference.ratio)
    x = other / reference.total * growth
    small = x < -0.5
    log = jnp.log1p(jnp.where(small, reference.total / (own + other * e) - 1.0, x))
    return jnp.where(small, log, -log) - jnp.maximum(d - reference.most, 0.0)
