"""Eqs. 6 to 8: statistics of two heads over one vocabulary, their divergence and its gradient, tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _statistics
from lce_jax.mathematics._statistics import MASKED

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float

type Direction = Literal["forward", "reverse", "jsd"]  # as `lce_jax.linear_kl` has it
type RowScale = Float[Array, "T"] | float  # the k of eq. 0


class Pair[A](NamedTuple):
    """Something of both models."""

    student: A
    teacher: A

    def ordered(self, reverse: bool) -> tuple[A, A]:
        """That of p and that of q, in KL(p ‖ q)."""
        return (self.student, self.teacher) if reverse else (self.teacher, self.student)


class KLStatistics(NamedTuple):
    """Each token's statistics of both models over some columns, [T] each."""

    max_p: Float[Array, "T"]  # of x, not of the logits
    max_q: Float[Array, "T"]
    at_p: Float[Array, "T"]  # the x of q at the largest x of p: the r of eq. 6
    sum_p: Float[Array, "T"]
    sum_q: Float[Array, "T"]
    cross: Float[Array, "T"]  # the c of eq. 6

    @property
    def references(self) -> tuple[Array, Array, Array]:
        """The x that the sums are relative to."""
        return self.max_p, self.max_q, self.at_p

    @property
    def sums(self) -> tuple[Array, Array, Array]:
        """What is added up."""
        return self.sum_p, self.sum_q, self.cross


def no_columns(num_tokens: int, dtype: Any) -> KLStatistics:
    """The neutral element of a union."""
    lowest, zero = jnp.full((num_tokens,), MASKED, dtype), jnp.zeros((num_tokens,), dtype)
    return KLStatistics(lowest, lowest, lowest, zero, zero, zero)


def tile_statistics(
    x: tuple[Float[Array, "T n"], Float[Array, "T n"]],
    scales: tuple[RowScale, RowScale],
    live: Bool[Array, "n"] | None,
) -> KLStatistics:
    """Eqs. 1 and 6 over a tile of both models' x, p first; ``live`` masks padding columns."""

    def masked(values: Float[Array, "T n"]) -> Float[Array, "T n"]:
        return values if live is None else jnp.where(live[None, :], values, MASKED)

    max_p, max_q = (jnp.maximum(jnp.max(masked(own), axis=1), MASKED) for own in x)
    at_p = jnp.max(masked(jnp.where(x[0] == max_p[:, None], x[1], MASKED)), axis=1)
    u_p, u_q = (masked(shifted(*of_one)) for of_one in zip(x, (max_p, max_q), scales, strict=True))
    e_p, v_q = jnp.exp(u_p), masked(relative(x[1], at_p, scales[1]))
    return KLStatistics(max_p, max_q, at_p, *row_sums(e_p, jnp.exp(u_q), e_p * (u_p - v_q)))


def row_sums(*terms: Float[Array, "T n"]) -> tuple[Float[Array, "T"], ...]:
    """In one reduction, so that XLA stores nothing that several of them are made of."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return tuple(lax.reduce(terms, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (1,)))


def relative(x: Float[Array, "T n"], reference: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """The distance of logits from that at ``reference``: a difference of x before it is scaled."""
    return (x - reference[:, None]) * (scale if isinstance(scale, float | int) else scale[:, None])


def shifted(x: Float[Array, "T n"], highest: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """The u of eq. 1: at most 0, also where x is computed anew and rounded otherwise than for the maximum."""
    return jnp.clip(relative(x, highest, scale), MASKED, 0.0)


class RunningKL(NamedTuple):
    """A union that grows part by part, with what rounding has left out of its sums."""

    stats: KLStatistics
    lost: tuple[Array, Array, Array]

    @classmethod
    def start(cls, empty: KLStatistics) -> RunningKL:
        """The union of no parts."""
        return cls(empty, empty.sums)

    def add(self, part: KLStatistics, scales: tuple[RowScale, RowScale]) -> RunningKL:
        """Eqs. 2 and 7 of the union and one more part."""
        max_p, max_q = jnp.maximum(self.stats.max_p, part.max_p), jnp.maximum(self.stats.max_q, part.max_q)
        # r is that of the part with the largest x of p.
        at_p = (jnp.where(x.max_p == max_p, x.at_p, MASKED) for x in (self.stats, part))
        references = max_p, max_q, jnp.maximum(*at_p)
        of_lost = KLStatistics(*self.stats.references, *self.lost)
        old, new, lost = (_sums_relative_to(references, x, scales) for x in (self.stats, part, of_lost))
        sums, left_out = _statistics.compensated(old, new, lost)
        return RunningKL(KLStatistics(*references, *sums), left_out)

    def finish(self) -> KLStatistics:
        """The statistics of the union."""
        return KLStatistics(*self.stats.references, *jax.tree.map(jnp.add, self.stats.sums, self.lost))


def merge(parts: KLStatistics, scales: tuple[RowScale, RowScale]) -> KLStatistics:
    """Eqs. 2 and 7 over the leading axis: fields [N, T] in, [T] out, summed in the order of the axis."""
    max_p, max_q = jnp.max(parts.max_p, axis=0), jnp.max(parts.max_q, axis=0)
    references = max_p, max_q, jnp.max(jnp.where(parts.max_p == max_p[None], parts.at_p, MASKED), axis=0)
    beside = jax.tree.map(lambda x: x if isinstance(x, float | int) else x[None], (references, scales))
    return KLStatistics(*references, *(jnp.sum(x, axis=0) for x in _sums_relative_to(beside[0], parts, beside[1])))


def _sums_relative_to(
    references: tuple[Array, Array, Array], part: KLStatistics, scales: tuple[RowScale, RowScale]
) -> tuple[Array, Array, Array]:
    """The terms of eqs. 2 and 7 relative to the union's references; 0 for a part without columns."""
    d_p, d_q, d_r = map(_statistics.distance, part.references, references, (*scales, scales[1]))
    a_p = jnp.exp(d_p)
    return part.sum_p * a_p, part.sum_q * jnp.exp(d_q), (part.cross + (d_p - d_r) * part.sum_p) * a_p


def counted(stats: KLStatistics, live: Bool[Array, "T"] | None) -> KLStatistics:
    """The same, with statistics in the other rows for which every e^u is 0, and no number is NaN or infinite."""
    if live is None:
        return stats
    instead = (-MASKED, -MASKED, 0.0, 1.0, 1.0, 0.0)
    return KLStatistics(*(jnp.where(live, x, other) for x, other in zip(stats, instead, strict=True)))


def finish(stats: KLStatistics, scale_q: RowScale, where: Bool[Array, "T"] | None) -> Float[Array, "T"]:
    """Eq. 6, from statistics of the whole vocabulary; rounding cannot make it negative, and rows left out are 0."""
    stats = counted(stats, where)
    divergence = stats.cross / stats.sum_p + jnp.log(stats.sum_q / stats.sum_p)
    divergence = jnp.maximum(divergence + (stats.max_q - stats.at_p) * scale_q, 0.0)
    return divergence if where is None else jnp.where(where, divergence, 0.0)


class KLCoefficients(NamedTuple):
    """What eq. 8 needs of each token, with the row factor of eq. 5: dr = of_q·e^{u_q} - of_p·e^{u_p} (forward).

    Reverse: dr = of_p·e^{u_p}·(u_p - v_q - mean).
    """

    max_p: Float[Array, "T"]
    max_q: Float[Array, "T"]
    at_p: Float[Array, "T"]
    of_p: Float[Array, "T"]
    of_q: Float[Array, "T"]
    mean: Float[Array, "T"]  # c / s_p

    @property
    def references(self) -> tuple[Array, Array, Array]:
        """`KLStatistics.references`."""
        return self.max_p, self.max_q, self.at_p


def coefficients(
    stats: KLStatistics, cotangent: Float[Array, "T"], factor: RowScale, live: Bool[Array, "T"] | None
) -> KLCoefficients:
    """From the whole vocabulary's statistics. Rows that are not ``live`` have no gradient, whatever they hold."""
    stats, g = counted(stats, live), cotangent * factor
    g = g if live is None else jnp.where(live, g, 0.0)
    return KLCoefficients(*stats.references, g / stats.sum_p, g / stats.sum_q, stats.cross / stats.sum_p)


class Ratios(NamedTuple):
    """Both distributions over a tile, but for their sums, and how they lie to each other; p first."""

    e_p: Float[Array, "T n"]  # e^{u_p}, relative to the largest x of the whole vocabulary
    e_q: Float[Array, "T n"]
    d: Float[Array, "T n"]  # u_q - u_p
    distance: Float[Array, "T n"]  # v_q - u_p: 0 where the x of p is largest

    @classmethod
    def of(
        cls,
        x: tuple[Float[Array, "T n"], Float[Array, "T n"]],
        references: tuple[Array, Array, Array],
        scales: tuple[RowScale, RowScale],
    ) -> Ratios:
        """From a tile of both models' x, relative to `KLStatistics.references`."""
        max_p, max_q, at_p = references
        u_p, u_q = shifted(x[0], max_p, scales[0]), shifted(x[1], max_q, scales[1])
        return cls(jnp.exp(u_p), jnp.exp(u_q), u_q - u_p, relative(x[1], at_p, scales[1]) - u_p)


def dlogits(own: Ratios, rows: KLCoefficients, reverse: bool) -> Float[Array, "T n"]:
    """Eq. 8 over a tile: the gradient in the student's raw products but for its cap."""
    e_p = own.e_p * rows.of_p[:, None]
    if reverse:
        return e_p * (-own.distance - rows.mean[:, None])
    return own.e_q * rows.of_q[:, None] - e_p
