r"""The mathematics, once. Other modules cite the equations by number.

Logits of a token, from its raw products $r_v = h \cdot w_v + b_v$ (without a bias, $b = 0$; temperature $\tau$, scale
$a$, softcap $c$), are one factor k per row times a value x per column:

    (0)  z = k x,   x = r (-r for a < 0), k = |a| / τ;   with a softcap   x = tanh(a r / c), k = c / τ

and, with p = softmax(z):

    (1)  statistics of a set of columns:  m = max x,  u = (x - m) k,  s = Σ e^u,  q = Σ u e^u,  t = u[label] if owned,
                                          and if asked for Σ e^2u and Σ x, and of each candidate c owned, x_c
    (2)  union of disjoint sets:          M = max mᵢ,  dᵢ = (mᵢ - M) k,  aᵢ = e^dᵢ,  s = Σ sᵢ aᵢ,
                                          q = Σ (qᵢ + dᵢ sᵢ) aᵢ,  t = tᵢ + dᵢ of the owner,  Σ x = Σᵢ Σ x,
                                          x_c = max x_cᵢ, with -inf where it is not owned,  Σ e^2u = Σᵢ aᵢ² Σ e^2u
    (3)  results:                         lse = k M + ln s,  logprob = t - ln s,  entropy = ln s - q / s,
                                          mean = k Σ x / V,  logprob_c = min((x_c - M) k, 0) - ln s,  Σ p² = Σ e^2u / s²
    (4)  gradient in the logits:          dz = 1_y g_lp + p (-g_lp + g_lse - g_ent (ln p + entropy))
                                             + g_mean / V + Σ_c g_c (1_c - p)
         and, as p = e^u / s,                = 1_y g_lp + g_mean / V + Σ_c 1_c g_c
                                               + e^u / s · (g_lse - g_lp - Σ_c g_c + g_ent (q / s - u))
                                             = uniform + Σ_c 1_c g_c + (target at the label, where u = t,
                                                                        elsewhere e^u (constant + slope u))
    (5)  gradient in the raw products:    dr = dz · (a / τ) · (1 - tanh²(a r / c));   dh = dr W,  dW = drᵀ h,  db = Σ dr

Why this shape: q is summed in the shifted variable u, so entropy is never the difference of two large numbers, and
both terms of (3) are non-negative. (2) is associative and serves tiles, chunks and shards alike. An empty set has
m = -1e30 (finite: 0 · inf would be NaN), s = q = 0, t = -inf, and (2) absorbs it exactly. (4) subtracts m and not lse:
at logits of 1e4 the rounding of lse alone would put an error of 1e-3 on every probability. The row factor a / τ of (5)
is folded into target, uniform, constant and slope, so the inner loop never sees it, and 1 - tanh² of the label, whose
tanh is m + t / k, into target.

Why m, min, Σ x and x_c stay in the units of x, from the first tile to (3) and (4): k M is rounded. A k M of 1e4 is off
by up to 5e-4, and in z - k M that is an error in the exponent of every probability. (x - M) k has the errors of x
alone. So k multiplies differences, in both passes, over tiles and over shards, and M itself only in lse.

Why the label has a target of its own in (4): where p(y) is near 1, g_lp (1 - p) is the small rest of two large numbers.
The forward's t and s give it as g_lp (s - e^t) / s, exactly 0 where s is 1. The backward's own u would have to equal t
to the last bit, and a product that another algorithm computes does not. For the same reason its u is clipped to 0: at
k = 1e8 the rounding of x puts e^u beyond float32, and a row whose cotangent is 0 would get 0 · inf.

Why (1) subtracts before it multiplies: logprob <= 0 and entropy >= 0 then hold in every rounding. The largest column
has x - m = 0 exactly, whatever a compiler fuses with the product, hence u = 0 and e^u = 1; every other u is negative.
So s >= 1 and ln s >= 0, q <= 0, t <= 0. (2) keeps all of that, because one dᵢ is exactly 0 and none is positive. And
t = 0 exactly if the label is a largest column. If m were the maximum of z = k x, a fused x k - m would not be 0 there,
because the product is rounded in m and not in the fused term. A candidate keeps x_c and not its u, because an
implementation may compute it apart from the tiles. So (3) clips its u to 0. No u is below -1e30, and (4) takes u e^u
first: slope u alone may overflow where e^u is 0.

Of two heads over one vocabulary, with probabilities p and q, and m, k, u, s and d of (1) and (2) for each:

    (6)  divergence:                      r = x_q where x_p is largest,  v = (x_q - r) k_q,  c = Σ e^{u_p} (u_p - v),
                                          KL(p ‖ q) = c / s_p + ln(s_q / s_p) + (m_q - r) k_q
    (7)  union of disjoint sets:          c = Σ (cᵢ + (d_pᵢ - (rᵢ - r) k_q) s_pᵢ) a_pᵢ,  r = that of the largest m_p
    (8)  gradient in the student's logits, if it is q (forward):  dz = g (q - p)
                                           if it is p (reverse):  dz = g p (u_p - v - c / s_p)

and of the mixture m = (1 - β) p + β q of a student's p and its teacher's q, with d = ln q - ln p, and d₀ where p is
largest:

    (9)  generalised Jensen-Shannon:      t = ln(p / m) = -ln(1 - β + β e^d),   d - d₀ = v - u_p,
                                          t - t₀ = -ln(1 + β (e^d - e^{d₀}) / (1 - β + β e^{d₀})),   b = Σ p (t - t₀),
                                          a = KL(q ‖ m) = Σ q (d + t),   JSD = (1 - β) (t₀ + b) + β a
    (10) gradient in the student's logits:                            dz = g (1 - β) p (t - t₀ - b)

(6) holds because ln p = u_p - ln s_p, and ln q = v - (m_q - r) k_q - ln s_q. No logit is in it, only differences, so it
does not matter how far the logits of one model lie from those of the other. Relative to r, a p that is nearly one-hot
has a c of nearly 0, whatever q says of that column: in (8) no large numbers cancel. Nor do they in (10), relative to
t₀. (9) needs both normalisers first, so it is a second pass over the vocabulary.

A floor f leaves the tokens {v : z_v >= f} and the label in the distribution. It is compared in the units of x (eq. 0),
x < f / k, so that a column costs one comparison and k, whose product with x is rounded, is not in it. A logit that is
NaN is not below anything, so it still reaches the results.

A forward may keep e^u of a tile, relative to the tile's own maximum, in the dtype in which gradients are multiplied.
Its relative error is that of one rounding, as that of the gradient. What does not count has exactly 0, and so has its
gradient.
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


SATURATED = 20.0  # where 1 - tanh is less than half a unit in the last place, also of float64


def softcap_tanh(y: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The tanh. Above 1, XLA's own is off by up to 4.7 units in the last place on a CPU, this one by 1."""
    a = jnp.minimum(jnp.abs(y), SATURATED)  # e^2a stays finite, and so does what JAX makes of it in a derivative
    near_one = 1.0 - 2.0 / (jnp.exp(2.0 * a) + 1.0)
    return jnp.where(a < 1.0, jnp.tanh(y), jnp.where(y < 0, -near_one, near_one))


def cap_derivative(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The 1 - tanh² of eq. 5, from x, the tanh. 1 - x is exact near 1, where x² is rounded."""
    return (1.0 - x) * (1.0 + x)


def compute_row_scale(call: Call, inverse_temperature: Float[Array, "T"] | None) -> Float[Array, "T"] | float:
    """The k of eq. 0."""
    scale = abs(call.logit_scale) if call.logit_softcap is None else call.logit_softcap
    return scale if inverse_temperature is None else scale * inverse_temperature


def compute_row_factor(call: Call, inverse_temperature: Float[Array, "T"] | None) -> Float[Array, "T"] | float:
    """The row factor a / τ of eq. 5; with a traced scale ``inverse_temperature`` holds both."""
    return call.logit_scale if inverse_temperature is None else call.logit_scale * inverse_temperature


def unscaled_logits(
    raw: Float[Array, "T n"],
    call: Call,
    raw_scale: Float[Array, "T"] | None = None,
    tanh: Callable[[Array], Array] = softcap_tanh,
) -> Float[Array, "T n"]:
    """The x of eq. 0, from raw products; ``raw_scale`` is a / c, or the sign of a, if these are traced."""
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
    """Eq. 0: logits from raw products, and the derivative of the cap (None without one)."""
    x = unscaled_logits(raw, call, raw_scale)
    dcap = None if call.logit_softcap is None else cap_derivative(x)
    return x * expand_rows(compute_row_scale(call, inverse_temperature)), dcap


def expand_rows(per_row: Float[Array, "T"] | float) -> Float[Array, "T 1"] | float:
    """Beside [T, n]."""
    return per_row if isinstance(per_row, float | int) else per_row[:, None]


def tile_statistics(
    x: Float[Array, "T n"],
    row_scale: Float[Array, "T"] | float,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
    floor: Float[Array, "T"] | None = None,
) -> tuple[ShardStatistics, Float[Array, "T n"]]:
    """Eq. 1 over a tile, and its e^u, which is 0 at columns that do not count.

    ``targets`` are columns of this tile or lie outside [0, n); ``live`` masks padding columns. ``candidates`` are such
    columns too. ``floor`` is in the units of x.
    """
    n = x.shape[1]
    x = lax.optimization_barrier(x)  # otherwise XLA may compute x twice, for m and for u, and round it differently
    owned = (targets >= 0) & (targets < n)
    at_target = jnp.take_along_axis(x, jnp.where(owned, targets, 0)[:, None], axis=1)[:, 0]
    at_candidates = None if candidates is None else take_columns(x, candidates)
    # Without this barrier XLA keeps the tile beyond the exponentials.
    x, at_target, at_candidates = lax.optimization_barrier((x, at_target, at_candidates))
    counts = counted_columns(x, targets, live, floor)
    m = jnp.maximum(jnp.max(x if counts is None else jnp.where(counts, x, MASKED), axis=1), MASKED)
    u = distance(x, m[:, None], expand_rows(row_scale))
    u = u if counts is None else jnp.where(counts, u, MASKED)
    e = jnp.exp(u)
    lowest = support = None
    if call.stats:
        lowest = jnp.min(x if counts is None else jnp.where(counts, x, -MASKED), axis=1)
    if call.stats and counts is not None and floor is not None:
        support = jnp.sum(jnp.where(counts, jnp.ones((), x.dtype), 0.0), axis=1)
    asked = call.statistics
    sums: Any = {name: jnp.sum(one.term(u, e), axis=1) if name in asked else None for name, one in SUMS.items()}
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
    """Eq. 3, from statistics of the whole vocabulary; out-of-vocabulary logprobs (-1) and rows left out become 0.

    ``row_scale`` is the k of eq. 0. ``per_token`` computes `results` in another arithmetic than XLA's.
    """
    # A row left out may have s = 0. It is replaced by 1, so that 0 / 0 is never computed.
    stats = stats if where is None else stats._replace(sumexp=jnp.where(where, stats.sumexp, 1.0))
    is_nan, one = jnp.isnan(stats.sumexp), jnp.ones_like(stats.sumexp)
    at_largest = (labels >= 0) & (stats.target == 0.0) & ~is_nan
    read = stats._replace(min=None, total=None, candidates=None, support=None)
    outputs, of_candidates = per_token(results, read, row_scale, labels), None
    if stats.candidates is not None:
        highest, log_sumexp = stats.max[:, None], jnp.log(stats.sumexp)[:, None]
        of_candidates = candidate_logprobs(stats.candidates, highest, expand_rows(row_scale), log_sumexp)
    outputs = outputs._replace(
        # XLA's largest and least numbers of a row may lose NaN; its sum does not.
        max_logit=None if stats.min is None else jnp.where(is_nan, stats.sumexp, stats.max * row_scale),
        min_logit=None if stats.min is None else jnp.where(is_nan, stats.sumexp, stats.min * row_scale),
        correct=None if stats.min is None else jnp.where(at_largest, one, 0.0),
        candidate_logprobs=of_candidates,
        dropped_mass=dropped_mass,
        support=stats.support,
    )
    found = Results(outputs, mean_logit=None if stats.total is None else stats.total * row_scale / vocab_size)
    return found if where is None else jax.tree.map(lambda x: jnp.where(expand_like(where, x), x, 0.0), found)


def results(stats: ShardStatistics, row_scale: Float[Array, "T"] | float, labels: Int[Array, "T"]) -> LogprobOutput:
    """Those of eq. 3 that are more than a product. The maximum is multiplied by the k of eq. 0 nowhere else."""
    log_sumexp = jnp.log(stats.sumexp)
    return LogprobOutput(
        logprobs=jnp.where(labels >= 0, stats.target - log_sumexp, 0.0),
        entropy=None if stats.weighted is None else log_sumexp - stats.weighted / stats.sumexp,  # type: ignore[arg-type]
        lse=stats.max * row_scale + log_sumexp,
        sum_p_squared=None if stats.squares is None else stats.squares / stats.sumexp / stats.sumexp,
    )


def empty_results(num_tokens: int, dtype: jnp.dtype, call: Call) -> Results:
    """Eq. 3 of tokens without columns: their shapes and dtypes are those of the call's results."""
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
    of_candidates: Float[Array, "T"] | None = None,
) -> RowCoefficients:
    """Eq. 4 and the row factor of eq. 5, from the whole vocabulary's statistics and the cotangents of the results.

    ``row_scale`` is the k of eq. 0. ``of_candidates`` is the Σ g_c of eq. 4, where the statistics have no candidates.
    """
    sumexp = stats.sumexp if where is None else jnp.where(where, stats.sumexp, 1.0)
    of = cotangent.outputs
    rest, slope, uniform, candidates = of.lse, None, None, None  # rest: the g of eq. 4's probabilities but for g_lp
    t = jnp.maximum(stats.target, MASKED)
    at_label = jnp.exp(t)
    if stats.weighted is not None and of.entropy is not None:
        rest = rest + of.entropy * (stats.weighted / sumexp)
        slope = -of.entropy / sumexp
    if cotangent.mean_logit is not None:
        uniform = cotangent.mean_logit / vocab_size * factor
    if stats.candidates is not None and of.candidate_logprobs is not None:
        dcap = None if call.logit_softcap is None else cap_derivative
        given, candidates = candidate_terms(stats.candidates, of.candidate_logprobs, expand_rows(factor), dcap)
        of_candidates = jnp.sum(given, axis=1)
    if of_candidates is not None:
        rest = rest - of_candidates
    target = of.logprobs * ((sumexp - at_label) / sumexp) + at_label * (rest / sumexp)
    target = target if slope is None else target + slope * (t * at_label)
    if call.logit_softcap is not None:
        target = target * cap_derivative(stats.max + t / row_scale)
    constant = (rest - of.logprobs) / sumexp * factor
    slope = None if slope is None else slope * factor
    at_candidates = None if candidates is None else stats.candidates
    rows = RowCoefficients(stats.max, target * factor, constant, slope, uniform, candidates, at_candidates)
    return rows if where is None else jax.tree.map(lambda x: jnp.where(expand_like(where, x), x, 0.0), rows)


def unscaled_floor(floor: Float[Array, "T"], row_scale: Float[Array, "T"] | float) -> Float[Array, "T"]:
    """The floor in the units of x; ``row_scale`` is k of eq. 0. With k = 0 every logit is 0, and x reaches 0 / 0."""
    return floor / row_scale


def unpadded_columns(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Bool[Array, "n"] | None:
    """Which of the columns [start, start + size) are true vocabulary; None if all are."""
    return None if num_columns is None else start + jnp.arange(size, dtype=jnp.int32) < num_columns


def zero_padding(weight: Float[Array, "V H"], live: Bool[Array, "V"] | None, call: Call) -> Array:
    """The weight with its padding set to zero, because 0 times NaN or inf is NaN."""
    if live is None:
        return weight
    return jnp.where(jnp.expand_dims(live, call.hidden_dim), weight, jnp.zeros((), weight.dtype))


def counted_columns(
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


def exclude_empty_rows(where: Bool[Array, "T"] | None, sumexp: Float[Array, "T"]) -> Bool[Array, "T"]:
    """``where``, without the rows whose distribution has no token: a label out of vocabulary, and all below the floor.

    Nothing else has a sum of 0. One that is NaN stays.
    """
    return sumexp != 0 if where is None else where & (sumexp != 0)


# Below it a temperature counts as this one: float32 holds what its inverse multiplies, the kernels' padding included.
SMALLEST = 1e-20


def invert_temperature(temperature: Float[Array, "T"]) -> Float[Array, "T"]:
    """1 / τ; 1 where there is no such temperature."""
    return 1.0 / jnp.where(scalars.is_temperature(temperature), jnp.maximum(temperature, SMALLEST), 1.0)


def zero_gradient(rows: RowCoefficients, which: Bool[Array, "T"]) -> RowCoefficients:
    """The coefficients with no gradient in these rows, where e^u becomes 0 too: dweight gets no NaN from them."""
    found = jax.tree.map(lambda x: jnp.where(expand_like(which, x), 0.0, x), rows)
    return found._replace(max=jnp.where(which, -MASKED, rows.max))


def take_columns(x: Float[Array, "T n"], columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The x at these columns, -inf where they lie outside [0, n)."""
    owned = (columns >= 0) & (columns < x.shape[1])
    return jnp.where(owned, jnp.take_along_axis(x, jnp.where(owned, columns, 0), axis=1), -jnp.inf)


def candidate_logprobs(
    x: Float[Array, "*b"], highest: Float[Array, "*b"], row_scale: Any, log_sumexp: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Eq. 3, from the statistics beside each candidate; 0 where x is -inf."""
    u = jnp.clip((x - highest) * row_scale, MASKED, 0.0)
    return jnp.where(x == -jnp.inf, 0.0, u - log_sumexp)


def candidate_terms(
    x: Float[Array, "*b"], cotangent: Float[Array, "*b"], factor: Any, dcap: Callable[[Any], Any] | None
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """The g_c of eq. 4, 0 where x is -inf, and what it adds to the gradient in the raw product (eq. 5).

    ``dcap`` is the derivative of the cap, if there is one.
    """
    owned = x > -jnp.inf
    g = jnp.where(owned, cotangent, 0.0)
    term = g * factor
    return g, term if dcap is None else term * dcap(jnp.where(owned, x, 0.0))


def sum_repeats(columns: Int[Array, "T K"], terms: Float[Array, "T K"], *beside: Array) -> tuple[Array, ...]:
    """Columns that occur once per token, sorted, and the sum of their terms; -1 and 0 in place of the repeats.

    And ``beside``, which has the same at all repeats, in the same order.

    So the terms can be scattered to unique places, which is deterministic: adding to one place twice is not, on a GPU.
    After the step of 2ⁿ, each of the sorted terms is the sum of the last 2ⁿ⁺¹ of its column.
    """
    columns, terms, *others = lax.sort((columns, terms, *beside), dimension=1, num_keys=1, is_stable=True)
    step, most = 1, columns.shape[1]
    while step < most:
        same = columns[:, step:] == columns[:, :-step]
        earlier = jnp.where(same, terms[:, :-step], 0.0)
        terms = terms + jnp.concatenate([jnp.zeros_like(terms[:, :step]), earlier], 1)
        step *= 2
    repeated = columns[:, 1:] == columns[:, :-1]  # the last of its column has the sum
    repeated = jnp.concatenate([repeated, jnp.zeros_like(columns[:, :1], dtype=bool)], 1)
    return jnp.where(repeated, -1, columns), jnp.where(repeated, 0.0, terms), *others


def merge_repeated_candidates(operands: Operands, rows: RowCoefficients) -> tuple[Operands, RowCoefficients]:
    """Both, which have candidates, with those of `sum_repeats`."""
    assert operands.candidates is not None
    assert rows.candidates is not None
    columns, terms = sum_repeats(operands.candidates, rows.candidates)
    return operands._replace(candidates=columns), rows._replace(candidates=terms, at_candidates=None)


def scatter_indices(columns: Int[Array, "T K"], first: Any, last: Any, size: int) -> tuple[Array, Array]:
    """Where to scatter into [T, size], which holds the columns [first, last): those outside lie beyond ``size``.

    No two places are equal if each column occurs once per token.
    """
    rows, k = (lax.broadcasted_iota(jnp.int32, columns.shape, dim) for dim in (0, 1))
    return rows, jnp.where((columns >= first) & (columns < last), columns - first, size + k)


FP16_SHIFT = 15.0  # fp16 exponentials are kept times 2^15: in (0, 1] they would waste half of fp16's exponents


def can_cache_exponentials(call: Call) -> bool:
    """Whether the gradient can be made from exponentials.

    Not where a capped logit far below the maximum has a gradient too, as in a mean: there e^u is 0 and says nothing.
    """
    return call.logit_softcap is None or not call.mean_logit


def encode_exponentials(e: Float[Array, "T n"], dtype: jnp.dtype) -> Float[Array, "T n"]:
    """e^u as it is kept."""
    return (e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e).astype(dtype)


def decode_exponentials(kept: Float[Array, "T n"], dtype: jnp.dtype) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """The e^u that `encode_exponentials` was given, and the u, finite."""
    e = kept.astype(dtype)
    e = e * 2.0**-FP16_SHIFT if kept.dtype == jnp.float16 else e
    return e, jnp.log(jnp.maximum(e, jnp.finfo(e.dtype).tiny))


def dlogits_from_logits(
    x: Float[Array, "T n"],
    row_scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
    floor: Float[Array, "T"] | None = None,
) -> Float[Array, "T n"]:
    """Of x and k (eq. 0). ``floor`` is that of `_logprobs.tile_statistics`.

    ``candidates`` are columns of this tile, once each (`sum_repeats`), or lie outside [0, n).
    """
    u = jnp.minimum(distance(x, rows.max[:, None], expand_rows(row_scale)), 0.0)
    return _gradient(u, jnp.exp(u), x, rows, targets, live, call, candidates, floor)


def dlogits_from_exponentials(
    kept: Float[Array, "T n"],
    highest: Float[Array, "T"],
    row_scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None = None,
) -> Float[Array, "T n"]:
    """Of what `encode_exponentials` made, and the tile's largest x. A floor is in them already."""
    e, log_e = decode_exponentials(kept, highest.dtype)
    down = jnp.minimum(distance(highest, rows.max, row_scale), 0.0)
    x = None
    if call.logit_softcap is not None:
        x = jnp.clip(highest[:, None] + log_e / expand_rows(bound_row_scale(row_scale)), -1.0, 1.0)
    e = e * jnp.exp(down)[:, None]
    return _gradient(log_e + down[:, None], e, x, rows, targets, live, call, candidates, None)


def bound_row_scale(row_scale: Float[Array, "T"] | float) -> Float[Array, "T"] | float:
    """A row without gradient may have any scale."""
    return row_scale if isinstance(row_scale, float | int) else jnp.maximum(row_scale, jnp.finfo(row_scale.dtype).tiny)


def _gradient(
    u: Float[Array, "T n"],
    e: Float[Array, "T n"],
    x: Float[Array, "T n"] | None,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    call: Call,
    candidates: Int[Array, "T K"] | None,
    floor: Float[Array, "T"] | None,
) -> Float[Array, "T n"]:
    """Eqs. 4 and 5. ``x`` is read with a softcap or a floor."""
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
    d = d if live is None else jnp.where(live[None, :], d, 0.0)
    if candidates is None or rows.candidates is None:
        return d
    places = scatter_indices(candidates, 0, d.shape[1], d.shape[1])
    return d.at[places].add(rows.candidates, mode="drop", unique_indices=True)
