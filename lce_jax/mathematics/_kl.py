"""Eqs. 6 to 11: statistics of two heads over one vocabulary, their divergences and the gradients, tile by tile.

The forward may cache two numbers for each column of a tile. In the tile, u is relative to each head's largest x, and v
is relative to the x of q in the column where the x of p is largest:

forward    e, the larger of e^{u_p} and e^{u_q}, and t = u_q - u_p. Then e^{u_p} = e · e^{-max(t, 0)} and
           e^{u_q} = e · e^{min(t, 0)}. Where the two distributions are close, t is near 0 and its rounding error is a
           fraction of t. So the gradient, the difference of the distributions, has the error of one rounding.
reverse    e^{u_p} and r = v_q - u_p. r is small where p has its mass, even where q has almost no mass.
jsd, tv    e^{u_p} and t. The quantities computed from t are bounded even where q has almost no mass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._logprobs import expand_rows
from lce_jax.mathematics._statistics import MASKED, distance

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


type Direction = Literal["forward", "reverse", "jsd", "tv"]  # the ``direction`` of `lce_jax.linear_kl`
type RowScale = Float[Array, "T"] | float  # the k of eq. 0


class Pair[A](NamedTuple):
    """A value for each of the two models."""

    student: A
    teacher: A

    def ordered(self, reverse: bool) -> tuple[A, A]:
        """Returns the values of p and of q in KL(p ‖ q): p is the student if ``reverse``, else the teacher."""
        return (self.student, self.teacher) if reverse else (self.teacher, self.student)


class KLStatistics(NamedTuple):
    """Each token's statistics of both models over some columns, [T] each."""

    max_p: Float[Array, "T"]  # the largest x of p (eq. 0), which is not scaled to a logit
    max_q: Float[Array, "T"]
    at_p: Float[Array, "T"]  # the x of q at the largest x of p: the r of eq. 6
    sum_p: Float[Array, "T"]
    sum_q: Float[Array, "T"]
    cross: Float[Array, "T"]  # the c of eq. 6

    @property
    def references(self) -> tuple[Array, Array, Array]:
        """The values of x to which the sums are relative: max_p, max_q and at_p."""
        return self.max_p, self.max_q, self.at_p

    @property
    def sums(self) -> tuple[Array, Array, Array]:
        """The fields that are sums over columns."""
        return self.sum_p, self.sum_q, self.cross


def empty_statistics(num_tokens: int, dtype: Any) -> KLStatistics:
    """Returns the statistics of zero columns, the neutral element of `merge`."""
    lowest, zero = jnp.full((num_tokens,), MASKED, dtype), jnp.zeros((num_tokens,), dtype)
    return KLStatistics(lowest, lowest, lowest, zero, zero, zero)


def tile_statistics(
    x: tuple[Float[Array, "T n"], Float[Array, "T n"]],
    scales: tuple[RowScale, RowScale],
    unpadded: Bool[Array, "n"] | None,
) -> KLStatistics:
    """Computes eqs. 1 and 6 over a tile of both models' x, p's first. ``unpadded`` is False in padding columns."""

    def mask(values: Float[Array, "T n"]) -> Float[Array, "T n"]:
        return values if unpadded is None else jnp.where(unpadded[None, :], values, MASKED)

    max_p, max_q = (jnp.maximum(jnp.max(mask(one), axis=1), MASKED) for one in x)
    at_p = jnp.max(mask(jnp.where(x[0] == max_p[:, None], x[1], MASKED)), axis=1)
    u_p, u_q = (mask(shifted_logits(*one)) for one in zip(x, (max_p, max_q), scales, strict=True))
    e_p, v_q = jnp.exp(u_p), mask(relative_logits(x[1], at_p, scales[1]))
    return KLStatistics(max_p, max_q, at_p, *sum_rows(e_p, jnp.exp(u_q), e_p * (u_p - v_q)))


def sum_rows(*terms: Float[Array, "T n"]) -> tuple[Float[Array, "T"], ...]:
    """Sums each array over its columns in one reduction, so that XLA does not store what several of them share."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return tuple(lax.reduce(terms, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (1,)))


def relative_logits(x: Float[Array, "T n"], reference: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """Returns the logits minus the logit at ``reference``. The values of x are subtracted first, then scaled."""
    return (x - reference[:, None]) * (scale if isinstance(scale, float | int) else scale[:, None])


def shifted_logits(x: Float[Array, "T n"], highest: Float[Array, "T"], scale: RowScale) -> Float[Array, "T n"]:
    """Returns the u of eq. 1, clipped to at most 0.

    The clip matters where x is recomputed, because x may then be rounded differently than in the maximum.
    """
    return jnp.clip(relative_logits(x, highest, scale), MASKED, 0.0)


class RunningKL(NamedTuple):
    """The statistics of a growing union of parts, and the accumulated rounding errors of its sums."""

    stats: KLStatistics
    lost: tuple[Array, Array, Array]  # the rounding errors

    @classmethod
    def start(cls, empty: KLStatistics) -> RunningKL:
        """Returns the union of no parts."""
        return cls(empty, empty.sums)

    def add(self, part: KLStatistics, scales: tuple[RowScale, RowScale]) -> RunningKL:
        """Merges one more part into the union (eqs. 2 and 7)."""
        max_p, max_q = jnp.maximum(self.stats.max_p, part.max_p), jnp.maximum(self.stats.max_q, part.max_q)
        # The union's r is the r of the part with the largest x of p.
        at_p = (jnp.where(x.max_p == max_p, x.at_p, MASKED) for x in (self.stats, part))
        references = max_p, max_q, jnp.maximum(*at_p)
        errors = KLStatistics(*self.stats.references, *self.lost)
        old, new, lost = (_rescale_sums(references, x, scales) for x in (self.stats, part, errors))
        sums, lost = _statistics.add_compensated(old, new, lost)
        return RunningKL(KLStatistics(*references, *sums), lost)

    def finish(self) -> KLStatistics:
        """Returns the statistics of the union, with the rounding errors added."""
        return KLStatistics(*self.stats.references, *jax.tree.map(jnp.add, self.stats.sums, self.lost))


def merge(parts: KLStatistics, scales: tuple[RowScale, RowScale]) -> KLStatistics:
    """Merges N stacked parts by eqs. 2 and 7: fields [N, T] become [T], summed in the order of N."""
    max_p, max_q = jnp.max(parts.max_p, axis=0), jnp.max(parts.max_q, axis=0)
    references = max_p, max_q, jnp.max(jnp.where(parts.max_p == max_p[None], parts.at_p, MASKED), axis=0)
    stacked = jax.tree.map(lambda x: x if isinstance(x, float | int) else x[None], (references, scales))
    return KLStatistics(*references, *map(_statistics.sum_in_order, _rescale_sums(stacked[0], parts, stacked[1])))


def union(
    parts: Sequence[KLStatistics], scales: tuple[RowScale, RowScale], exp: Callable[[Array], Array] = jnp.exp
) -> KLStatistics:
    """Merges a few statistics, [T] each, by eqs. 2 and 7 in their order. Kernels use it, because it stacks no arrays.

    ``exp`` is `jnp.exp2` for statistics in base 2.
    """
    max_p, max_q = (functools.reduce(jnp.maximum, x) for x in ([y.max_p for y in parts], [y.max_q for y in parts]))
    at_p = functools.reduce(jnp.maximum, [jnp.where(x.max_p == max_p, x.at_p, MASKED) for x in parts])
    references = max_p, max_q, at_p
    moved = [_rescale_sums(references, x, scales, exp) for x in parts]
    return KLStatistics(*references, *(functools.reduce(jnp.add, terms) for terms in zip(*moved, strict=True)))


def _rescale_sums(
    references: tuple[Array, Array, Array],
    part: KLStatistics,
    scales: tuple[RowScale, RowScale],
    exp: Callable[[Array], Array] = jnp.exp,
) -> tuple[Array, Array, Array]:
    """Returns a part's terms in eqs. 2 and 7, relative to the union's references; 0 for a part without columns."""
    d_p, d_q, d_r = map(_statistics.distance, part.references, references, (*scales, scales[1]))
    a_p = exp(d_p)
    return part.sum_p * a_p, part.sum_q * exp(d_q), (part.cross + (d_p - d_r) * part.sum_p) * a_p


def fill_masked_rows(stats: KLStatistics, unmasked: Bool[Array, "T"] | None) -> KLStatistics:
    """Replaces the statistics of masked rows, so that every e^u there is 0 and no number is NaN or infinite."""
    if unmasked is None:
        return stats
    fill = (-MASKED, -MASKED, 0.0, 1.0, 1.0, 0.0)
    return KLStatistics(*(jnp.where(unmasked, x, other) for x, other in zip(stats, fill, strict=True)))


def finish(stats: KLStatistics, scale_q: RowScale, where: Bool[Array, "T"] | None) -> Float[Array, "T"]:
    """Computes the divergence of eq. 6 from statistics of the whole vocabulary.

    It is clipped to 0 from below, because rounding could make it negative. It is 0 in masked rows.
    """
    stats = fill_masked_rows(stats, where)
    divergence = stats.cross / stats.sum_p + jnp.log(stats.sum_q / stats.sum_p)
    divergence = jnp.maximum(divergence + (stats.max_q - stats.at_p) * scale_q, 0.0)
    return divergence if where is None else jnp.where(where, divergence, 0.0)


class KLCoefficients(NamedTuple):
    """Each token's coefficients in eq. 8. ``factor_p`` and ``factor_q`` include the row factor of eq. 5.

    Forward: dr = factor_q·e^{u_q} - factor_p·e^{u_p}. Reverse: dr = factor_p·e^{u_p}·(u_p - v_q - mean).
    """

    max_p: Float[Array, "T"]
    max_q: Float[Array, "T"]
    at_p: Float[Array, "T"]
    factor_p: Float[Array, "T"]
    factor_q: Float[Array, "T"]
    mean: Float[Array, "T"]  # c / s_p

    @property
    def references(self) -> tuple[Array, Array, Array]:
        """`KLStatistics.references`."""
        return self.max_p, self.max_q, self.at_p


def coefficients(
    stats: KLStatistics, cotangent: Float[Array, "T"], factor: RowScale, unmasked: Bool[Array, "T"] | None
) -> KLCoefficients:
    """Computes the coefficients of eq. 8 from statistics of the whole vocabulary. Masked rows have no gradient."""
    stats, g = fill_masked_rows(stats, unmasked), cotangent * factor
    g = g if unmasked is None else jnp.where(unmasked, g, 0.0)
    return KLCoefficients(*stats.references, g / stats.sum_p, g / stats.sum_q, stats.cross / stats.sum_p)


class Ratios(NamedTuple):
    """Both distributions over a tile, p first, not yet divided by their sums, and their log-ratios."""

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
        """Computes the ratios from a tile of both models' x, relative to `KLStatistics.references`."""
        max_p, max_q, at_p = references
        u_p, u_q = shifted_logits(x[0], max_p, scales[0]), shifted_logits(x[1], max_q, scales[1])
        return cls(jnp.exp(u_p), jnp.exp(u_q), u_q - u_p, relative_logits(x[1], at_p, scales[1]) - u_p)


def dlogits(ratios: Ratios, rows: KLCoefficients, reverse: bool) -> Float[Array, "T n"]:
    """Computes eq. 8 over a tile: the student's gradient, not yet multiplied by the derivative of its softcap."""
    e_p = ratios.e_p * rows.factor_p[:, None]
    if reverse:
        return e_p * (-ratios.distance - rows.mean[:, None])
    return ratios.e_q * rows.factor_q[:, None] - e_p


type Slope = Callable[[Array, Pair[Any]], Array]  # (d, weights) -> the t of eq. 9 or 11

MOST_DISTANCE = 80.0  # the largest difference of log-probabilities that is exponentiated: e^80 is finite in float32


class MixtureReference(NamedTuple):
    """The point d₀ to which the logarithms of eq. 9 are relative."""

    ratio: Array | float  # e^{d₀}
    total: Array | float  # 1 - β + β e^{d₀}
    most: Array | float  # the largest d that is exponentiated, so that x in `relative_log_ratio` is finite

    @classmethod
    def create(cls, d: Array, weights: Pair[Any], compute_slope: Slope) -> tuple[MixtureReference, Array]:
        """Returns the reference for d₀ = ``d``, and t₀."""
        ratio, slope = jnp.exp(d), compute_slope(d, weights)
        most = MOST_DISTANCE - jnp.maximum(slope, 0.0)
        return cls(ratio, weights.student + weights.teacher * ratio, most), slope


EQUAL_MODELS = MixtureReference(1.0, 1.0, MOST_DISTANCE)  # d₀ = 0: both models are equal there, and t₀ = 0


def log_ratios(d: Array, weights: Pair[Array]) -> tuple[Array, Array]:
    """Returns ln(p / m) and ln(q / m) for m = (1 - β) p + β q and d = ln q - ln p. ``weights`` are 1 - β and β."""
    return log_ratio(d, weights), log_ratio(-d, Pair(weights.teacher, weights.student))


def log_ratio(d: Array, weights: Pair[Array]) -> Array:
    """Returns the t of eq. 9, -ln(1 - β + β e^d)."""
    return relative_log_ratio(d, d, weights, EQUAL_MODELS)


def relative_log_ratio(d: Array, distance: Array, weights: Pair[Array], reference: MixtureReference) -> Array:
    """Returns the t - t₀ of eq. 9, -ln((1 - β + β e^d) / (1 - β + β e^{d₀})), from d and ``distance`` = d - d₀.

    Near t₀ the result is computed as -ln(1 + x) with x = β (e^d - e^{d₀}) / (1 - β + β e^{d₀}). The difference in x is
    accurate there because d - d₀ is exact. Where 1 + x is far below 1, the logarithm of the sum is computed instead.
    """
    own, other = weights  # 1 - β and β, or β and 1 - β
    e = jnp.exp(jnp.minimum(d, reference.most))
    growth = jnp.sign(distance) * -jnp.expm1(-jnp.abs(distance)) * jnp.maximum(e, reference.ratio)
    x = other / reference.total * growth
    small = x < -0.5
    log = jnp.log1p(jnp.where(small, reference.total / (own + other * e) - 1.0, x))
    return jnp.where(small, log, -log) - jnp.maximum(d - reference.most, 0.0)


REFERENCES = 3
type References = tuple[Array, Array, Array]  # `KLStatistics.references`


class CachedRatios(NamedTuple):
    """The two cached numbers for each column of one or all cached tiles, in the dtypes of `choose_dtypes`."""

    e: Float[Array, "T n"]  # encoded by `_logprobs.encode_exponentials`
    ratio: Float[Array, "T n"]  # t or r


def choose_dtypes(dtype: jnp.dtype, direction: Direction, capped: bool) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtypes of both cached numbers, for gradient products in ``dtype``.

    ``capped``: whether the student has a softcap. In a forward KL, an error of t changes only the smaller of the two
    probabilities, which is e^{-|t|} times the larger one. So t in float16, with 11 bits, is enough next to bfloat16's 8
    bits. But a softcap's derivative needs t itself where the student's probability is the smaller one. In the other
    directions the gradient has the factor (log-ratio - mean), which may cancel, so the log-ratio is in float32.
    """
    if dtype.itemsize > 2:
        return dtype, dtype
    narrow = direction == "forward" and dtype == jnp.bfloat16 and not capped
    return dtype, jnp.dtype("float16" if narrow else "float32")


def encode_ratios(ratios: Ratios, dtypes: tuple[jnp.dtype, jnp.dtype], direction: Direction) -> CachedRatios:
    """Encodes the ratios of a tile for the cache. The ratios are relative to the references of this tile alone."""
    most = jnp.finfo(dtypes[1]).max.astype(ratios.d.dtype)
    e = jnp.maximum(ratios.e_p, ratios.e_q) if direction == "forward" else ratios.e_p
    ratio = ratios.distance if direction == "reverse" else ratios.d
    return CachedRatios(_logprobs.encode_exponentials(e, dtypes[0]), jnp.clip(ratio, -most, most).astype(dtypes[1]))


def decode_ratios(
    cached: CachedRatios,
    tile_references: References,
    references: References,
    scales: tuple[RowScale, RowScale],
    direction: Direction,
) -> Ratios:
    """Returns the cached ratios relative to ``references``, those of the whole vocabulary.

    Fields that the direction's gradient does not read may be wrong.
    """
    dtype = tile_references[0].dtype
    (e, _), ratio = _logprobs.decode_exponentials(cached.e, dtype), cached.ratio.astype(dtype)
    down_p, down_q, down_r = map(distance, tile_references, references, (*scales, scales[1]))
    down_p, down_q = jnp.minimum(down_p, 0.0), jnp.minimum(down_q, 0.0)
    e_p, e_q = e * jnp.exp(down_p)[:, None], e * jnp.exp(down_q)[:, None]
    if direction == "reverse":
        r = ratio + (down_r - down_p)[:, None]
        return Ratios(e_p, e_q, r, r)
    if direction == "forward":
        e_p, e_q = e_p * jnp.exp(-jnp.maximum(ratio, 0.0)), e_q * jnp.exp(jnp.minimum(ratio, 0.0))
    to_at_p = distance(tile_references[1], references[2], scales[1])
    return Ratios(e_p, e_q, ratio + (down_q - down_p)[:, None], ratio + (to_at_p - down_p)[:, None])


def decode_student_x(
    cached: CachedRatios, tile_references: References, scales: tuple[RowScale, RowScale], direction: Direction
) -> Float[Array, "T n"]:
    """Computes the student's capped x, in [-1, 1], from the cache."""
    student = 1 if direction == "forward" else 0
    highest, scale = tile_references[student], scales[student]
    u = _logprobs.decode_exponentials(cached.e, highest.dtype)[1]
    if direction == "forward":
        u = u + jnp.minimum(cached.ratio.astype(highest.dtype), 0.0)
    return jnp.clip(highest[:, None] + u / expand_rows(_logprobs.bound_row_scale(scale)), -1.0, 1.0)


type Scales = tuple[RowScale, RowScale]
type Tile = tuple[Float[Array, "T n"], Float[Array, "T n"]]


class Mixture(NamedTuple):
    """Each token's numbers in eq. 9 or 11, [T] each, from statistics of the whole vocabulary."""

    references: tuple[Array, Array, Array]  # `KLStatistics.references`
    log_sums: Float[Array, "T"]  # ln s_p - ln s_q
    weights: Pair[Float[Array, "T"]]  # 1 - β and β
    at_p: MixtureReference  # d₀ at the largest x of p, where u_p = v = 0
    slope_at_p: Float[Array, "T"]  # t₀


def mixture(
    stats: KLStatistics,
    scale_q: RowScale,
    weights: Pair[Any],
    unmasked: Bool[Array, "T"] | None,
    compute_slope: Slope,
) -> Mixture:
    """Computes the numbers of eq. 9 or 11 from statistics of the whole vocabulary. In masked rows, p and q are 0.

    ``compute_slope`` is that of `CONTRASTS`, or of a kernel, whose language has no ``log1p``.
    """
    stats = fill_masked_rows(stats, unmasked)
    log_sums = jnp.log(stats.sum_p / stats.sum_q)
    at_p = jnp.minimum((stats.at_p - stats.max_q) * scale_q, 0.0) + log_sums
    return Mixture(stats.references, log_sums, weights, *MixtureReference.create(at_p, weights, compute_slope))


class MixtureSums(NamedTuple):
    """The sums of eq. 9 or 11 over some columns."""

    slopes: Float[Array, "T"]  # b s_p
    distances: Float[Array, "T"]  # a s_q

    @classmethod
    def merge(cls, parts: Float[Array, "N 2 T"]) -> MixtureSums:
        """Sums the stacked parts of N shards, in the order of N."""
        return cls(*_statistics.sum_in_order(parts))


class Contrast(NamedTuple):
    """What a direction computes in the pass that needs both normalisers: eq. 9 for "jsd", eq. 11 for "tv"."""

    slope: Slope
    relative_slopes: Callable[[Ratios, Array, Mixture], Array]  # t - t₀ in a tile, from d
    distances: Callable[[Ratios, Array, Mixture], Array]  # the terms of a s_q in a tile, from d
    combine: Callable[[Any, Any, Pair[Any]], Any]  # t₀ + b, a and the weights -> the divergence


def compare(d: Array, weights: Pair[Any] | None = None) -> Array:
    """Returns the t of eq. 11, the sign of p - q, which does not depend on ``weights``."""
    del weights
    return jnp.where(d > 0.0, -1.0, jnp.where(d < 0.0, 1.0, 0.0))


def _relative_log_ratios(ratios: Ratios, d: Array, rows: Mixture) -> Array:
    weights, reference = jax.tree.map(expand_rows, (rows.weights, rows.at_p))
    return relative_log_ratio(d, ratios.distance, weights, reference)


def _teacher_log_ratios(ratios: Ratios, d: Array, rows: Mixture) -> Array:
    return ratios.e_q * log_ratio(-d, Pair(rows.weights.teacher[:, None], rows.weights.student[:, None]))


def _differences(ratios: Ratios, d: Array, rows: Mixture) -> Array:
    """Returns s_q |p - q|, without cancellation where p and q are close."""
    p = ratios.e_p * jnp.exp(-rows.log_sums)[:, None]
    return jnp.maximum(p, ratios.e_q) * -jnp.expm1(-jnp.abs(d))


CONTRASTS: dict[Direction, Contrast] = {
    "jsd": Contrast(
        log_ratio, _relative_log_ratios, _teacher_log_ratios, lambda b, a, w: w.student * b + w.teacher * a
    ),
    "tv": Contrast(
        compare,
        lambda _, d, rows: compare(d) - rows.slope_at_p[:, None],
        _differences,
        lambda _, a, w: jnp.minimum(w.teacher * a, 1.0),
    ),
}


def tile_sums(
    x: Tile, scales: Scales, rows: Mixture, unpadded: Bool[Array, "n"] | None, contrast: Contrast
) -> MixtureSums:
    """Computes the sums of eq. 9 or 11 over a tile of both models' x."""
    ratios = Ratios.of(x, rows.references, scales)
    d = ratios.d + rows.log_sums[:, None]
    terms = [ratios.e_p * contrast.relative_slopes(ratios, d, rows), contrast.distances(ratios, d, rows)]
    terms = terms if unpadded is None else [jnp.where(unpadded[None, :], x, 0.0) for x in terms]
    return MixtureSums(*sum_rows(*terms))


def divergence(
    sums: MixtureSums, stats: KLStatistics, rows: Mixture, where: Bool[Array, "T"] | None, contrast: Contrast
) -> Float[Array, "T"]:
    """Computes the divergence of eq. 9 or 11 from sums over the whole vocabulary.

    It is clipped to 0 from below, because rounding could make it negative. It is 0 in masked rows.
    """
    stats = fill_masked_rows(stats, where)
    b, a = rows.slope_at_p + sums.slopes / stats.sum_p, sums.distances / stats.sum_q
    value = jnp.maximum(contrast.combine(b, a, rows.weights), 0.0)
    return value if where is None else jnp.where(where, value, 0.0)


class MixtureCoefficients(NamedTuple):
    """Each token's numbers in eq. 10: dr = factor_p·e^{u_p}·(t - t₀ - mean), with the row factor of eq. 5."""

    mixture: Mixture
    factor_p: Float[Array, "T"]
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
    unmasked: Bool[Array, "T"] | None,
) -> MixtureCoefficients:
    """Computes the coefficients of eq. 10 from sums over the whole vocabulary. Masked rows have no gradient."""
    sum_p = fill_masked_rows(stats, unmasked).sum_p
    factor_p, mean = cotangent * factor * rows.weights.student / sum_p, sums.slopes / sum_p
    if unmasked is not None:
        factor_p, mean = (jnp.where(unmasked, x, 0.0) for x in (factor_p, mean))
    return MixtureCoefficients(rows, factor_p, mean)


def mixture_dlogits(ratios: Ratios, rows: MixtureCoefficients, contrast: Contrast) -> Float[Array, "T n"]:
    """Computes eq. 10 over a tile: the student's gradient, not yet multiplied by the derivative of its softcap."""
    slopes = contrast.relative_slopes(ratios, ratios.d + rows.mixture.log_sums[:, None], rows.mixture)
    return ratios.e_p * rows.factor_p[:, None] * (slopes - rows.mean[:, None])
