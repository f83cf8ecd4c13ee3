r"""The equations, each written once. Other modules cite them by number.

A token has the raw products $r_v = h \cdot w_v + b_v$ (without a bias, $b = 0$), the temperature $\tau$, the scale $a$
and the softcap $c$. Its logits are one factor k per row times a value x per column:

    (0)  z = k x,   x = r (-r for a < 0), k = |a| / τ;   with a softcap   x = tanh(a r / c), k = c / τ

and, with p = softmax(z):

    (1)  statistics of a set of columns:  m = max x,  u = (x - m) k,  s = Σ e^u,  q = Σ u e^u,  t = u[label] if the set
                                          holds it; on request Σ e^2u, Σ x, and x_c of each candidate c in the set
    (2)  union of disjoint sets:          M = max mᵢ,  dᵢ = (mᵢ - M) k,  aᵢ = e^dᵢ,  s = Σ sᵢ aᵢ,
                                          q = Σ (qᵢ + dᵢ sᵢ) aᵢ,  t = tᵢ + dᵢ of the set with the label,  Σ x = Σᵢ Σ x,
                                          x_c = max x_cᵢ, -inf in a set without c,  Σ e^2u = Σᵢ aᵢ² Σ e^2u
    (3)  results:                         lse = k M + ln s,  logprob = t - ln s,  entropy = ln s - q / s,
                                          mean = k Σ x / V,  logprob_c = min((x_c - M) k, 0) - ln s,  Σ p² = Σ e^2u / s²
    (4)  gradient in the logits:          dz = 1_y g_lp + p (-g_lp + g_lse - g_ent (ln p + entropy))
                                             + g_mean / V + Σ_c g_c (1_c - p)
         and, as p = e^u / s,                = 1_y g_lp + g_mean / V + Σ_c 1_c g_c
                                               + e^u / s · (g_lse - g_lp - Σ_c g_c + g_ent (q / s - u))
                                             = uniform + Σ_c 1_c g_c + (target at the label, where u = t,
                                                                        elsewhere e^u (constant + slope u))
    (5)  gradient in the raw products:    dr = dz · (a / τ) · (1 - tanh²(a r / c));   dh = dr W,  dW = drᵀ h,  db = Σ dr

Why the equations have this form: q is summed in the shifted variable u, so the entropy is never the difference of two
large numbers, and both of its terms in (3) are non-negative. (2) is associative, so it serves tiles, chunks and shards.
An empty set has m = -1e30, s = q = 0 and t = -inf, and (2) absorbs it exactly; m is finite because 0 · inf is NaN. (4)
subtracts m and not lse: at logits of 1e4, the rounding of lse alone would put an error of 1e-3 on every probability.
The row factor a / τ of (5) is part of target, uniform, constant and slope, so the inner loop does not multiply by it.
The label's 1 - tanh² is part of target; its tanh is m + t / k.

Why m, min, Σ x and x_c stay in the units of x, from the first tile to (3) and (4): the product k M is rounded. A k M of
1e4 is off by up to 5e-4, and z - k M would carry that error into the exponent of every probability. (x - M) k has only
the errors of x. So k multiplies differences, in both passes, over tiles and over shards. k multiplies M only in lse.

Why the label has its own target in (4): where p(y) is near 1, g_lp (1 - p) is a small difference of nearly equal
numbers. The forward's t and s give this difference as g_lp (s - e^t) / s, which is exactly 0 where s is 1. A u that the
backward recomputes would have to equal t to the last bit, but another algorithm for the product does not give the same
bits. For the same reason a recomputed u above 0 is set to 0: at k = 1e8 the rounding of x could make e^u infinite in
float32, and a row with a cotangent of 0 would get 0 · inf.

Why (1) subtracts before it multiplies: then logprob <= 0 and entropy >= 0 hold with any rounding. The largest column
has x - m = 0 exactly, whatever a compiler fuses with the product. So its u is 0 and its e^u is 1, and every other u is
negative. Hence s >= 1, ln s >= 0, q <= 0 and t <= 0. (2) preserves all of this, because one dᵢ is exactly 0 and none is
positive. And t is exactly 0 if the label is a largest column. If m were the maximum of z = k x, a fused x k - m would
not be 0 there, because the product is rounded in m but not in the fused term. Statistics hold x_c and not the
candidate's u, because an implementation may compute x_c outside the tiles. So (3) sets a candidate's u above 0 to 0. No
u is below -1e30, and (4) computes u e^u first, because slope u alone may overflow where e^u is 0.

For two heads over one vocabulary, with probabilities p and q, and with m, k, u, s and d of (1) and (2) for each head:

    (6)  divergence:                      r = x_q where x_p is largest,  v = (x_q - r) k_q,  c = Σ e^{u_p} (u_p - v),
                                          KL(p ‖ q) = c / s_p + ln(s_q / s_p) + (m_q - r) k_q
    (7)  union of disjoint sets:          c = Σ (cᵢ + (d_pᵢ - (rᵢ - r) k_q) s_pᵢ) a_pᵢ,  r = rᵢ of the largest m_p
    (8)  gradient in the student's logits, if it is q (forward):  dz = g (q - p)
                                           if it is p (reverse):  dz = g p (u_p - v - c / s_p)

For the mixture m = (1 - β) p + β q of a student's p and its teacher's q, with d = ln q - ln p, and d₀ the d where p is
largest:

    (9)  generalised Jensen-Shannon:      t = ln(p / m) = -ln(1 - β + β e^d),   d - d₀ = v - u_p,
                                          t - t₀ = -ln(1 + β (e^d - e^{d₀}) / (1 - β + β e^{d₀})),   b = Σ p (t - t₀),
                                          a = KL(q ‖ m) = Σ q (d + t),   JSD = (1 - β) (t₀ + b) + β a
    (10) gradient in the student's logits:                            dz = g (1 - β) p (t - t₀ - b)
    (11) total variation, with β = 1/2 in (10):   t = sign(p - q) = -sign(d),   t₀ is that of d₀,   b = Σ p (t - t₀),
                                                  a = Σ |p - q| = Σ max(p, q) (1 - e^{-|d|}),   TV = a / 2

(6) holds because ln p = u_p - ln s_p and ln q = v - (m_q - r) k_q - ln s_q. (6) contains only differences of logits, so
it does not matter how far apart the logits of the two models are. Because v is relative to r, a nearly one-hot p has a
c near 0, whatever the q of that column is, so no large numbers cancel in (8). None cancel in (10), because its t is
relative to t₀. (9) and (11) need both normalisers first, so they take a second pass over the vocabulary.

With a floor f, the distribution consists of the tokens {v : z_v >= f} and the label. The comparison is in the units of
x (eq. 0), x < f / k. So a column costs one comparison, and the rounding of k x does not matter. A logit that is NaN is
not below any floor, so it still reaches the results.

A forward may cache e^u of a tile, relative to this tile's maximum, in the dtype of the gradient products. The relative
error of the cached value is one rounding, like that of the gradient. Masked and padded columns hold exactly 0, so their
gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._statistics import MASKED, SUMS, distance, empty_statistics, expand_like
from lce_jax.types import scalars
from lce_jax.types._types import Call, LogprobOutput, Operands, Results, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


SATURATED = 20.0  # at this value, 1 - tanh is less than half a unit in the last place, even in float64


def softcap_tanh(y: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Computes tanh. Above 1 on a CPU, its error is 1 unit in the last place, and that of XLA's tanh is up to 4.7."""
    a = jnp.minimum(jnp.abs(y), SATURATED)  # keeps e^2a and its derivative finite
    near_one = 1.0 - 2.0 / (jnp.exp(2.0 * a) + 1.0)
    return jnp.where(a < 1.0, jnp.tanh(y), jnp.where(y < 0, -near_one, near_one))


def cap_derivative(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns the 1 - tanh² of eq. 5 from x = tanh. Near 1, 1 - x is exact, but x² would be rounded."""
    return (1.0 - x) * (1.0 + x)


def compute_row_scale(call: Call, inverse_temperature: Float[Array, "T"] | None) -> Float[Array, "T"] | float:
    """Returns the k of eq. 0."""
    scale = abs(call.logit_scale) if call.logit_softcap is None else call.logit_softcap
    return scale if inverse_temperature is None else scale * inverse_temperature


def compute_row_factor(call: Call, inverse_temperature: Float[Array, "T"] | None) -> Float[Array, "T"] | float:
    """Returns the row factor a / τ of eq. 5. A traced scale is already part of ``inverse_temperature``."""
    return call.logit_scale if inverse_temperature is None else call.logit_scale * inverse_temperature


def unscaled_logits(
    raw: Float[Array, "T n"],
    call: Call,
    raw_scale: Float[Array, "T"] | None = None,
    tanh: Callable[[Array], Array] = softcap_tanh,
) -> Float[Array, "T n"]:
    """Computes the x of eq. 0 from raw products. If a or c is traced, ``raw_scale`` is a / c, or a's sign without c."""
    if call.logit_softcap is not None:
        scale = call.logit_scale / call.logit_softcap if raw_scale is None else raw_scale
        return tanh(raw * expand_rows(scale))
    if raw_scale is not None:
        return raw * expand_rows(raw_scale)
    return -raw if call.logit_scale < 0 else raw


def transform_logits(
    raw: Float[Array, "T n"],
    call: Call,
    inverse_temperature: Float[Array, "T"] | None,
    raw_scale: Float[Array, "T"] | None = None,
) -> tuple[Float[Array, "T n"], Float[Array, "T n"] | None]:
    """Computes the logits of eq. 0 from raw products, and the derivative of the softcap (None without a softcap)."""
    x = unscaled_logits(raw, call, raw_scale)
    dcap = None if call.logit_softcap is None else cap_derivative(x)
    return x * expand_rows(compute_row_scale(call, inverse_temperature)), dcap


def expand_rows(per_row: Float[Array, "T"] | float) -> Float[Array, "T 1"] | float:
    """Reshapes one value per row, [T], to [T, 1], which broadcasts with [T, n]."""
    return per_row if isinstance(per_row, float | int) else per_row[:, None]


def tile_statistics(
    x: Float[Array, "T n"],
    row_scale: Float[Array, "T"] | float,
    targets: Int[Array, "T"],
    unpadded: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
    floor: Float[Array, "T"] | None = None,
) -> tuple[ShardStatistics, Float[Array, "T n"]]:
    """Computes eq. 1 over a tile. It also returns the tile's e^u, which is 0 in columns that do not count.

    ``targets`` and ``candidates`` are columns of this tile, or lie outside [0, n). ``unpadded`` is False in padding
    columns. ``floor`` is in the units of x.
    """
    n = x.shape[1]
    x = lax.optimization_barrier(x)  # otherwise XLA may compute x twice, for m and for u, and round it differently
    owned = (targets >= 0) & (targets < n)
    at_target = jnp.take_along_axis(x, jnp.where(owned, targets, 0)[:, None], axis=1)[:, 0]
    at_candidates = None if candidates is None else take_columns(x, candidates)
    # Without this barrier, XLA would keep the tile in memory until after the exponentials.
    x, at_target, at_candidates = lax.optimization_barrier((x, at_target, at_candidates))
    counts = counted_columns(x, targets, unpadded, floor)
    m = jnp.maximum(jnp.max(x if counts is None else jnp.where(counts, x, MASKED), axis=1), MASKED)
    u = distance(x, m[:, None], expand_rows(row_scale))
    u = u if counts is None else jnp.where(counts, u, MASKED)
    e = jnp.exp(u)
    lowest = support = None
    if call.stats:
        lowest = jnp.min(x if counts is None else jnp.where(counts, x, -MASKED), axis=1)
    if call.stats and counts is not None and floor is not None:
        support = jnp.sum(jnp.where(counts, jnp.ones((), x.dtype), 0.0), axis=1)
    fields = call.statistics
    sums: Any = {name: jnp.sum(one.term(u, e), axis=1) if name in fields else None for name, one in SUMS.items()}
    stats = ShardStatistics(
        max=m,
        **sums,
        target=jnp.where(owned, distance(at_target, m, row_scale), -jnp.inf),
        min=lowest,
        total=jnp.sum(x if counts is None else jnp.where(counts, x, 0.0), axis=1) if call.mean_logit else None,
        candidates=at_candidates,
        support=support,
    )
    return stats, e


def finish(
    stats: ShardStatistics,
    row_scale: Float[Array, "T"] | float,
    labels: Int[Array, "T"],
    where: Bool[Array, "T"] | None,
    vocab_size: int,
    dropped_mass: Float[Array, "T"] | None = None,
    per_token: Callable[..., Any] = lambda function, *operands: function(*operands),
) -> Results:
    """Computes the results of eq. 3 from statistics of the whole vocabulary.

    The logprob of a label out of vocabulary (-1) is 0, and so is every result of a masked row. ``row_scale`` is the k
    of eq. 0. ``per_token`` runs `token_results`, for example with the arithmetic of a kernel.
    """
    # A masked row may have s = 0. Here such an s becomes 1, so that 0 / 0 is never computed.
    stats = stats if where is None else stats._replace(sumexp=jnp.where(where, stats.sumexp, 1.0))
    is_nan, one = jnp.isnan(stats.sumexp), jnp.ones_like(stats.sumexp)
    at_largest = (labels >= 0) & (stats.target == 0.0) & ~is_nan
    read = stats._replace(min=None, total=None, candidates=None, support=None)
    outputs, candidates = per_token(token_results, read, row_scale, labels), None
    if stats.candidates is not None:
        highest, log_sumexp = stats.max[:, None], jnp.log(stats.sumexp)[:, None]
        candidates = candidate_logprobs(stats.candidates, highest, expand_rows(row_scale), log_sumexp)
    outputs = outputs._replace(
        # XLA's maximum and minimum of a row may lose a NaN, but its sum does not.
        max_logit=None if stats.min is None else jnp.where(is_nan, stats.sumexp, stats.max * row_scale),
        min_logit=None if stats.min is None else jnp.where(is_nan, stats.sumexp, stats.min * row_scale),
        correct=None if stats.min is None else jnp.where(at_largest, one, 0.0),
        candidate_logprobs=candidates,
        dropped_mass=dropped_mass,
        support=stats.support,
    )
    results = Results(outputs, mean_logit=None if stats.total is None else stats.total * row_scale / vocab_size)
    return results if where is None else jax.tree.map(lambda x: jnp.where(expand_like(where, x), x, 0.0), results)


def token_results(
    stats: ShardStatistics, row_scale: Float[Array, "T"] | float, labels: Int[Array, "T"]
) -> LogprobOutput:
    """Computes the results of eq. 3 that need a logarithm or a quotient.

    Only for lse is the maximum multiplied by the k of eq. 0.
    """
    log_sumexp = jnp.log(stats.sumexp)
    return LogprobOutput(
        logprobs=jnp.where(labels >= 0, stats.target - log_sumexp, 0.0),
        entropy=None if stats.weighted is None else log_sumexp - stats.weighted / stats.sumexp,  # type: ignore[arg-type]
        lse=stats.max * row_scale + log_sumexp,
        sum_p_squared=None if stats.squares is None else stats.squares / stats.sumexp / stats.sumexp,
    )


def empty_results(num_tokens: int, dtype: jnp.dtype, call: Call) -> Results:
    """Returns the results for a vocabulary without columns, in the shapes and dtypes of the call's results."""
    stats, labels = empty_statistics(num_tokens, dtype, call), jnp.full((num_tokens,), -1, jnp.int32)
    return finish(stats, 1.0, labels, None, 1, stats.sumexp if call.reports_dropped_mass else None)


def row_coefficients(
    stats: ShardStatistics,
    cotangent: Results,
    row_scale: Float[Array, "T"] | float,
    factor: Float[Array, "T"] | float,
    where: Bool[Array, "T"] | None,
    call: Call,
    vocab_size: int,
    candidate_cotangent: Float[Array, "T"] | None = None,
) -> RowCoefficients:
    """Computes the coefficients of eq. 4, times the row factor of eq. 5.

    ``stats`` are statistics of the whole vocabulary. ``row_scale`` is the k of eq. 0. If the statistics have no
    candidates, ``candidate_cotangent`` is the Σ g_c of eq. 4.
    """
    sumexp = stats.sumexp if where is None else jnp.where(where, stats.sumexp, 1.0)
    g = cotangent.outputs
    rest, slope, uniform, candidates = g.lse, None, None, None  # rest: the factor of p in eq. 4, without g_lp
    t = jnp.maximum(stats.target, MASKED)
    at_label = jnp.exp(t)
    if stats.weighted is not None and g.entropy is not None:
        rest = rest + g.entropy * (stats.weighted / sumexp)
        slope = -g.entropy / sumexp
    if cotangent.mean_logit is not None:
        uniform = cotangent.mean_logit / vocab_size * factor
    if stats.candidates is not None and g.candidate_logprobs is not None:
        dcap = None if call.logit_softcap is None else cap_derivative
        terms, candidates = candidate_terms(stats.candidates, g.candidate_logprobs, expand_rows(factor), dcap)
        candidate_cotangent = jnp.sum(terms, axis=1)
    if candidate_cotangent is not None:
        rest = rest - candidate_cotangent
    target = g.logprobs * ((sumexp - at_label) / sumexp) + at_label * (rest / sumexp)
    target = target if slope is None else target + slope * (t * at_label)
    if call.logit_softcap is not None:
        target = target * cap_derivative(stats.max + t / row_scale)
    constant = (rest - g.logprobs) / sumexp * factor
    slope = None if slope is None else slope * factor
    at_candidates = None if candidates is None else stats.candidates
    rows = RowCoefficients(stats.max, target * factor, constant, slope, uniform, candidates, at_candidates)
    return rows if where is None else jax.tree.map(lambda x: jnp.where(expand_like(where, x), x, 0.0), rows)


def unscaled_floor(floor: Float[Array, "T"], row_scale: Float[Array, "T"] | float) -> Float[Array, "T"]:
    """Returns the floor in the units of x. ``row_scale`` is the k of eq. 0.

    With k = 0 every logit is 0, and x is compared with floor / 0, which is -inf, inf or NaN.
    """
    return floor / row_scale


def unpadded_columns(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Bool[Array, "n"] | None:
    """Returns which of the columns [start, start + size) are not padding; None if there is no padding."""
    return None if num_columns is None else start + jnp.arange(size, dtype=jnp.int32) < num_columns


def zero_padding(weight: Float[Array, "V H"], unpadded: Bool[Array, "V"] | None, call: Call) -> Array:
    """Sets the weight's padding to zero, because 0 times NaN or inf would be NaN."""
    if unpadded is None:
        return weight
    return jnp.where(jnp.expand_dims(unpadded, call.hidden_dim), weight, jnp.zeros((), weight.dtype))


def counted_columns(
    x: Float[Array, "T n"],
    targets: Int[Array, "T"],
    unpadded: Bool[Array, "n"] | None,
    floor: Float[Array, "T"] | None,
) -> Bool[Array, "T n"] | Bool[Array, "1 n"] | None:
    """Returns which of a tile's columns count; None if all do. The label's column counts even below the floor."""
    if floor is None:
        return None if unpadded is None else unpadded[None, :]
    counts = ~(x < floor[:, None]) | (lax.broadcasted_iota(jnp.int32, x.shape, 1) == targets[:, None])
    return counts if unpadded is None else counts & unpadded[None, :]


def exclude_empty_rows(where: Bool[Array, "T"] | None, sumexp: Float[Array, "T"]) -> Bool[Array, "T"]:
    """Returns ``where`` without the rows whose distribution has no token.

    In a row without a token, the label is out of vocabulary and all logits are below the floor. Only such rows have a
    sum of 0. A row whose sum is NaN remains in the result.
    """
    return sumexp != 0 if where is None else where & (sumexp != 0)


# A temperature below this value counts as this value. So products with the inverse temperature are finite in float32,
# even in the kernels' padding.
SMALLEST = 1e-20


def invert_temperature(temperature: Float[Array, "T"]) -> Float[Array, "T"]:
    """Returns 1 / τ, or 1 where τ is not a valid temperature."""
    return 1.0 / jnp.where(scalars.is_temperature(temperature), jnp.maximum(temperature, SMALLEST), 1.0)


def zero_gradient(rows: RowCoefficients, which: Bool[Array, "T"]) -> RowCoefficients:
    """Sets the coefficients of the rows in ``which`` so that these rows have no gradient.

    The e^u of these rows becomes 0, too, so that the rows add no NaN to dweight.
    """
    zeroed = jax.tree.map(lambda x: jnp.where(expand_like(which, x), 0.0, x), rows)
    return zeroed._replace(max=jnp.where(which, -MASKED, rows.max))


def take_columns(x: Float[Array, "T n"], columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """Returns the entries of ``x`` in these columns, and -inf for columns outside [0, n)."""
    owned = (columns >= 0) & (columns < x.shape[1])
    return jnp.where(owned, jnp.take_along_axis(x, jnp.where(owned, columns, 0), axis=1), -jnp.inf)


def candidate_logprobs(
    x: Float[Array, "*b"], highest: Float[Array, "*b"], row_scale: Any, log_sumexp: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Computes the candidates' log-probabilities of eq. 3 from their x; 0 where x is -inf."""
    u = jnp.clip((x - highest) * row_scale, MASKED, 0.0)
    return jnp.where(x == -jnp.inf, 0.0, u - log_sumexp)


def candidate_terms(
    x: Float[Array, "*b"], cotangent: Float[Array, "*b"], factor: Any, dcap: Callable[[Any], Any] | None
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Returns the g_c of eq. 4 (0 where x is -inf), and each candidate's term of the raw product's gradient (eq. 5).

    ``dcap`` computes the derivative of the softcap; None without a softcap.
    """
    owned = x > -jnp.inf
    g = jnp.where(owned, cotangent, 0.0)
    term = g * factor
    return g, term if dcap is None else term * dcap(jnp.where(owned, x, 0.0))


def sum_repeats(columns: Int[Array, "T K"], terms: Float[Array, "T K"], *others: Array) -> tuple[Array, ...]:
    """Sorts each token's columns and sums the terms of columns that repeat, so that each column occurs once.

    The last of equal columns gets the sum. The others become -1, and their terms 0. ``others`` are further arrays
    [T, K], whose values are equal where columns are equal; they are returned in the sorted order.

    The terms can then be scattered to distinct indices, which is deterministic. On a GPU, two additions at one index
    are not deterministic. After the loop's step of 2ⁿ, each sorted term is a sum of up to 2ⁿ⁺¹ terms of its column: the
    term itself and those before it.
    """
    columns, terms, *sorted_others = lax.sort((columns, terms, *others), dimension=1, num_keys=1, is_stable=True)
    step, most = 1, columns.shape[1]
    while step < most:
        same = columns[:, step:] == columns[:, :-step]
        earlier = jnp.where(same, terms[:, :-step], 0.0)
        terms = terms + jnp.concatenate([jnp.zeros_like(terms[:, :step]), earlier], 1)
        step *= 2
    repeated = columns[:, 1:] == columns[:, :-1]  # the last of equal columns has the sum
    repeated = jnp.concatenate([repeated, jnp.zeros_like(columns[:, :1], dtype=bool)], 1)
    return jnp.where(repeated, -1, columns), jnp.where(repeated, 0.0, terms), *sorted_others


def merge_repeated_candidates(operands: Operands, rows: RowCoefficients) -> tuple[Operands, RowCoefficients]:
    """Merges a token's repeated candidates by `sum_repeats`, in both the operands and the coefficients."""
    assert operands.candidates is not None
    assert rows.candidates is not None
    columns, terms = sum_repeats(operands.candidates, rows.candidates)
    return operands._replace(candidates=columns), rows._replace(candidates=terms, at_candidates=None)


def scatter_indices(columns: Int[Array, "T K"], first: Any, last: Any, size: int) -> tuple[Array, Array]:
    """Returns indices for a scatter into an array [T, size] that has the columns [first, last).

    Columns outside [first, last) get indices of ``size`` or more. If each column occurs once per token, all indices of
    a token differ.
    """
    rows, k = (lax.broadcasted_iota(jnp.int32, columns.shape, dim) for dim in (0, 1))
    return rows, jnp.where((columns >= first) & (columns < last), columns - first, size + k)


FP16_SHIFT = 15.0  # fp16 caches e^u times 2^15, because values in (0, 1] would use only half of fp16's exponents


def can_cache_exponentials(call: Call) -> bool:
    """Whether the gradient can be computed from cached exponentials.

    The gradient of a mean of capped logits cannot. A logit far below the maximum then has a gradient, but its e^u is 0,
    from which the cap's derivative cannot be computed.
    """
    return call.logit_softcap is None or not call.mean_logit


def encode_exponentials(e: Float[Array, "T n"], dtype: jnp.dtype) -> Float[Array, "T n"]:
    """Encodes e^u for the cache: casts it to ``dtype``, after scaling it if that is fp16."""
    return (e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e).astype(dtype)


def decode_exponentials(
    cached: Float[Array, "T n"], dtype: jnp.dtype
) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """Decodes what `encode_exponentials` returned. Returns e^u and u, which is finite even where e^u is 0."""
    e = cached.astype(dtype)
    e = e * 2.0**-FP16_SHIFT if cached.dtype == jnp.float16 else e
    return e, jnp.log(jnp.maximum(e, jnp.finfo(e.dtype).tiny))


def dlogits_from_logits(
    x: Float[Array, "T n"],
    row_scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    unpadded: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
    floor: Float[Array, "T"] | None = None,
) -> Float[Array, "T n"]:
    """Computes the gradient with respect to a tile's raw products from x and k (eq. 0).

    ``candidates`` are columns of this tile, each once per token (`sum_repeats`), or lie outside [0, n). ``floor`` is in
    the units of x.
    """
    u = jnp.minimum(distance(x, rows.max[:, None], expand_rows(row_scale)), 0.0)
    return _tile_gradient(u, jnp.exp(u), x, rows, targets, unpadded, call, candidates, floor)


def dlogits_from_exponentials(
    cached: Float[Array, "T n"],
    highest: Float[Array, "T"],
    row_scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    unpadded: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
) -> Float[Array, "T n"]:
    """Computes what `dlogits_from_logits` computes, from the tile's cached exponentials and its largest x, ``highest``.

    No floor is needed, because the exponentials of columns below the floor are 0.
    """
    e, log_e = decode_exponentials(cached, highest.dtype)
    down = jnp.minimum(distance(highest, rows.max, row_scale), 0.0)
    x = None
    if call.logit_softcap is not None:
        x = jnp.clip(highest[:, None] + log_e / expand_rows(bound_row_scale(row_scale)), -1.0, 1.0)
    e = e * jnp.exp(down)[:, None]
    return _tile_gradient(log_e + down[:, None], e, x, rows, targets, unpadded, call, candidates, None)


def bound_row_scale(row_scale: Float[Array, "T"] | float) -> Float[Array, "T"] | float:
    """Returns ``row_scale`` as a divisor: positive even in rows without a gradient, where it may be 0."""
    return row_scale if isinstance(row_scale, float | int) else jnp.maximum(row_scale, jnp.finfo(row_scale.dtype).tiny)


def _tile_gradient(
    u: Float[Array, "T n"],
    e: Float[Array, "T n"],
    x: Float[Array, "T n"] | None,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    unpadded: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None,
    floor: Float[Array, "T"] | None,
) -> Float[Array, "T n"]:
    """Computes eqs. 4 and 5 over a tile. ``x`` is needed only with a softcap or a floor."""
    d = rows.constant[:, None] * e
    if rows.slope is not None:
        d = d + rows.slope[:, None] * (u * e)
    columns = lax.broadcasted_iota(jnp.int32, e.shape, 1)
    dcap = 1.0 if call.logit_softcap is None or x is None else cap_derivative(x)
    d = d * dcap
    if x is not None and floor is not None:
        d = jnp.where(x < floor[:, None], 0.0, d)
    d = jnp.where(columns == targets[:, None], rows.target[:, None], d)
    if rows.uniform is not None:
        d = d + rows.uniform[:, None] * dcap
    d = d if unpadded is None else jnp.where(unpadded[None, :], d, 0.0)
    if candidates is None or rows.candidates is None:
        return d
    indices = scatter_indices(candidates, 0, d.shape[1], d.shape[1])
    return d.at[indices].add(rows.candidates, mode="drop", unique_indices=True)
