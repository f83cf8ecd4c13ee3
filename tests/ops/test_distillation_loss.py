"""`losses.distillation_loss` against its formulas in float64, and against what frameworks compute on stored logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logprobs
from lce_jax.losses import distillation_loss
from tests import cases, oracle
from tests.pairs import combined

DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]
RESTS = ["bin", "drop", "renormalize"]
BETA = 0.3


def expected(
    divergence: str, rest: str, q: np.ndarray, p: np.ndarray, live: np.ndarray, beta: float = BETA
) -> tuple[np.ndarray, Any]:
    """The divergence and its derivatives in ln q, from float64 probabilities that lie within (0, 1)."""
    q, p = np.where(live, q, 0.0), np.where(live, p, 0.0)
    if rest == "renormalize":
        q, p = (x / x.sum(-1, keepdims=True) for x in (q, p))
    bins = [np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) if rest == "bin" else x for x in (q, p)]
    (a, b), some = bins, bins[0] > 0
    a, b = (np.where(some, x, 1.0) for x in (a, b))
    of_b, of_a = -np.log1p((1 - beta) * (a - b) / b), -np.log1p(beta * (b - a) / a)  # ln(b / m), ln(a / m)
    terms, slopes = {
        "forward_kl": (b * np.log(b / a), -b / a),
        "reverse_kl": (a * np.log(a / b), np.log(a / b) + 1),
        "jsd": (beta * b * of_b + (1 - beta) * a * of_a, (1 - beta) * of_a),
    }[divergence]
    terms, slopes = np.where(some, terms, 0.0), np.where(some, slopes, 0.0)
    gradient = q * slopes[..., : q.shape[-1]]
    if rest == "bin":
        gradient = gradient - q * slopes[..., -1:]
    if rest == "renormalize":
        gradient = gradient - q * gradient.sum(-1, keepdims=True)
    return terms.sum(-1), gradient


def draw(K: int = 8, rows: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, p, ids): candidates that hold from 0.02 to 0.99 of the mass, K - 3 of them in every third row."""
    rng = np.random.default_rng(3)
    q, p = (rng.dirichlet(np.full(K, 0.5), rows) * rng.uniform(0.02, 0.99, (rows, 1)) for _ in range(2))
    ids = np.where((np.arange(rows)[:, None] % 3 == 0) & (np.arange(K) >= K - 3), -1, np.arange(K))
    return np.maximum(q, 1e-9), np.maximum(p, 1e-9), ids


def evaluate(q: np.ndarray, p: np.ndarray, ids: np.ndarray, **options: Any) -> tuple[jax.Array, jax.Array]:
    if options.get("divergence") == "jsd":
        options.setdefault("beta", BETA)
    teacher = jnp.asarray(np.log(p), jnp.float32)

    def total(student: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = distillation_loss(student, teacher, jnp.asarray(ids), **options)
        return jnp.sum(loss), loss

    gradient, loss = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(np.log(q), jnp.float32))
    return loss, gradient


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_formulas(divergence: str, rest: str) -> None:
    q, p, ids = draw()
    loss, gradient = evaluate(q, p, ids, divergence=divergence, rest=rest)
    want, wanted = expected(divergence, rest, q, p, ids >= 0)
    assert oracle.value_error(loss, want) < 2e-6
    assert oracle.relative_norm(gradient, wanted) < 2e-6
    assert (np.asarray(gradient)[ids < 0] == 0).all()
    assert (np.asarray(loss) >= -1e-7).all() == (rest != "drop" or divergence == "jsd")


@combined(beta=[1e-30, 1e-8, 1e-4, 1 - 1e-4, 1 - 1e-8, 1 - 2**-50], rest=RESTS)
def test_a_jsd_is_exact_to_its_ends(beta: float, rest: str) -> None:
    q, p, ids = draw()
    loss, gradient = evaluate(q, p, ids, divergence="jsd", rest=rest, beta=beta)
    want, wanted = expected("jsd", rest, q, p, ids >= 0, beta)
    size = min(beta, 1 - beta)  # float32 holds the results, but not their squares
    assert rest == "drop" or oracle.relative_norm(np.asarray(loss, float) / size, want / size) < 1e-5
    assert oracle.relative_norm(np.asarray(gradient, float) / size, wanted / size) < 1e-5


@pytest.mark.slow
def test_a_second_derivative_of_a_jsd() -> None:
    q, p, ids = draw(rows=4)
    arrays = jnp.log(p), jnp.asarray(ids)

    def slope(student: jax.Array) -> jax.Array:
        return jax.grad(lambda x: distillation_loss(x, *arrays, divergence="jsd", beta=BETA).sum())(student)

    step = 1e-6
    with jax.enable_x64(True):
        at, arrays = jnp.log(q), (jnp.log(p), jnp.asarray(ids))
        along = jnp.asarray(np.random.default_rng(0).standard_normal(q.shape))
        _, found = jax.jvp(slope, (at,), (along,))
        want = (slope(at + step * along) - slope(at - step * along)) / (2 * step)
    assert oracle.relative_norm(found, want) < 1e-6


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_rest_near_zero(divergence: str) -> None:
    """One candidate has nearly all mass: 1 - Σ q in float32 would have a relative error of 1e-7 / outside."""
    outside, inside = np.array([[1e-2], [1e-4], [3e-6]]), np.array([0.9, 0.1])
    q = np.concatenate([1 - 2 * outside, outside * inside], -1)
    p = np.concatenate([1 - 5 * outside, 2 * outside * inside], -1)
    loss, gradient = evaluate(q, p, np.array([[4, 7, 9]] * 3), divergence=divergence)
    want, wanted = expected(divergence, "bin", q, p, np.ones_like(q, bool))
    assert np.max(np.abs(loss - want) / outside[:, 0]) < 1e-4
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(gradient, wanted, strict=True))


@pytest.mark.fast("drop")
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_candidates_that_hold_all_mass(divergence: str) -> None:
    """For the teacher, the student or both: finite, and 0 where the two are equal."""
    half, all_ = np.array([[0.3, 0.2]]), np.array([[0.75, 0.25]])
    for q, p in ((half, all_), (all_, half), (all_, all_)):
        loss, gradient = evaluate(q, p, np.array([[0, 1]]), divergence=divergence)
        assert np.isfinite(loss).all()
        assert np.isfinite(gradient).all()
        assert (np.abs(loss) < 1e-6).all() == (q is p)
        if q is p:  # what reaches the logits
            assert np.abs(gradient - q * gradient.sum()).max() < 1e-6


def test_forward_kl_where_the_teacher_leaves_nothing() -> None:
    """A teacher cut at its top k and renormalised: the student's rest costs through the candidates alone."""
    q, p = np.array([[0.5, 0.25]]), np.array([[0.6, 0.4]])
    loss, gradient = evaluate(q, p, np.array([[0, 1]]))
    assert oracle.value_error(loss, (p * np.log(p / q)).sum(-1)) < 1e-6
    assert oracle.value_error(gradient, -p) < 1e-5


def test_rows_that_do_not_count() -> None:
    q, p, ids = draw()
    where = np.arange(50) % 2 == 0
    q, p = (np.where(where[:, None], x, np.nan) for x in (q, p))
    ids[1:3] = -1
    for rest in RESTS:
        loss, gradient = evaluate(q, p, ids, rest=rest, where=jnp.asarray(where))
        assert (np.asarray(loss)[~where] == 0).all()
        assert (np.asarray(gradient)[~where] == 0).all()
        assert (loss[2], np.abs(gradient[2]).max()) == (0.0, 0.0)  # a row without candidates
        live = np.flatnonzero(where & (ids >= 0).any(-1))
        want, wanted = expected("forward_kl", rest, q[live], p[live], ids[live] >= 0)
        assert oracle.value_error(np.asarray(loss)[live], want) < 2e-6
        assert oracle.relative_norm(np.asarray(gradient)[live], wanted) < 2e-6


def test_a_teacher_that_is_certain() -> None:
    """Ln p = -inf is a probability of 0."""
    student = jnp.log(jnp.array([[0.5, 0.25]]))
    teacher, ids = jnp.array([[0.0, -jnp.inf]]), jnp.array([[1, 2]])
    assert float(distillation_loss(student, teacher, ids)[0]) == pytest.approx(np.log(2), rel=1e-6)
    assert np.isinf(distillation_loss(student, teacher, ids, divergence="reverse_kl", rest="drop")[0])
    value, gradient = jax.value_and_grad(
        lambda x: distillation_loss(x, teacher, ids, divergence="jsd", rest="drop").sum()
    )(student)
    q, p = np.array([0.5, 0.25]), np.array([1.0, 0.0])
    m = (q + p) / 2
    assert float(value) == pytest.approx(0.5 * np.log(1 / m[0]) + 0.5 * (q * np.log(q / m)).sum(), rel=1e-6)
    assert oracle.relative_norm(gradient[0], 0.5 * q * np.log(q / m)) < 1e-6


def test_no_gradient_reaches_the_teacher() -> None:
    q, p, ids = draw()
    gradient = jax.grad(lambda t: distillation_loss(jnp.log(q), t, jnp.asarray(ids)).sum())(jnp.log(p))
    assert np.abs(gradient).max() == 0.0


def test_more_than_all_mass_is_nan() -> None:
    """Repeated ids, and logits in place of log-probabilities, in their own row."""
    student, teacher = jnp.log(jnp.array([[0.9, 0.9], [0.5, 0.4]])), jnp.log(jnp.array([[0.6, 0.3], [0.6, 0.3]]))
    ids = jnp.array([[3, 3], [3, 4]])
    for rest in ("bin", "drop"):
        assert np.isnan(distillation_loss(student, teacher, ids, rest=rest)).tolist() == [True, False]
        assert np.isnan(distillation_loss(teacher, student, ids, rest=rest)).tolist() == [True, False]
    loose = distillation_loss(student + 3.0, teacher - 7.0, ids, rest="renormalize")
    tight = distillation_loss(student, teacher, ids, rest="renormalize")
    assert oracle.value_error(loose, tight) < 1e-6


def test_types_and_a_traced_beta() -> None:
    q, p, ids = draw()
    half = [jnp.asarray(np.log(x), jnp.bfloat16) for x in (q, p)]
    loss = distillation_loss(*half, np.where(ids < 0, np.int64(-(2**40)), ids))
    exact = [np.exp(np.asarray(x).astype(np.float64)) for x in half]
    assert loss.dtype == jnp.float32
    assert oracle.value_error(loss, expected("forward_kl", "bin", *exact, ids >= 0)[0]) < 2e-6
    arrays = jnp.log(q), jnp.log(p), jnp.asarray(ids)
    traced = jax.jit(lambda beta: distillation_loss(*arrays, divergence="jsd", beta=beta))
    assert oracle.value_error(traced(BETA), expected("jsd", "bin", q, p, ids >= 0)[0]) < 2e-6


def test_no_implicit_transfers() -> None:
    arrays = jnp.full((4, 3), -2.0), jnp.full((4, 3), -1.5), jnp.tile(jnp.arange(3), (4, 1))
    with jax.transfer_guard("disallow"):
        for divergence in DIVERGENCES:
            distillation_loss(*arrays, divergence=divergence)


def verl_loss(divergence: str, log_q: Any, log_p: Any) -> Any:
    """verl's top-k losses: sums over the candidates, of log-probabilities that are at least ln 1e-8."""
    log_q, log_p = (jnp.maximum(x, np.log(1e-8)) for x in (log_q, log_p))
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if divergence == "jsd":
        log_m = jnp.log(BETA * p + (1 - BETA) * q)
        return jnp.sum(BETA * p * (log_p - log_m) + (1 - BETA) * q * (log_q - log_m), -1)
    return jnp.sum(p * (log_p - log_q) if divergence == "forward_kl" else q * (log_q - log_p), -1)


def tail_bin_loss(divergence: str, log_q: Any, log_p: Any) -> Any:
    """The tail bin of SDFT and of TRL: ln(1 - Σ p) beside the candidates."""
    tails = [jnp.log(-jnp.expm1(jax.nn.logsumexp(x, -1, keepdims=True))) for x in (log_q, log_p)]
    log_q, log_p = (jnp.concatenate(pair, -1) for pair in zip((log_q, log_p), tails, strict=True))
    return verl_loss(divergence, log_q, log_p)


def nemo_loss(divergence: str, log_q: Any, log_p: Any) -> Any:
    """NeMo RL without ``zero_outside_topk``: both softmaxes over the candidates alone."""
    return verl_loss(divergence, jax.nn.log_softmax(log_q), jax.nn.log_softmax(log_p))


@pytest.mark.fast("drop")
@pytest.mark.parametrize(
    ("published", "rest"), [(verl_loss, "drop"), (tail_bin_loss, "bin"), (nemo_loss, "renormalize")], ids=RESTS
)
def test_frameworks(published: Any, rest: str) -> None:
    """The losses of frameworks on stored logits, in value and in the gradients of hidden and weight."""
    hidden, weight, labels, _, _ = cases.draw(cases.case("published", leading=(2, 30), H=64, V=1500))
    teacher, ids = jax.lax.top_k(jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (2, 30, 1500)) * 2), 64)

    def total(losses):
        return jnp.mean(losses[0] + 0.7 * losses[1] + 1.6 * losses[2]), losses

    def stored(hidden, weight):
        logprobs = jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest"))
        own = jnp.take_along_axis(logprobs, ids, -1)
        return total([published(divergence, own, teacher) for divergence in DIVERGENCES])

    def ours(hidden, weight):
        out = linear_logprobs(hidden, weight, labels, candidates=ids, entropy=False, precision="highest")
        more = [{}, {}, {"beta": BETA}]
        return total([
            distillation_loss(out.candidate_logprobs, teacher, ids, divergence=divergence, rest=rest, **own)
            for divergence, own in zip(DIVERGENCES, more, strict=True)
        ])  # fmt: skip

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(hidden, weight) for f in (ours, stored))
    assert all(oracle.value_error(a, b) < 2e-6 for a, b in zip(got[1], want[1], strict=True))
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(got[0], want[0], strict=True))


X, IDS = jnp.full((4, 3), -2.0), jnp.zeros((4, 3), int)
MISTAKES = {
    "another shape": (dict(teacher_logprobs=X[:2]), ValueError, r"teacher_logprobs \(2, 3\) .* ids \(4, 3\)"),
    "ids as log-probabilities": (dict(candidate_logprobs=IDS), ValueError, r"\(4, 3\) of int32 must be floating"),
    "float ids": (dict(ids=X), TypeError, "ids must be integers, got float32"),
    "no candidates": (dict(ids=IDS[:, :0]), ValueError, r"ids \(4, 0\) must end in K, from 1 to 512"),
    "a list": (dict(candidate_logprobs=[[1.0]]), TypeError, "candidate_logprobs must be an array, got list"),
    "divergence": (dict(divergence="kl"), ValueError, "or \"jsd\", got 'kl'"),
    "rest": (dict(rest="tail"), ValueError, "or \"renormalize\", got 'tail'"),
    "beta of a KL": (dict(beta=0.5), ValueError, 'beta=0.5 is a weight of divergence="jsd"'),
    "beta 0": (dict(divergence="jsd", beta=0), ValueError, 'got 0.0: divergence="forward_kl" is 0'),
    "a known beta": (dict(divergence="jsd", beta=jnp.float32(1)), ValueError, 'got 1.0: divergence="forward_kl" is 0'),
    "an array of beta": (dict(divergence="jsd", beta=jnp.ones(4)), ValueError, r"beta must be .* got shape \(4,\)"),
    "where of another shape": (dict(where=jnp.ones((4, 3), bool)), ValueError, r"of ids before K \(4,\)"),
    "where of numbers": (dict(where=jnp.ones(4)), TypeError, "where must be bool, got float32"),
}


@pytest.mark.parametrize(("changed", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distillation_loss(**{"candidate_logprobs": X, "teacher_logprobs": X, "ids": IDS, **changed})
