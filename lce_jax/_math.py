r"""The mathematics, once. Other modules cite the equations by number.

Logits of a token, from its raw products $r_v = h \cdot w_v$ (temperature $\tau$, scale $a$, softcap $c$):

    (0)  z = cap(a r) / τ,   cap(x) = c tanh(x / c)   or   cap(x) = x

and, with p = softmax(z):

    (1)  statistics of a set of columns:  m = max z,  u = z - m,  s = Σ e^u,  q = Σ u e^u,  t = z[label] if owned,
                                          and for a loss that smooths its labels, Σ z
    (2)  union of disjoint sets:          M = max mᵢ,  aᵢ = e^(mᵢ - M),  s = Σ sᵢ aᵢ,
                                          q = Σ (qᵢ + (mᵢ - M) sᵢ) aᵢ,  t = Σ tᵢ,  Σ z = Σᵢ Σ z
    (3)  results:                         lse = M + ln s,  logprob = (t - M) - ln s,  entropy = ln s - q / s,
                                          mean = Σ z / V
    (4)  gradient in the logits:          dz = 1_y g_lp + p (-g_lp + g_lse - g_ent (ln p + entropy))
                                             + g_mean / V
         and, as p = e^u / s,                = 1_y g_lp + g_mean / V + e^u / s · (g_lse - g_lp + g_ent (q / s - u))
                                             = 1_y target + uniform + e^u (constant + slope u)
    (5)  gradient in the raw products:    dr = dz · (a / τ) · (1 - tanh²(a r / c));   dh = dr W,  dW = drᵀ h

Why this shape: q is summed in the shifted variable u, so entropy never is the difference of two large numbers, and
both terms of (3) are non-negative. (2) is associative and serves tiles, chunks and shards alike. An empty set has
m = -1e30 (finite: 0 · inf would be NaN), s = q = t = 0, and (2) absorbs it exactly. (4) subtracts m and not lse: at
logits of 1e4 the rounding of lse alone would put an error of 1e-3 on every probability. The row factor a / τ of (5) is
folded into target, uniform, constant and slope, so the inner loop never sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options, Results, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # stands for -inf in a maximum; float32, and its difference to any real logit, stay finite


def transform_logits(
    raw: Float[Array, "T n"], options: Options, inverse_temperature: Float[Array, "T"] | None
) -> tuple[Float[Array, "T n"], Float[Array, "T n"] | None]:
    """Eq. 0: logits from raw products, and the derivative of the cap (None without one)."""
    z = raw if options.logit_scale == 1.0 else raw * options.logit_scale
    dcap = None
    if options.logit_softcap is not None:
        tanh = jnp.tanh(z * (1.0 / options.logit_softcap))
        z, dcap = tanh * options.logit_softcap, 1.0 - tanh * tanh
    if inverse_temperature is not None:
        z = z * inverse_temperature[:, None]
    return z, dcap


def live_columns(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Bool[Array, "n"] | None:
    """Which of the columns [start, start + size) are true vocabulary; None where all are."""
    return None if num_columns is None else start + jnp.arange(size, dtype=jnp.int32) < num_columns


def without_padding(weight: Float[Array, "V H"], live: Bool[Array, "V"] | None, options: Options) -> Array:
    """The weight with its padding zero: 0 times whatever the padding holds would not always be 0."""
    if live is None:
        return weight
    return jnp.where(jnp.expand_dims(live, options.hidden_dim), weight, jnp.zeros((), weight.dtype))


def tile_statistics(
    z: Float[Array, "T n"], targets: Int[Array, "T"], live: Bool[Array, "n"] | None, options: Options
) -> ShardStatistics:
    """Eq. 1 over a tile. ``targets`` are columns of this tile or lie outside [0, n); ``live`` masks padding columns."""
    n = z.shape[1]
    live = None if live is None else live[None, :]
    masked = z if live is None else jnp.where(live, z, MASKED)
    m = jnp.maximum(jnp.max(masked, axis=1), MASKED)
    u = masked - m[:, None]
    e = jnp.exp(u) if live is None else jnp.where(live, jnp.exp(u), 0.0)
    owned = (targets >= 0) & (targets < n)
    at_target = jnp.take_along_axis(z, jnp.where(owned, targets, 0)[:, None], axis=1)[:, 0]
    lowest = None
    if options.stats:
        lowest = jnp.min(z if live is None else jnp.where(live, z, -MASKED), axis=1)
    return ShardStatistics(
        max=m,
        sumexp=jnp.sum(e, axis=1),
        weighted=jnp.sum(u * e, axis=1) if options.entropy else None,
        target=jnp.where(owned, at_target, 0.0),
        min=lowest,
        total=jnp.sum(z if live is None else jnp.where(live, z, 0.0), axis=1) if options.mean_logit else None,
    )


def empty_statistics(num_tokens: int, dtype: jnp.dtype, options: Options) -> ShardStatistics:
    """The statistics of no columns at all: the neutral element of `merge`."""
    zero = jnp.zeros((num_tokens,), dtype)
    return ShardStatistics(
        max=jnp.full((num_tokens,), MASKED, dtype),
        sumexp=zero,
        weighted=zero if options.entropy else None,
        target=zero,
        min=jnp.full((num_tokens,), -MASKED, dtype) if options.stats else None,
        total=zero if options.mean_logit else None,
    )


def merge(parts: ShardStatistics) -> ShardStatistics:
    """Eq. 2 over the leading axis: fields [N, T] in, [T] out, summed in the order of the axis."""
    m = jnp.max(parts.max, axis=0)
    shift = parts.max - m[None]
    a = jnp.exp(shift)
    weighted = None
    if parts.weighted is not None:
        # A part without columns has shift = -1e30, s = q = 0: every product is an exact 0.
        weighted = jnp.sum((parts.weighted + shift * parts.sumexp) * a, axis=0)
    return ShardStatistics(
        max=m,
        sumexp=jnp.sum(parts.sumexp * a, axis=0),
        weighted=weighted,
        target=jnp.sum(parts.target, axis=0),
        min=None if parts.min is None else jnp.min(parts.min, axis=0),
        total=None if parts.total is None else jnp.sum(parts.total, axis=0),
    )


def finish(
    stats: ShardStatistics, in_vocab: Bool[Array, "T"], where: Bool[Array, "T"] | None, vocab_size: int
) -> Results:
    """Eq. 3, from statistics of the whole vocabulary; out-of-vocabulary logprobs and rows left out become 0."""
    # A row left out may have no statistics at all (s = 0): 1 stands in, so that no 0 / 0 is ever computed.
    sumexp = stats.sumexp if where is None else jnp.where(where, stats.sumexp, 1.0)
    log_sumexp = jnp.log(sumexp)
    results = Results(
        logprobs=jnp.where(in_vocab, (stats.target - stats.max) - log_sumexp, 0.0),
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
