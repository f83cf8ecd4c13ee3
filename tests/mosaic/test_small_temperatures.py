"""The kernels' gradients at small temperatures, interpreted: as exact as a rounded one of stored float32 logits.

Rows have temperatures from 1 to 1e-6, as in tests/mathematics/test_small_temperatures.py; the last ones 1e-8 and no
cotangent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _generations
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.types import _types
from lce_jax.types._types import LogprobOutput, Operands, Results
from tests import cases, oracle
from tests.mathematics.test_numerics import plain
from tests.mathematics.test_small_temperatures import PADDING, TEMPERATURES
from tests.mosaic.test_interpret import kernels_of
from tests.mosaic_cases import Case, case, coefficients, make_call, traced
from tests.mosaic_interpreter import afresh

EACH = 17
SHAPE = {"T": EACH * (len(TEMPERATURES) + 1), "H": 64, "V": 520}
CASES = [
    case("recomputed, greedy", **SHAPE, entropy=False),
    case("half a cache, greedy", **SHAPE, cache_bytes=100_000),
    case("half a cache, softcap, random", **SHAPE, cache_bytes=100_000, logit_softcap=5.0),
    case("threshold, stats, greedy", **SHAPE, gradient_threshold=1e-3, stats=True),
    case("threshold, softcap, random", **SHAPE, gradient_threshold=1e-3, logit_softcap=5.0),
    case("columns that no kernel covers, greedy", **SHAPE | {"V": 517}, num_columns=400),
    case("columns that no kernel covers, random", **SHAPE | {"V": 517}, num_columns=400),
    case("candidates, cache, random", **SHAPE, cache_bytes=1 << 30, num_candidates=3, num_columns=500),
]


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    with _generations.using(kernels_of(request.param)), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield request.param


def draw(test: Case) -> tuple[Operands, list[jax.Array], jax.Array]:
    """Operands, cotangents in proportion to the temperature, and the temperature."""
    rng = np.random.default_rng(0)
    columns = test.V if test.num_columns is None else test.num_columns
    hidden, weight = rng.standard_normal((test.T, test.H)), rng.standard_normal((test.V, test.H)) / 4
    hidden, weight = (np.asarray(jnp.asarray(x, test.dtype), np.float64) for x in (hidden, weight))
    best = (hidden @ weight[:columns].T).argmax(1)
    targets = best if "greedy" in test.name else rng.integers(-1, columns, test.T)
    temperature = np.repeat([*TEMPERATURES, PADDING], EACH)
    g = np.where(temperature == PADDING, 0.0, temperature)
    K, float32 = test.options.num_candidates, jnp.float32
    operands = Operands(
        hidden=jnp.asarray(hidden, test.dtype),
        weight=jnp.asarray(weight, test.dtype),
        targets=jnp.asarray(targets, jnp.int32),
        inverse_temperature=jnp.asarray(1 / temperature, float32),
        num_rows=None,
        num_columns=test.num_columns,
        candidates=jnp.asarray(rng.integers(0, columns, (test.T, K)), jnp.int32) if K else None,
    )
    seeds = [jnp.asarray(g * rng.standard_normal(test.T), float32) for _ in range(3)]
    seeds[1] *= test.options.entropy
    if K:
        seeds.append(jnp.asarray(g[:, None] * rng.standard_normal((test.T, K)), float32))
    return operands, seeds, jnp.asarray(temperature, float32)


def of_kernels(test: Case, call: _types.Call, operands: Operands, seeds: list[jax.Array]) -> Any:
    cotangent = Results(LogprobOutput(*seeds[:3], candidate_logprobs=(*seeds, None)[3]))

    def run(operands: Operands) -> Any:
        stats, cache = mosaic.statistics(operands, call, True)
        if call.gradient_threshold:
            cache, dropped = mosaic.select_tiles(call, cache, Normalizer(stats.max, stats.sumexp), None)
            assert (dropped is not None) == test.options.stats
        rows = coefficients(test, stats, cotangent, operands)
        return mosaic.gradients(operands, call, rows, cache)[:2]

    return traced(run, operands)


def of_stored_logits(test: Case, operands: Operands, seeds: list[jax.Array], options: Any) -> Any:
    """Their gradient in float32, rounded once to the weight's dtype, as the kernels' is."""
    hidden, weight = (x.astype(jnp.float32) for x in operands[:2])
    raw = jnp.matmul(hidden, weight.T, precision="highest")

    def total(raw: Any) -> Any:
        out = plain(raw, jnp.eye(test.V), jnp.maximum(operands.targets, 0), **options)
        foreign = jnp.where(operands.targets < 0, -out.lse, out.logprobs)  # the rule's gradient, not its value
        return cases.objective(out._replace(logprobs=foreign), seeds)

    d = np.asarray(jax.grad(total)(raw).astype(test.dtype), np.float64)
    dweight = d.T @ np.asarray(hidden, np.float64)
    return d @ np.asarray(weight, np.float64), np.asarray(jnp.asarray(dweight, test.dtype), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("test", CASES, ids=str, indirect=True)
def test_gradients(test: Case) -> None:
    check(test, make_call(test))


def check(test: Case, call: _types.Call) -> None:
    operands, seeds, temperature = draw(test)
    options = {"temperature": temperature, "logit_softcap": test.options.logit_softcap, "vocab_size": test.num_columns}
    options["candidates"] = operands.candidates
    true = oracle.gradients(*operands[:3], seeds, **options)

    def errors(dhidden: Any, dweight: Any) -> np.ndarray:
        groups = [*np.split(np.asarray(dhidden), len(TEMPERATURES) + 1)[:-1], dweight]
        exact = [*np.split(true[0], len(TEMPERATURES) + 1)[:-1], true[1]]
        return np.array([oracle.relative_norm(*pair) for pair in zip(groups, exact, strict=True)])

    found = of_kernels(test, call, operands, seeds)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in found)
    assert not np.asarray(found[0])[-EACH:].any()
    ours, stored = errors(*found), errors(*of_stored_logits(test, operands, seeds, options))
    assert np.all(ours <= 2 * stored), (ours, stored)
