"""Gradients at small temperatures: as exact as those of stored logits, and without NaN where nothing is asked for.

Rows have temperatures from 1 to 1e-6 and cotangents in proportion, so that all of them count in dweight. The last rows
have 1e-8, as padding may, and cotangents of 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_cross_entropy, linear_logprobs, linear_loss, sharded_linear_logprobs, sharded_linear_loss
from tests import cases, oracle
from tests.mathematics.test_numerics import plain
from tests.pairs import combined

pytestmark = pytest.mark.usefixtures("optimized")  # rounding as users get it

TEMPERATURES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
PADDING = 1e-8
EACH, H, V = 24, 32, 264
FLOOR = 4 * float(np.finfo(np.float32).eps)  # a few roundings, where stored logits have none

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no entropy": {"entropy": False},
    "softcap": {"logit_softcap": 5.0},
    "negative scale": {"logit_scale": -1.5},
    "array for the scale": {"logit_scale": jnp.float32(-1.5)},
    "arrays for scale and softcap": {"logit_scale": jnp.float32(1.5), "logit_softcap": jnp.float32(5.0)},
    "padded vocabulary, cache, threshold": {"vocab_size": 240, "cache_bytes": 1 << 20, "gradient_threshold": 1e-4},
    "bias": {"bias": jnp.linspace(-1, 1, V)},
    "candidates": {"candidates": 3},
    "candidates, softcap": {"candidates": 3, "logit_softcap": 5.0, "entropy": False},
}


class Problem(NamedTuple):
    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    seeds: list[jax.Array]
    options: dict[str, Any]

    def groups(self, dhidden: Any, *of_head: Any) -> list[Any]:
        """The gradients, dhidden by temperature."""
        return [*np.split(np.asarray(dhidden), len(TEMPERATURES) + 1)[:-1], *of_head]

    def errors(self, gradients: Any) -> np.ndarray:
        """Beside the float64 oracle, of each group."""
        true = oracle.gradients(self.hidden, self.weight, self.labels, self.seeds, **self.options)
        pairs = zip(self.groups(*gradients), self.groups(*true), strict=True)
        return np.array([oracle.relative_norm(*pair) for pair in pairs])


def draw(greedy: bool, **options: Any) -> Problem:
    rng = np.random.default_rng(0)
    tokens = EACH * (len(TEMPERATURES) + 1)
    hidden, weight = rng.standard_normal((tokens, H)), rng.standard_normal((V, H)) / 2
    hidden, weight = (jnp.asarray(x, jnp.float32) for x in (hidden, weight))
    temperature = np.repeat([*TEMPERATURES, PADDING], EACH)
    g = np.where(temperature == PADDING, 0, temperature)
    seeds = [jnp.asarray(g * rng.standard_normal(tokens), jnp.float32) for _ in range(3)]
    options["temperature"] = jnp.asarray(temperature, jnp.float32)
    if not options.get("entropy", True):
        seeds[1] = jnp.zeros_like(seeds[1])
    if "candidates" in options:
        seeds.append(jnp.asarray(g[:, None] * rng.standard_normal((tokens, 3)), jnp.float32))
        options["candidates"] = jnp.asarray(rng.integers(0, V, (tokens, 3)), jnp.int32)
    z = oracle.logits(hidden, weight, np.zeros(tokens, int), **options)
    labels = z.argmax(1) if greedy else rng.integers(0, z.shape[1], tokens)
    return Problem(hidden, weight, jnp.asarray(labels, jnp.int32), seeds, options)


def gradients(problem: Problem, function: Any) -> Any:
    """In hidden, weight and the bias, if there is one."""
    options = dict(problem.options)
    bias = options.pop("bias", None)
    return gradients_of(problem, function, **options)(problem.hidden, problem.weight, bias, {})


def gradients_of(problem: Problem, function: Any, **options: Any) -> Any:
    """`gradients` by operands, and by further options, which the compiled program has not as constants."""

    def total(hidden: Any, weight: Any, bias: Any, more: dict[str, Any]) -> Any:
        given = options | more | ({} if bias is None else {"bias": bias})
        return cases.objective(function(hidden, weight, problem.labels, **given), problem.seeds)

    return jax.jit(jax.grad(total, argnums=(0, 1, 2) if "bias" in problem.options else (0, 1)))


def errors_of_stored(problem: Problem) -> np.ndarray:
    """The largest for these hidden states and a cap, and for some a thousandth larger.

    Where two logits of a token are almost equal, one rounding decides. The others round otherwise.
    """
    options = dict(problem.options)
    bias, softcap = (options.pop(name, None) for name in ("bias", "logit_softcap"))
    program = gradients_of(problem, plain, **options)

    def errors_at(factor: float) -> np.ndarray:
        cap = {} if softcap is None else {"logit_softcap": jnp.float32(softcap * factor)}
        other = problem._replace(hidden=problem.hidden * jnp.float32(factor), options=problem.options | cap)
        return other.errors(program(other.hidden, other.weight, bias, cap))

    return np.max([errors_at(1 + k / 1024) for k in range(5)], axis=0)


def assert_as_exact_as_stored(problem: Problem, found: Any) -> None:
    assert all(np.isfinite(x).all() for x in found)
    assert not np.asarray(found[0])[-EACH:].any()
    ours, stored = problem.errors(found), errors_of_stored(problem)
    assert np.all(ours <= np.maximum(2 * stored, FLOOR)), (ours, stored)


@pytest.mark.fast("cache, threshold-True", "candidates, softcap-False")
@combined(name=list(OPTIONS), greedy=[True, False])
def test_gradients(name: str, greedy: bool) -> None:
    problem = draw(greedy, **OPTIONS[name])
    call = functools.partial(linear_logprobs, precision="highest")
    assert_as_exact_as_stored(problem, gradients(problem, call))


def loss(function: Any, problem: Problem, **more: Any) -> Any:
    """The gradients of the same objective as a loss of each token."""

    def token_loss(logprob: Any, entropy: Any, lse: Any, *seeds: Any) -> Any:
        return sum(seed * x for seed, x in zip(seeds, (logprob, entropy, lse), strict=True))

    def total(hidden: Any, weight: Any) -> Any:
        options = {**problem.options, "precision": "highest", **more}
        return function(token_loss, hidden, weight, problem.labels, *problem.seeds, **options)[0]

    return jax.jit(jax.grad(total, argnums=(0, 1)))(problem.hidden, problem.weight)


@pytest.mark.slow
@combined(sharded=[False, True], greedy=[True, False])
def test_linear_loss(sharded: bool, greedy: bool) -> None:
    problem, function = draw(greedy), linear_loss
    if sharded:
        function = functools.partial(sharded_linear_loss, mesh=mesh())
    assert_as_exact_as_stored(problem, loss(function, problem, chunk_bytes=1))


def mesh() -> Any:
    return jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.fast("softcap-False")
@combined(name=["padded vocabulary, cache, threshold", "candidates, softcap"], greedy=[True, False])
def test_a_split_vocabulary(name: str, greedy: bool) -> None:
    """Its shards' statistics are merged as those of tiles are."""
    problem = draw(greedy, **OPTIONS[name])
    call = functools.partial(sharded_linear_logprobs, mesh=mesh(), precision="highest")
    assert_as_exact_as_stored(problem, gradients(problem, call))


@pytest.mark.slow
def test_label_smoothing_and_z_loss() -> None:
    """Against the same formula in float64, by autodiff."""
    problem = draw(greedy=False)
    weights = problem.options["temperature"] * (problem.options["temperature"] > PADDING)

    def ours(hidden: Any, weight: Any) -> Any:
        more = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "precision": "highest"}
        return jnp.sum(weights * linear_cross_entropy(hidden, weight, problem.labels, **problem.options, **more))

    def stored(hidden: Any, weight: Any) -> Any:
        z = jnp.matmul(hidden, weight.T, precision="highest") / problem.options["temperature"][:, None]
        out = plain(hidden, weight, problem.labels, **problem.options)
        return jnp.sum(weights * (0.1 * (out.lse - z.mean(1)) - 0.9 * out.logprobs + 1e-3 * out.lse**2))

    operands = problem.hidden, problem.weight
    found, theirs = (jax.jit(jax.grad(f, argnums=(0, 1)))(*operands) for f in (ours, stored))
    with jax.enable_x64(True):
        true = jax.grad(stored, argnums=(0, 1))(*(x.astype(jnp.float64) for x in operands))
    for x, y, exact in zip(*(problem.groups(*g) for g in (found, theirs, true)), strict=True):
        assert oracle.relative_norm(x, exact) <= max(2 * oracle.relative_norm(y, exact), FLOOR)


@pytest.mark.slow
def test_candidates_have_the_logprob_of_a_label() -> None:
    problem = draw(greedy=True, candidates=3)
    options = problem.options | {"candidates": problem.options["candidates"].at[:, 0].set(problem.labels)}
    operands = problem.hidden, problem.weight, problem.labels
    out = linear_logprobs(*operands, **options, precision="highest")
    assert np.array_equal(out.candidate_logprobs[:, 0], out.logprobs)
    true, stored = oracle.logprobs(*operands, **options), plain(*operands, **options)
    errors = (oracle.value_error(x.candidate_logprobs, true.candidate_logprobs) for x in (out, stored))
    ours, theirs = errors
    assert ours <= max(2 * theirs, FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "softcap", "bias", "candidates"])
def test_the_smallest_temperatures(name: str) -> None:
    """Below 1e-20 they count as 1e-20. What float32 cannot hold is in no gradient."""
    problem = draw(greedy=True, **OPTIONS[name])
    problem.options["temperature"] = jnp.full_like(problem.options["temperature"], 1e-37)
    call = functools.partial(linear_logprobs, precision="highest")
    out = jax.jit(lambda h, w: call(h, w, problem.labels, **problem.options))(problem.hidden, problem.weight)
    assert not np.asarray(out.logprobs).any()
    assert np.isfinite(out.lse).all()
    assert all(np.isfinite(x).all() for x in gradients(problem, call))
