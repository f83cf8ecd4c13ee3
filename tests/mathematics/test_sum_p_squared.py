"""``sum_p_squared``, Σ p², to float32's rounding: of flat, peaked and far distributions, over tiles and shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import explain, linear_logprobs, sharded_linear_logprobs
from tests import oracle

pytestmark = pytest.mark.usefixtures("optimized")
T, H, V = 6, 8, 520
NEAR = 2e-6  # relative: Σ e^2u and s² have the errors of float32 sums


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of 0, of order 1 and 10, one that takes all, two that share it, and ones that are far from 0."""
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = jax.random.normal(keys[0], (T, H)) * jnp.array([0.0, 1, 10, 300, 0, 1])[:, None]
    weight = jax.random.normal(keys[1], (V, H)).at[:, 0].set(0).at[7:9, 0].set(100.0).at[:, 1].set(1.0)
    hidden = hidden.at[4].set(0).at[4, 0].set(1.0).at[5, 1].set(4096.0)  # V at a distance of 4096
    return hidden, weight, jnp.arange(T)


@functools.cache
def wanted() -> np.ndarray:
    return oracle.logprobs(*operands(), temperature=1.7).sum_p_squared


@pytest.mark.slow
def test_values() -> None:
    found = linear_logprobs(*operands(), temperature=1.7, stats=True, precision="highest").sum_p_squared
    distance = np.abs(np.asarray(found) - wanted()) / wanted()
    assert distance[:5].max() <= NEAR
    assert distance[5] <= 2e-3  # logits of 4096 have errors of 2.4e-4 themselves
    assert found[0] == pytest.approx(1 / V)
    assert found[4] == pytest.approx(0.5)


@pytest.mark.slow
def test_over_a_mesh() -> None:
    mesh, options = jax.make_mesh((4,), ("tensor",)), {"temperature": 1.7, "stats": True, "precision": "highest"}
    found = sharded_linear_logprobs(*operands(), mesh=mesh, **options).sum_p_squared
    assert np.all((np.abs(found - wanted()) / wanted())[:5] <= NEAR)


def test_it_costs_nothing_unless_asked_for() -> None:
    assert jax.eval_shape(linear_logprobs, *operands()).sum_p_squared is None
    assert explain(*operands()).kept_bytes < explain(*operands(), stats=True).kept_bytes


@pytest.mark.slow
def test_no_gradient() -> None:
    hidden, weight, labels = operands()
    where = labels != 3
    function = functools.partial(linear_logprobs, labels=labels, stats=True, where=where)
    assert function(hidden, weight).sum_p_squared[3] == 0
    grad = jax.grad(lambda hidden: function(hidden, weight).sum_p_squared.sum())(hidden)
    assert not grad.any()
