"""`xla` on the case matrix, values and gradients, against float64.

The kernels: `tests.mosaic.test_interpret`, and on a GPU `tests.gpu.test_parity` and `tests.gpu.test_mosaic_gpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import LogprobOutput, linear_logprobs
from tests import cases, oracle
from tests.pairs import values_of

# Rounding as users get it, of `cases.MATRIX`.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
CALLS = cases.MATRIX + cases.BIASED + cases.CANDIDATES + cases.FLOORS
# float32: the issue's bounds, a few roundings. 16 bit: the products are exact in float32, so values stay near float64's
# for the same inputs; gradients carry one rounding of dlogits and are held to the materialised path's own error below.
VALUE_BOUND = {"float32": 2e-6, "bfloat16": 1e-4, "float16": 1e-4}
GRADIENT_BOUND = 1e-5

# Cases that differ in their rows alone: blocks of 24 rows of one call. All calls of a list and dtype are one program.
BLOCKS = {
    "plain", "three leading dimensions", "foreign labels", "where", "where true everywhere", "where hides NaN",
    "temperature per token", "temperature per sequence", "peaked", "precision",
}  # fmt: skip
LEADING = (2, 3, 4)
ARRAY = jax.Array, np.ndarray


class Call(NamedTuple):
    """A case's operands, what its results are seeded with, and its options."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    seeds: list[jax.Array]
    options: dict[str, Any]

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return (self.hidden, self.weight, *([self.options["bias"]] if "bias" in self.options else []))


@functools.cache
def drawn(test: cases.TestCase) -> Call:
    """A block has the weight that all blocks share; its logits are spread by its hidden states."""
    hidden, weight, labels, options, seeds = cases.draw(test)
    options = {"precision": "highest"} | options
    if is_block(test):
        weight = cases.draw(cases.MATRIX[0])[1]
        hidden, seeds = np.asarray(hidden) * test.spread, [np.asarray(seed) / test.spread for seed in seeds]
    return Call(hidden, weight, labels, seeds, options)


def is_block(test: cases.TestCase) -> bool:
    return test.name in BLOCKS and test in cases.MATRIX


def stack_blocks(blocks: list[Call]) -> Call:
    """One call of all their rows."""

    def rows(each: Iterable[Any]) -> np.ndarray:
        return np.stack([np.reshape(x, (*LEADING, -1) if np.size(x) > 24 else LEADING) for x in each])

    def option(name: str, default: Any) -> np.ndarray:
        return rows(np.broadcast_to(call.options.get(name, default), call.labels.shape) for call in blocks)

    options = {"where": option("where", True), "temperature": option("temperature", np.float32(1.0))}
    hidden, labels = (rows(getattr(call, name) for call in blocks) for name in ("hidden", "labels"))
    seeds = [rows(each) for each in zip(*(call.seeds for call in blocks), strict=True)]
    return Call(hidden, blocks[0].weight, labels, seeds, options | {"precision": "highest"})


def step(call: Call, implementation: str, with_stored: bool) -> Any:
    """Outputs and gradients of a call, and what stored logits have for gradients."""

    def objective(*operands: Any) -> Any:
        options = add_bias(call.options, operands)
        out = linear_logprobs(*operands[:2], call.labels, implementation=implementation, **options)
        return cases.objective(out, call.seeds), out

    argnums = tuple(range(len(call.operands)))
    gradients, out = jax.grad(objective, argnums=argnums, has_aux=True)(*call.operands)
    return out, gradients, materialised(*call) if with_stored else None


@functools.cache
def together(tests: tuple[cases.TestCase, ...], implementation: str) -> dict[str, Any]:
    """By name, what `step` returns: a block has its rows' part, and of dweight the sum over all blocks."""
    calls = {test.name: drawn(test) for test in tests}
    blocks = [test.name for test in tests if is_block(test)]
    joined = calls if not blocks else {"blocks": stack_blocks([calls[name] for name in blocks])}
    joined |= {name: call for name, call in calls.items() if name not in blocks}
    with_stored = tests[0].dtype != "float32"
    static = {
        name: {k: x for k, x in call.options.items() if not isinstance(x, ARRAY)} for name, call in joined.items()
    }
    arrays = {
        name: call._replace(options={k: x for k, x in call.options.items() if isinstance(x, ARRAY)})
        for name, call in joined.items()
    }

    @functools.partial(jax.jit, compiler_options=OPTIMIZED if tests[0] in cases.MATRIX else None)
    def run(arrays: dict[str, Call]) -> Any:
        return {
            name: step(call._replace(options=call.options | static[name]), implementation, with_stored)
            for name, call in arrays.items()
        }

    found = run(arrays)
    if blocks:
        out, (dhidden, dweight), _ = found.pop("blocks")
        for i, name in enumerate(blocks):
            shape = calls[name].labels.shape
            own = jax.tree.map(lambda x, i=i, shape=shape: np.asarray(x[i]).reshape(shape), out)
            found[name] = own, (dhidden[i].reshape(*shape, -1), dweight), None
    return found


@functools.cache
def group_of(test: cases.TestCase) -> tuple[cases.TestCase, ...]:
    """The cases of its program."""
    for some in (cases.MATRIX, cases.BIASED, cases.CANDIDATES, cases.FLOORS):
        if test in some:
            kinds = [(one.dtype == "float32", one in cases.SLOW) for one in (test, *some)]
            return tuple(one for one, kind in zip(some, kinds[1:], strict=True) if kind == kinds[0])
    return (test,)


def evaluate(test: cases.TestCase, implementation: str = "xla") -> Any:
    """Outputs, gradients, those of stored logits, and the call."""
    hidden, weight, labels, seeds, options = drawn(test)
    if not options.get("entropy", True):
        seeds = [seeds[0], 0 * seeds[1], *seeds[2:]]
    return *together(group_of(test), implementation)[test.name], Call(hidden, weight, labels, seeds, options)


@functools.cache
def dweight_of_blocks() -> np.ndarray:
    """In float64, summed as the call sums it."""
    calls = [drawn(test) for test in cases.MATRIX if is_block(test)]
    return sum(oracle.gradients(*call[:4], **call.options)[1] for call in calls)


def add_bias(options, operands):
    return options if len(operands) == 2 else options | {"bias": operands[2]}


def materialised(hidden, weight, labels, seeds, options):
    """The gradients of what users write today, logits in the weight's dtype."""

    def objective(hidden, weight, *bias):
        matrix = weight if options.get("weight_layout", "vh") == "vh" else weight.T
        z = (hidden.astype(weight.dtype) @ matrix.T).astype(jnp.float32) + sum(bias)
        if options.get("logit_softcap"):
            z = options["logit_softcap"] * jnp.tanh(z / options["logit_softcap"])
        if "logit_floor" in options:
            inside = (z >= options["logit_floor"][..., None]) | (jnp.arange(z.shape[-1]) == labels[..., None])
            z = jnp.where(inside, z, -1e30)
        lse = jax.nn.logsumexp(z, axis=-1)
        log_p = z - lse[..., None]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        logprobs = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        of_candidates = None
        if "candidates" in options:
            ids = options["candidates"]
            owned = (ids >= 0) & (ids < z.shape[-1])
            of_candidates = jnp.where(owned, jnp.take_along_axis(log_p, jnp.where(owned, ids, 0), axis=-1), 0)
        return cases.objective(LogprobOutput(logprobs, entropy, lse, candidate_logprobs=of_candidates), seeds)

    operands = (hidden, weight, options["bias"]) if "bias" in options else (hidden, weight)
    return jax.grad(objective, argnums=tuple(range(len(operands))))(*operands)


@values_of("test", CALLS, slow=cases.SLOW)
def test_matches_float64(test: cases.TestCase) -> None:
    check(test)


def check(test: cases.TestCase, implementation: str = "xla", slack: float = 1.0) -> None:
    """All results and gradients; those of 16 bits are at most ``slack`` times as far off as the materialised path's."""
    out, (dhidden, dweight, *dbias), plain, (hidden, weight, labels, seeds, options) = evaluate(test, implementation)
    product_hidden = hidden.astype(weight.dtype)  # what the products see, by contract
    want = oracle.logprobs(product_hidden, weight, labels, **options)
    for name, got in out._asdict().items():
        expected = {"entropy": options.get("entropy", True), "max_logit": options.get("stats", False)}
        expected |= dict.fromkeys(("min_logit", "correct", "sum_p_squared"), expected["max_logit"])
        expected["candidate_logprobs"], expected["dropped_mass"] = test.K > 0, False  # there is no threshold
        expected["support"] = options.get("stats", False) and test.floor > 0
        if not expected.get(name, True):
            assert got is None, name
            continue
        assert got.shape == ((*labels.shape, test.K) if name == "candidate_logprobs" else labels.shape), name
        assert got.dtype == {"correct": jnp.bool_, "support": jnp.int32}.get(name, jnp.float32), name
        # Logits beyond ±30 carry more rounding than results near 0 can hide.
        bound = VALUE_BOUND[test.dtype] * max(1.0, test.spread / 10)
        assert oracle.value_error(got, getattr(want, name)) <= bound, name
    assert dhidden.dtype == hidden.dtype
    assert dweight.dtype == weight.dtype
    if options.get("where") is not None:
        left_out = ~np.asarray(options["where"])
        assert all(np.all(np.asarray(field)[left_out] == 0) for field in (*jax.tree.leaves(out), dhidden))
        assert np.all(np.isfinite(np.asarray(dweight, np.float32)))
    wanted = list(oracle.gradients(product_hidden, weight, labels, seeds, **options))
    if is_block(test):
        wanted[1] = dweight_of_blocks()
    if weight.dtype == jnp.float32:
        # A 16-bit hidden beside a float32 weight gets its gradient rounded once, to half a unit in the last place.
        rounding = float(jnp.finfo(hidden.dtype).eps) / 2 if hidden.dtype != jnp.float32 else 0.0
        assert oracle.relative_norm(dhidden, wanted[0]) <= GRADIENT_BOUND + rounding
        assert oracle.relative_norm(dweight, wanted[1]) <= GRADIENT_BOUND
        for got in dbias:
            assert got.dtype == options["bias"].dtype
            rounding = float(jnp.finfo(got.dtype).eps) / 2 if got.dtype != jnp.float32 else 0.0
            assert oracle.relative_norm(got, wanted[2]) <= GRADIENT_BOUND + rounding
    else:
        for got, theirs, true in zip((dhidden, dweight, *dbias), plain, wanted, strict=True):
            # A float32 dbias has a few of float32's roundings, and so has theirs: which are larger is chance.
            chance = 1.5 if got.dtype == jnp.float32 else slack
            assert oracle.relative_norm(got, true) <= chance * oracle.relative_norm(theirs, true)


@values_of("test", [t for t in CALLS if dict(t.options).get("vocab_size")], slow=cases.SLOW)
def test_padding_columns_have_zero_gradient(test: cases.TestCase) -> None:
    _, (_, dweight, *dbias), _, (*_, options) = evaluate(test)
    dweight = dweight if options.get("weight_layout", "vh") == "vh" else dweight.T
    assert all(np.all(np.asarray(x[options["vocab_size"] :]) == 0) for x in (dweight, *dbias))


def test_float64_follows_the_weight() -> None:
    hidden, weight, labels, options, seeds = cases.draw(cases.case("everything in float64", logit_softcap=3.0))
    with jax.enable_x64(True):
        hidden, weight = (jnp.asarray(np.asarray(x), jnp.float64) for x in (hidden, weight))
        function = functools.partial(linear_logprobs, labels=labels, implementation="xla", **options)
        out = function(hidden, weight)
        grads = jax.jit(jax.grad(lambda h, w: cases.objective(function(h, w), seeds), argnums=(0, 1)))(hidden, weight)
        assert out.logprobs.dtype == jnp.float64
        assert oracle.value_error(out.entropy, oracle.logprobs(hidden, weight, labels, **options).entropy) < 1e-14
        wanted = oracle.gradients(hidden, weight, labels, seeds, **options)
        assert all(oracle.relative_norm(got, want) < 1e-13 for got, want in zip(grads, wanted, strict=True))


@pytest.mark.slow
def test_two_runs_are_bitwise_equal() -> None:
    test = cases.case("repeat", leading=(700,), V=1000, where="some")
    first, second = (jax.tree.leaves(together.__wrapped__((test,), "xla")) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "test", [cases.MATRIX[0], cases.MATRIX[8], cases.MATRIX[-7], cases.BIASED[0], *cases.CANDIDATES[::12]], ids=str
)
def test_oracle_against_finite_differences(test: cases.TestCase) -> None:
    hidden, weight, labels, options, seeds = cases.draw(test)
    labels = jnp.where(labels < 0, 3, labels)  # a foreign label's logprob is constant: no difference to measure
    labels = jnp.minimum(labels, options.get("vocab_size", test.V) - 1)
    hidden = jnp.nan_to_num(hidden, posinf=0.0, neginf=0.0)
    rng = np.random.default_rng(1)
    operands = [hidden, weight] + ([options["bias"]] if test.bias else [])
    operands = [np.asarray(x, np.float64) for x in operands]
    grads = oracle.gradients(*operands[:2], labels, seeds, **options)
    for which, grad in enumerate(grads):
        step = rng.standard_normal(grad.shape) * 1e-5

        def objective(sign: float, which: int = which, step: np.ndarray = step) -> float:
            moved = list(operands)
            moved[which] = moved[which] + sign * step
            results = oracle.logprobs(*moved[:2], labels, **add_bias(options, moved))
            fields = (*results[:3], results.candidate_logprobs)[: len(seeds)]
            return sum(float(np.sum(np.asarray(s, np.float64) * r)) for s, r in zip(seeds, fields, strict=True))

        assert np.isclose((objective(1) - objective(-1)) / 2, np.sum(grad * step), rtol=1e-6, atol=1e-12)
