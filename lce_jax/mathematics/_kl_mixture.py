"""Eqs. 9 and 10: the divergences of two heads from their mixture, tile by tile. The student's p comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._kl import KLStatistics, Pair, Ratios, RowScale, counted, row_sums
from lce_jax.mathematics._log_ratios import Reference, log_ratio, relative_log_ratio

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float

type Scales = tuple[RowScale, RowScale]
type Tile = tuple[Float[Array, "T n"], Float[Array, "T n"]]


class Mixture(NamedTuple):
    """What eq. 9 needs of each token, from the whole vocabulary's statistics, [T] each."""

    references: tuple[Array, Array, Array]  # `KLStatistics.references`
    log_sums: Float[Array, "T"]  # ln s_p - ln s_q
    weights: Pair[Float[Array, "T"]]  # 1 - β and β
    at_p: Reference  # at the largest x of p, where u_p = v = 0
    log_at_p: Float[Array, "T"]  # the t₀ there


def mixture(
    stats: KLStatistics, scale_q: RowScale, weights: Pair[Float[Array, "T"]], live: Bool[Array, "T"] | None
) -> Mixture:
    """From the whole vocabulary's statistics. In rows that are not ``live``, p and q are 0."""
    stats = counted(stats, live)
    log_sums = jnp.log(stats.sum_p / stats.sum_q)
    at_p = jnp.minimum((stats.at_p - stats.max_q) * scale_q, 0.0) + log_sums
    return Mixture(stats.references, log_sums, weights, *Reference.at(at_p, weights))


class MixtureSums(NamedTuple):
    """The a s_q and b s_p of eq. 9 over some columns."""

    of_p: Float[Array, "T"]
    of_q: Float[Array, "T"]


def tile_sums(x: Tile, scales: Scales, rows: Mixture, live: Bool[Array, "n"] | None) -> MixtureSums:
    """Eq. 9 over a tile of both models' x."""
    own = Ratios.of(x, rows.references, scales)
    d, of_p = _logs(own, rows)
    other = Pair(rows.weights.teacher[:, None], rows.weights.student[:, None])
    terms = [own.e_p * of_p, own.e_q * log_ratio(-d, other)]
    terms = terms if live is None else [jnp.where(live[None, :], x, 0.0) for x in terms]
    return MixtureSums(*row_sums(*terms))


def divergence(
    sums: MixtureSums, stats: KLStatistics, rows: Mixture, where: Bool[Array, "T"] | None
) -> Float[Array, "T"]:
    """Eq. 9, from sums over the whole vocabulary; rounding cannot make it negative, and rows left out are 0."""
    stats = counted(stats, where)
    of_p, of_q = rows.log_at_p + sums.of_p / stats.sum_p, sums.of_q / stats.sum_q
    jsd = jnp.maximum(rows.weights.student * of_p + rows.weights.teacher * of_q, 0.0)
    return jsd if where is None else jnp.where(where, jsd, 0.0)


class MixtureCoefficients(NamedTuple):
    """What eq. 10 needs of each token, with the row factor of eq. 5: dr = of_p·e^{u_p}·(t - t₀ - mean)."""

    mixture: Mixture
    of_p: Float[Array, "T"]
    mean: Float[Array, "T"]  # b

    @property
    def references(self) -> tuple[Array, Array, Array]:
        """`KLStatistics.references`."""
        return self.mixture.references


def coefficients(
    sums: MixtureSums,
    stats: KLStatistics,
    rows: Mixture,
    cotangent: Float[Array, "T"],
    factor: RowScale,
    live: Bool[Array, "T"] | None,
) -> MixtureCoefficients:
    """From sums over the whole vocabulary. Rows that are not ``live`` have no gradient, whatever they hold."""
    sum_p = counted(stats, live).sum_p
    of_p, mean = cotangent * factor * rows.weights.student / sum_p, sums.of_p / sum_p
    if live is not None:
        of_p, mean = (jnp.where(live, x, 0.0) for x in (of_p, mean))
    return MixtureCoefficients(rows, of_p, mean)


def dlogits(own: Ratios, rows: MixtureCoefficients) -> Float[Array, "T n"]:
    """Eq. 10 over a tile: the gradient in the student's raw products but for its cap."""
    _, of_p = _logs(own, rows.mixture)
    return own.e_p * rows.of_p[:, None] * (of_p - rows.mean[:, None])


def _logs(own: Ratios, rows: Mixture) -> tuple[Array, Array]:
    """The ln q - ln p, and the t - t₀ of eq. 9."""
    d = own.d + rows.log_sums[:, None]
    weights, reference = jax.tree.map(lambda per_token: per_token[:, None], (rows.weights, rows.at_p))
    return d, relative_log_ratio(d, own.distance, weights, reference)
