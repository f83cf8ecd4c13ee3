"""A temperature of 0, below 0 or not finite: refused where its values are known, confined to its row elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import explain, linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle
from tests.small_call import HIDDEN, LABELS, MESH, WEIGHT

WRONG = [0.0, -0.5, float("nan"), float("inf"), 1e-42]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_temperature_of_zero_in_an_array_is_refused_with_its_values(wrong: float, kind: Any) -> None:
    values = kind([1.0, wrong, 0.7, wrong], "float32")
    # 1e-42 is 0 where XLA flushes it; the message has the value as given
    message = r"temperature must be positive and finite .* in 2 of 4 rows, the first of them \(1,\)"
    for function in (linear_logprobs, explain, functools.partial(sharded_linear_logprobs, mesh=MESH)):
        with pytest.raises(ValueError, match=message) as error:
            function(HIDDEN, WEIGHT, LABELS, temperature=values)
        assert "e-4" in str(error.value) or f"is {wrong} in" in str(error.value)
    live = jnp.array([True, False, True, False])
    out = linear_logprobs(HIDDEN, WEIGHT, LABELS, temperature=values, where=live)
    assert np.all(np.isfinite(out.lse))


def test_a_traced_temperature_of_zero_stays_in_its_row() -> None:
    hidden, weight, labels, _, seeds = cases.draw(cases.case("rows", leading=(6,)))
    live = jnp.array([True] * 5 + [False])

    @jax.jit
    def step(temperature, where):
        def objective(hidden, weight):
            out = linear_logprobs(hidden, weight, labels, temperature=temperature, where=where, stats=True)
            return cases.objective(out, seeds), out

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)

    right = jnp.array([1.0, 1.0, 0.7, 1.0, 2.0, 1.0])
    for where, damaged in ((None, [1, 3, 5]), (live, [1, 3])):
        rest = np.delete(np.arange(6), damaged)
        counted = jnp.ones(6, bool) if where is None else where
        wanted, want = step(right, counted.at[jnp.array(damaged)].set(False))
        for wrong in WRONG:
            gradients, out = step(right.at[jnp.array([1, 3, 5])].set(wrong), where)
            for got, true in zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True):
                in_rows = np.asarray(got)[damaged]
                assert np.all(~in_rows if got.dtype == jnp.bool_ else np.isnan(in_rows))
                assert np.allclose(np.asarray(got)[rest], np.asarray(true)[rest], rtol=1e-6)
            assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


def test_a_temperature_of_zero_over_a_mesh() -> None:
    """The damage stays in its row."""
    values = jnp.array([1.0, 0.0, 0.7, 1.0])
    out = jax.jit(lambda t: sharded_linear_logprobs(HIDDEN, WEIGHT, LABELS, mesh=MESH, temperature=t))(values)
    assert np.array_equal(np.isnan(out.lse), [False, True, False, False])
