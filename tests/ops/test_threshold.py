"""``gradient_threshold`` at the public doors: checked, in every entry, and exact where no kernel runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import lce_jax

T, H, V = 24, 16, 300
THRESHOLD = 2.0**-12


def problem(leading: tuple[int, ...] = (T,)) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((*leading, H)) * 3
    arrays = (hidden, rng.standard_normal((V, H)), rng.integers(0, V, leading))
    return tuple(map(jnp.asarray, arrays))  # type: ignore[return-value]


def run(function: Any, leading: tuple[int, ...] = (T,), **options: Any) -> Any:
    """The outputs and the gradients of a sum of all that have one."""
    hidden, weight, labels = problem(leading)

    def objective(hidden: jax.Array, weight: jax.Array) -> Any:
        out = function(hidden, weight, labels, **options)
        return jnp.sum(out.logprobs) + jnp.sum(out.entropy * out.lse), out

    return jax.jit(jax.grad(objective, (0, 1), has_aux=True))(hidden, weight)


def test_gradients_are_exact_without_kernels() -> None:
    grads, out = run(lce_jax.linear_logprobs, gradient_threshold=0.5, stats=True)
    exact, plain = run(lce_jax.linear_logprobs, stats=True)
    assert plain.dropped_mass is None
    assert out.dropped_mass.shape == (T,)
    assert not np.any(out.dropped_mass)
    jax.tree.map(np.testing.assert_array_equal, (grads, out._replace(dropped_mass=None)), (exact, plain))
    assert run(lce_jax.linear_logprobs, gradient_threshold=0.5)[1].dropped_mass is None
    notes = lce_jax.explain(*problem(), gradient_threshold=0.5).notes
    assert any("gradient_threshold=0.5 is not used" in note for note in notes)


def test_every_entry_takes_it() -> None:
    where = jnp.arange(T) % 3 == 0
    hidden, weight, labels = problem()
    options: dict[str, Any] = {"gradient_threshold": THRESHOLD, "where": where}
    out = lce_jax.linear_logprobs(hidden, weight, labels, stats=True, **options)
    np.testing.assert_array_equal(out.dropped_mass, jnp.zeros(T))
    loss = lce_jax.linear_cross_entropy(hidden, weight, labels, reduction="sum", label_smoothing=0.1, **options)
    assert np.isfinite(loss)

    def loss(logprob: jax.Array, *_: jax.Array) -> jax.Array:
        return -logprob

    def step(weight: jax.Array) -> Any:
        return lce_jax.linear_loss(loss, hidden, weight, labels, stats=True, chunk_bytes=1, **options)

    (total, metrics), dweight = jax.jit(jax.value_and_grad(step, has_aux=True))(weight)
    np.testing.assert_allclose(total, -jnp.sum(out.logprobs), rtol=1e-6)
    np.testing.assert_array_equal(metrics.dropped_mass, jnp.zeros(T))
    assert dweight.shape == weight.shape
    empty = lce_jax.linear_logprobs(hidden[:0], weight, labels[:0], stats=True, gradient_threshold=THRESHOLD)
    assert empty.dropped_mass.shape == (0,)


@pytest.mark.fast("Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    options = {"stats": True, "gradient_threshold": THRESHOLD}
    leading = (4, 6)
    want = run(lce_jax.linear_logprobs, leading, **options)

    def sharded(*operands: Any, **options: Any) -> Any:
        return lce_jax.sharded_linear_logprobs(*operands, mesh=mesh, batch_axes="data", **options)

    grads, out = run(sharded, leading, **options)
    np.testing.assert_array_equal(out.dropped_mass, want[1].dropped_mass)
    for got, exact in zip(grads, want[0], strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-4)


def test_under_vmap() -> None:
    hidden, weight, labels = problem((3, 5))

    def one(hidden: jax.Array, labels: jax.Array) -> Any:
        return lce_jax.linear_logprobs(hidden, weight, labels, stats=True, gradient_threshold=THRESHOLD)

    assert jax.vmap(one)(hidden, labels).dropped_mass.shape == (3, 5)
