r"""The mathematics, once. Other modules cite the equations by number.

Logits of a token, from its raw products $r_v = h \cdot w_v$ (temperature $\tau$, scale $a$, softcap $c$), are one
factor per row times what its columns differ in:

    (0)  z = k x,   x = r (-r for a < 0), k = |a| / τ;   with a softcap   x = tanh(a r / c), k = c / τ

and, with p = softmax(z):

    (1)  statistics of a set of columns:  m = max x,  u = (x - m) k,  s = Σ e^u,  q = Σ u e^u,  t = u[label] if owned,
                                          and for a loss that smooths its labels, Σ x
    (2)  union of disjoint sets:          M = max mᵢ,  dᵢ = (mᵢ - M) k,  aᵢ = e^dᵢ,  s = Σ sᵢ aᵢ,
                                          q = Σ (qᵢ + dᵢ sᵢ) aᵢ,  t = tᵢ + dᵢ of the owner,  Σ x = Σᵢ Σ x
    (3)  results:                         lse = k M + ln s,  logprob = t - ln s,  entropy = ln s - q / s,
                                          mean = k Σ x / V
    (4)  gradient in the logits:          dz = 1_y g_lp + p (-g_lp + g_lse - g_ent (ln p + entropy))
                                             + g_mean / V
         and, as p = e^u / s,                = 1_y g_lp + g_mean / V + e^u / s · (g_lse - g_lp + g_ent (q / s - u))
                                             = 1_y target + uniform + e^u (constant + slope u)
    (5)  gradient in the raw products:    dr = dz · (a / τ) · (1 - tanh²(a r / c));   dh = dr W,  dW = drᵀ h

Why this shape: q is summed in the shifted variable u, so entropy never is the difference of two large numbers, and
both terms of (3) are non-negative. (2) is associative and serves tiles, chunks and shards alike. An empty set has
m = -1e30 (finite: 0 · inf would be NaN), s = q = 0, t = -inf, and (2) absorbs it exactly. (4) subtracts m and not lse:
at logits of 1e4 the rounding of lse alone would put an error of 1e-3 on every probability. The row factor a / τ of (5)
is folded into target, uniform, constant and slope, so the inner loop never sees it.

Why (1) subtracts before it multiplies: so logprob <= 0 and entropy >= 0 in every rounding. The largest column has
x - m = 0 exactly, whatever a compiler fuses with the product, hence u = 0 and e^u = 1; every other u is negative. So
s >= 1 and ln s >= 0, q <= 0, t <= 0, and (2), where one dᵢ is exactly 0 and none positive, keeps all of that. Were m a
maximum of z = k x, a fused x k - m would not be 0 there: the product is rounded in one place and not in the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options, Results, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # stands for -inf in a maximum; float32, and its difference to any real logit, stay finite


def row_scale(options: Options, inverse_temperature: Float[Array, "T"] | None) -> Float[Array, "T"] | float:
    """The k of eq. 0."""
    scale = abs(options.logit_scale) if options.logit_softcap is None else options.logit_softcap
    return scale if inverse_temperature is None else scale * inverse_temperature


def unscaled_logits(raw: Float[Array, "T n"], options: Options) -> Float[Array, "T n"]:
    """The x of eq. 0, from raw products."""
    if options.logit_softcap is not None:
        return jnp.tanh(raw * (options.logit_scale / options.logit_softcap))
    return -raw if options.logit_scale < 0 else raw


def transform_logits(
    raw: Float[Array, "T n"], options: Options, inverse_temperature: Float[Array, "T"] | None
) -> tuple[Float[Array, "T n"], Float[Array, "T n"] | None]:
    """Eq. 0: logits from raw products, and the derivative of the cap (None without one)."""
    x = unscaled_logits(raw, options)
    dcap = None if options.logit_softcap is None else 1.0 - x * x
    return x * _along_rows(row_scale(options, inverse_temperature)), dcap


def _along_rows(scale: Float[Array, "T"] | float) -> Float[Array, "T 1"] | float:
    return scale if isinstance(scale, float | int) else scale[:, None]


def live_columns(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Bool[Array, "n"] | None:
    """Which of the columns [start, start + size) are true vocabulary; None where all are."""
    return None if num_columns is None else start + jnp.arange(size, dtype=jnp.int32) < num_columns


def without_padding(weight: Float[Array, "V H"], live: Bool[Array, "V"] | None, options: Options) -> Array:
    """The weight with its padding zero: 0 times whatever the padding holds would not always be 0."""
    if live is None:
        return weight
    return jnp.where(jnp.expand_dims(live, options.hidden_dim), weight, jnp.zeros((), weight.dtype))


def tile_statistics(
    x: Float[Array, "T n"],
    scale: Float[Array, "T"] | float,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    options: Options,
) -> ShardStatistics:
    """Eq. 1 over a tile. ``targets`` are columns of this tile or lie outside [0, n); ``live`` masks padding columns.

    The fields that `to_logits` multiplies are still those of x.
    """
    n = x.shape[1]
    x = lax.optimization_barrier(x)  # else XLA may compute it twice, in two roundings, for m and for u
    owned = (targets >= 0) & (targets < n)
    at_target = jnp.take_along_axis(x, jnp.where(owned, targets, 0)[:, None], axis=1)[:, 0]
    x, at_target = lax.optimization_barrier((x, at_target))  # or the tile would be kept until after the exponentials
    live = None if live is None else live[None, :]
    m = jnp.maximum(jnp.max(x if live is None else jnp.where(live, x, MASKED), axis=1), MASKED)
    u = (x - m[:, None]) * _along_rows(scale)
    u = u if live is None else jnp.where(live, u, MASKED)
    e = jnp.exp(u)
    lowest = None
    if options.stats:
        lowest = jnp.min(x if live is None else jnp.where(live, x, -MASKED), axis=1)
    return ShardStatistics(
        max=m,
        sumexp=jnp.sum(e, axis=1),
        weighted=jnp.sum(u * e, axis=1) if options.entropy else None,
        target=jnp.where(owned, (at_target - m) * scale, -jnp.inf),
        min=lowest,
        total=jnp.sum(x if live is None else jnp.where(live, x, 0.0), axis=1) if options.mean_logit else None,
    )


def to_logits(stats: ShardStatistics, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Statistics of x as those of the logits z = k x; the sums and the target are of the logits already."""
    empty = stats.sumexp == 0.0
    return stats._replace(
        max=jnp.where(empty, MASKED, stats.max * scale),
        min=None if stats.min is None else jnp.where(empty, -MASKED, stats.min * scale),
        total=None if stats.total is None else stats.total * scale,
    )


def empty_statistics(num_tokens: int, dtype: jnp.dtype, options: Options) -> ShardStatistics:
    """The statistics of no columns at all: the neutral element of `merge`."""
    zero = jnp.zeros((num_tokens,), dtype)
    return ShardStatistics(
        max=jnp.full((num_tokens,), MASKED, dtype),
        sumexp=zero,
        weighted=zero if options.entropy else None,
        target=jnp.full((num_tokens,), -jnp.inf, dtype),
        min=jnp.full((num_tokens,), -MASKED, dtype) if options.stats else None,
        total=zero if options.mean_logit else None,
    )


def merge(parts: ShardStatistics, scale: Float[Array, "T"] | float = 1.0) -> ShardStatistics:
    """Eq. 2 over the leading axis: fields [N, T] in, [T] out, summed in the order of the axis.

    ``scale`` is the k of statistics that `to_logits` has not seen; of logits it is 1.
    """
    m = jnp.max(parts.max, axis=0)
    shift = _shift(parts.max, m[None], scale if isinstance(scale, float | int) else scale[None])
    a = jnp.exp(shift)
    # The owner's maximum by itself: with a third sum over the shifts, XLA's GPU fusion keeps two more arrays [N, T].
    of_owner = jnp.max(jnp.where(parts.target > -jnp.inf, parts.max, MASKED), axis=0)
    return ShardStatistics(
        max=m,
        sumexp=jnp.sum(parts.sumexp * a, axis=0),
        weighted=None if parts.weighted is None else jnp.sum((parts.weighted + shift * parts.sumexp) * a, axis=0),
        target=jnp.max(parts.target, axis=0) + _shift(of_owner, m, scale),
        min=None if parts.min is None else jnp.min(parts.min, axis=0),
        total=None if parts.total is None else jnp.sum(parts.total, axis=0),
    )


def _shift(part: Array, m: Array, scale: Float[Array, "T"] | float) -> Array:
    """The dᵢ of eq. 2, exactly 0 where the part holds the maximum; of no columns -1e30, whatever the scale."""
    return jnp.maximum((part - m) * scale, MASKED)


class Running(NamedTuple):
    """A union that grows part by part, and what the additions to its sums have rounded away.

    Beside one part of 1, a thousand parts of a millionth would each be off by the same fraction of a rounding.
    """

    stats: ShardStatistics
    lost: tuple[Float[Array, "T"], Float[Array, "T"] | None]  # of s and of q

    @classmethod
    def start(cls, empty: ShardStatistics) -> Running:
        """The union of nothing."""
        return cls(empty, _sums(empty))

    def add(self, part: ShardStatistics, scale: Float[Array, "T"] | float) -> Running:
        """Eq. 2 of the union and one more part, [T] each."""
        m = jnp.maximum(self.stats.max, part.max)
        old, new = _relative_to(m, self.stats, scale), _relative_to(m, part, scale)
        lost = _relative_to(m, self.stats._replace(sumexp=self.lost[0], weighted=self.lost[1]), scale)
        pairs = [_sums(x) for x in (old, new, lost)]
        stats = merge(jax.tree.map(lambda a, b: jnp.stack([a, b]), old, new))  # of the same maximum by now
        sumexp, weighted = jax.tree.map(lambda a, b, _: a + b, *pairs)
        return Running(
            stats._replace(sumexp=sumexp, weighted=weighted),
            jax.tree.map(lambda a, b, c: c + _rounded_away(a, b), *pairs),
        )

    def finish(self) -> ShardStatistics:
        """The statistics of the union."""
        sumexp, weighted = jax.tree.map(jnp.add, _sums(self.stats), self.lost)
        return self.stats._replace(sumexp=sumexp, weighted=weighted)


def _sums(stats: ShardStatistics) -> tuple[Array, Array | None]:
    return stats.sumexp, stats.weighted


def _relative_to(m: Array, part: ShardStatistics, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """The terms of eq. 2 for the union's maximum ``m``: of no columns, every product with s = q = 0 is an exact 0."""
    shift = _shift(part.max, m, scale)
    a = jnp.exp(shift)
    return part._replace(
        max=m,
        sumexp=part.sumexp * a,
        weighted=None if part.weighted is None else (part.weighted + shift * part.sumexp) * a,
        target=part.target + shift,
    )


def _rounded_away(a: Array, b: Array) -> Array:
    """What the rounding of a + b leaves out (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


def finish(
    stats: ShardStatistics, in_vocab: Bool[Array, "T"], where: Bool[Array, "T"] | None, vocab_size: int
) -> Results:
    """Eq. 3, from statistics of the whole vocabulary; out-of-vocabulary logprobs and rows left out become 0."""
    # A row left out may have no statistics at all (s = 0): 1 stands in, so that no 0 / 0 is ever computed.
    sumexp = stats.sumexp if where is None else jnp.where(where, stats.sumexp, 1.0)
    log_sumexp = jnp.log(sumexp)
    results = Results(
        logprobs=jnp.where(in_vocab, stats.target - log_sumexp, 0.0),
        entropy=None if stats.weighted is None else log_sumexp - stats.weighted / sumexp,
        lse=stats.max + log_sumexp,
        max_logit=None if stats.min is None else stats.max,
        min_logit=stats.min,
        mean_logit=None if stats.total is None else stats.total / vocab_size,
    )
    return results if where is None else jax.tree.map(lambda x: jnp.where(where, x, 0.0), results)


def row_coefficients(
    stats: ShardStatistics,
    cotangent: Results,
    where: Bool[Array, "T"] | None,
    inverse_temperature: Float[Array, "T"] | None,
    options: Options,
    vocab_size: int,
) -> RowCoefficients:
    """Eq. 4 and the row factor of eq. 5, from the whole vocabulary's statistics and the cotangents of the results."""
    factor = options.logit_scale if inverse_temperature is None else options.logit_scale * inverse_temperature
    sumexp = stats.sumexp if where is None else jnp.where(where, stats.sumexp, 1.0)
    constant, slope, uniform = cotangent.lse - cotangent.logprobs, None, None
    if stats.weighted is not None and cotangent.entropy is not None:
        constant = constant + cotangent.entropy * (stats.weighted / sumexp)
        slope = -cotangent.entropy / sumexp * factor
    if cotangent.mean_logit is not None:
        uniform = cotangent.mean_logit / vocab_size * factor
    rows = RowCoefficients(stats.max, cotangent.logprobs * factor, constant / sumexp * factor, slope, uniform)
    return rows if where is None else jax.tree.map(lambda x: jnp.where(where, x, 0.0), rows)


def dlogits(
    z: Float[Array, "T n"],
    dcap: Float[Array, "T n"] | None,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
) -> Float[Array, "T n"]:
    """Eqs. 4 and 5 over a tile: the gradient in the raw products."""
    u = z - rows.shift[:, None]
    slope = 0.0 if rows.slope is None else rows.slope[:, None] * u
    d = jnp.exp(u) * (rows.constant[:, None] + slope)
    columns = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    d = jnp.where(columns == targets[:, None], d + rows.target[:, None], d)
    if rows.uniform is not None:
        d = d + rows.uniform[:, None]
    if dcap is not None:
        d = d * dcap
    return d if live is None else jnp.where(live[None, :], d, 0.0)
