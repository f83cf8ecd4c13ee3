"""Eqs. 6 to 10: statistics of two heads over one vocabulary, their divergences and the gradients, tile by tile.

What a forward may keep of a tile is two numbers of each column. With u relative to each head's largest x in the tile,
and v to the x of q where that of p is largest:

forward    the larger e of e^{u_p} and e^{u_q}, and t = u_q - u_p. The two are e^{-max(t, 0)} and e^{min(t, 0)} times e.
           Where the distributions are near each other, t is near 0 and rounds by a fraction of itself, so their
           difference, which is the gradient, is as exact as one rounding of it.
reverse    e^{u_p}, and r = v_q - u_p, which is small where p has its mass, also where q has almost none there
jsd        e^{u_p}, and t: its logarithm is bounded where q has almost nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._logprobs import expand_rows
from lce_jax.mathematics._statistics import MASKED, distance

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


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


def empty_statistics(num_tokens: int, dtype: Any) -> KLStatistics:
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
    u_p, u_q = (masked(shifted_logits(*of_one)) for of_one in zip(x, (max_p, max_q), scales, strict=True))
    e_p, v_q = jnp.exp(u_p), masked(relative_logits(x[1], at_p, scales[1]))
    return KLStatistics(max_p, max_q, at_p, *sum_rows(e_p, jnp.exp(u_q), e_p * (u_p - v_q)))


def sum_rows(*terms: Float[Array, "T n"]) -> tuple[Float[Array, "T"], ...]:
    """In one reduction, so that XLA stores nothing that several of them are made of."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return tuple(lax.reduce(terms, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (1,)))


def relative_logits(x: Float[Array, "T n"], reference: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """The distance of logits from that at ``reference``: a difference of x before it is scaled."""
    return (x - reference[:, None]) * (scale if isinstance(scale, float | int) else scale[:, None])


def shifted_logits(x: Float[Array, "T n"], highest: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """The u of eq. 1: at most 0, also where x is computed anew and rounded otherwise than for the maximum."""
    return jnp.clip(relative_logits(x, highest, scale), MASKED, 0.0)


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
        sums, left_out = _statistics.add_compensated(old, new, lost)
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


def fill_masked_rows(stats: KLStatistics, live: Bool[Array, "T"] | None) -> KLStatistics:
    """The same, with statistics in the other rows for which every e^u is 0, and no number is NaN or infinite."""
    if live is None:
        return stats
    instead = (-MASKED, -MASKED, 0.0, 1.0, 1.0, 0.0)
    return KLStatistics(*(jnp.where(live, x, other) for x, other in zip(stats, instead, strict=True)))


def finish(stats: KLStatistics, scale_q: RowScale, where: Bool[Array, "T"] | None) -> Float[Array, "T"]:
    """Eq. 6, from statistics of the whole vocabulary; rounding cannot make it negative, and rows left out are 0."""
    stats = fill_masked_rows(stats, where)
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
    stats, g = fill_masked_rows(stats, live), cotangent * factor
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
        u_p, u_q = shifted_logits(x[0], max_p, scales[0]), shifted_logits(x[1], max_q, scales[1])
        return cls(jnp.exp(u_p), jnp.exp(u_q), u_q - u_p, relative_logits(x[1], at_p, scales[1]) - u_p)


def dlogits(own: Ratios, rows: KLCoefficients, reverse: bool) -> Float[Array, "T n"]:
    """Eq. 8 over a tile: the gradient in the student's raw products but for its cap."""
    e_p = own.e_p * rows.of_p[:, None]
    if reverse:
        return e_p * (-own.distance - rows.mean[:, None])
    return own.e_q * rows.of_q[:, None] - e_p


MOST_DISTANCE = 80.0  # of two log-probabilities whose exponential is taken: e^80 lies within float32


class MixtureReference(NamedTuple):
    """What eq. 9's logarithms are relative to: those at another d, d₀."""

    ratio: Array | float  # e^{d₀}
    total: Array | float  # 1 - β + β e^{d₀}
    most: Array | float  # the d whose exponential is taken, so that the x below is at most e^MOST_DISTANCE

    @classmethod
    def at(cls, d: Array, weights: Pair[Array]) -> tuple[MixtureReference, Array]:
        """That at ``d``, and its own logarithm: the d₀ and t₀ of eq. 9."""
        ratio, log = jnp.exp(d), log_ratio(d, weights)
        most = MOST_DISTANCE - jnp.maximum(log, 0.0)
        return cls(ratio, weights.student + weights.teacher * ratio, most), log


EQUAL_MODELS = MixtureReference(1.0, 1.0, MOST_DISTANCE)  # d₀ = 0, where the logarithm is 0


def log_ratios(d: Array, weights: Pair[Array]) -> tuple[Array, Array]:
    """The ln(p / m) and ln(q / m) of m = (1 - β) p + β q, from d = ln q - ln p; the weights are 1 - β and β."""
    return log_ratio(d, weights), log_ratio(-d, Pair(weights.teacher, weights.student))


def log_ratio(d: Array, weights: Pair[Array]) -> Array:
    """The t of eq. 9, -ln(1 - β + β e^d)."""
    return relative_log_ratio(d, d, weights, EQUAL_MODELS)


def relative_log_ratio(d: Array, distance: Array, weights: Pair[Array], reference: MixtureReference) -> Array:
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


REFERENCES = 3
type References = tuple[Array, Array, Array]  # `KLStatistics.references`


class CachedRatios(NamedTuple):
    """Of a tile, or of all that are kept. In the dtypes that `dtypes` says."""

    e: Float[Array, "T n"]  # as `_logprobs.encode_exponentials` has it
    ratio: Float[Array, "T n"]  # t or r


def dtypes(dtype: jnp.dtype, direction: Direction, capped: bool) -> tuple[jnp.dtype, jnp.dtype]:
    """Of both numbers where gradients are multiplied in ``dtype``; ``capped``: the student's logits are.

    In a forward KL an error of t is one of the smaller of both probabilities, which is e^{-|t|} of the larger: beside
    bfloat16's 8 bits float16's 11 are enough. A cap's derivative asks for t itself where the student is the smaller.
    The other gradients have the log-ratio for a factor, less its mean, which may leave nothing of a large one.
    """
    if dtype.itemsize > 2:
        return dtype, dtype
    narrow = direction == "forward" and dtype == jnp.bfloat16 and not capped
    return dtype, jnp.dtype("float16" if narrow else "float32")


def encode_ratios(own: Ratios, kept: tuple[jnp.dtype, jnp.dtype], direction: Direction) -> CachedRatios:
    """Of ratios that are relative to the tile's own references, in the ``kept`` dtypes."""
    most = jnp.finfo(kept[1]).max.astype(own.d.dtype)
    e = jnp.maximum(own.e_p, own.e_q) if direction == "forward" else own.e_p
    ratio = own.distance if direction == "reverse" else own.d
    return CachedRatios(_logprobs.encode_exponentials(e, kept[0]), jnp.clip(ratio, -most, most).astype(kept[1]))


def decode_ratios(
    kept: CachedRatios,
    of_tile: References,
    of_rows: References,
    scales: tuple[RowScale, RowScale],
    direction: Direction,
) -> Ratios:
    """The ratios relative to the whole vocabulary's references, as far as the direction's gradient reads them."""
    dtype = of_tile[0].dtype
    (e, _), ratio = _logprobs.decode_exponentials(kept.e, dtype), kept.ratio.astype(dtype)
    down_p, down_q, down_r = map(distance, of_tile, of_rows, (*scales, scales[1]))
    down_p, down_q = jnp.minimum(down_p, 0.0), jnp.minimum(down_q, 0.0)
    e_p, e_q = e * jnp.exp(down_p)[:, None], e * jnp.exp(down_q)[:, None]
    if direction == "reverse":
        r = ratio + (down_r - down_p)[:, None]
        return Ratios(e_p, e_q, r, r)
    if direction == "forward":
        e_p, e_q = e_p * jnp.exp(-jnp.maximum(ratio, 0.0)), e_q * jnp.exp(jnp.minimum(ratio, 0.0))
    to_at_p = distance(of_tile[1], of_rows[2], scales[1])
    return Ratios(e_p, e_q, ratio + (down_q - down_p)[:, None], ratio + (to_at_p - down_p)[:, None])


def decode_student_x(
    kept: CachedRatios, of_tile: References, scales: tuple[RowScale, RowScale], direction: Direction
) -> Float[Array, "T n"]:
    """The student's capped x, from -1 to 1."""
    which = 1 if direction == "forward" else 0
    highest, scale = of_tile[which], scales[which]
    u = _logprobs.decode_exponentials(kept.e, highest.dtype)[1]
    if direction == "forward":
        u = u + jnp.minimum(kept.ratio.astype(highest.dtype), 0.0)
    return jnp.clip(highest[:, None] + u / expand_rows(_logprobs.bound_row_scale(scale)), -1.0, 1.0)


type Scales = tuple[RowScale, RowScale]
type Tile = tuple[Float[Array, "T n"], Float[Array, "T n"]]


class Mixture(NamedTuple):
    """What eq. 9 needs of each token, from the whole vocabulary's statistics, [T] each."""

    references: tuple[Array, Array, Array]  # `KLStatistics.references`
    log_sums: Float[Array, "T"]  # ln s_p - ln s_q
    weights: Pair[Float[Array, "T"]]  # 1 - β and β
    at_p: MixtureReference  # at the largest x of p, where u_p = v = 0
    log_at_p: Float[Array, "T"]  # the t₀ there


def mixture(
    stats: KLStatistics, scale_q: RowScale, weights: Pair[Float[Array, "T"]], live: Bool[Array, "T"] | None
) -> Mixture:
    """From the whole vocabulary's statistics. In rows that are not ``live``, p and q are 0."""
    stats = fill_masked_rows(stats, live)
    log_sums = jnp.log(stats.sum_p / stats.sum_q)
    at_p = jnp.minimum((stats.at_p - stats.max_q) * scale_q, 0.0) + log_sums
    return Mixture(stats.references, log_sums, weights, *MixtureReference.at(at_p, weights))


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
    return MixtureSums(*sum_rows(*terms))


def divergence(
    sums: MixtureSums, stats: KLStatistics, rows: Mixture, where: Bool[Array, "T"] | None
) -> Float[Array, "T"]:
    """Eq. 9, from sums over the whole vocabulary; rounding cannot make it negative, and rows left out are 0."""
    stats = fill_masked_rows(stats, where)
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


def mixture_coefficients(
    sums: MixtureSums,
    stats: KLStatistics,
    rows: Mixture,
    cotangent: Float[Array, "T"],
    factor: RowScale,
    live: Bool[Array, "T"] | None,
) -> MixtureCoefficients:
    """From sums over the whole vocabulary. Rows that are not ``live`` have no gradient, whatever they hold."""
    sum_p = fill_masked_rows(stats, live).sum_p
    of_p, mean = cotangent * factor * rows.weights.student / sum_p, sums.of_p / sum_p
    if live is not None:
        of_p, mean = (jnp.where(live, x, 0.0) for x in (of_p, mean))
    return MixtureCoefficients(rows, of_p, mean)


def mixture_dlogits(own: Ratios, rows: MixtureCoefficients) -> Float[Array, "T n"]:
    """Eq. 10 over a tile: the gradient in the student's raw products but for its cap."""
    _, of_p = _logs(own, rows.mixture)
    return own.e_p * rows.of_p[:, None] * (of_p - rows.mean[:, None])


def _logs(own: Ratios, rows: Mixture) -> tuple[Array, Array]:
    """The ln q - ln p, and the t - t₀ of eq. 9."""
    d = own.d + rows.log_sums[:, None]
    weights, reference = jax.tree.map(lambda per_token: per_token[:, None], (rows.weights, rows.at_p))
    return d, relative_log_ratio(d, own.distance, weights, reference)
