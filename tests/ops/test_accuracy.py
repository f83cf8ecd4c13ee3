"""Token accuracy: ``correct`` is exact, also with ties, across tiles, shards and layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests.pairs import combined, values_of

T, H, V = 640, 8, 1600
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"vocab_size": 1111},
    "scale below 0": {"logit_scale": -0.5},
    "saturated cap": {"logit_softcap": 2.0},  # tanh rounds to 1: the largest logit is tied
    "temperature": {"temperature": 0.3},
    "no entropy": {"entropy": False},
}


def draw(vocab_size: int = V, logit_scale: float = 1.0, **_: Any) -> tuple[jax.Array, ...]:
    """Whole numbers, whose products are exact and tie often; labels, half of them a largest column."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((T, H), (V, H)))
    z = np.sign(logit_scale) * hidden @ weight[:vocab_size].T
    best = np.stack([rng.choice(np.flatnonzero(row == row.max())) for row in z])
    labels = np.where(rng.random(T) < 0.5, best, rng.integers(0, V, T))
    labels = np.where(rng.random(T) < 0.1, rng.choice([-100, V, vocab_size, -1], T), labels)
    return jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(labels, jnp.int32), jnp.asarray(rng.random(T) < 0.7)


def stored_results(hidden, weight, labels, where=None, vocab_size=V, logit_scale=1.0, logit_softcap=None, **_: Any):
    z = logit_scale * jnp.matmul(hidden, weight[:vocab_size].T, precision="highest")
    z = z if logit_softcap is None else logit_softcap * jnp.tanh(z / logit_softcap)
    owned = (labels >= 0) & (labels < vocab_size)
    at_label = jnp.take_along_axis(z, jnp.where(owned, labels, 0)[:, None], axis=1)[:, 0]
    correct = owned & (at_label == z.max(1))
    return np.asarray(correct if where is None else correct & where)


@pytest.mark.fast("True-plain", "False-padded", "True-saturated cap")
@combined(name=list(OPTIONS), with_where=[True, False])
def test_equals_stored_logits(name: str, with_where: bool) -> None:
    options = OPTIONS[name]
    hidden, weight, labels, where = draw(**options)
    where = where if with_where else None
    want = stored_results(hidden, weight, labels, where, **options)
    assert 0.2 < want.mean() < 0.8

    def correct(hidden: Any) -> jax.Array:
        return linear_logprobs(hidden, weight, labels, where=where, stats=True, **options).correct

    got = jax.jit(correct)(hidden)
    assert got.dtype == jnp.bool_
    assert np.array_equal(got, want)


@pytest.mark.slow
def test_only_with_stats_and_beside_gradients() -> None:
    hidden, weight, labels, _ = draw()
    assert linear_logprobs(hidden, weight, labels).correct is None

    def loss(hidden, stats):
        out = linear_logprobs(hidden, weight, labels, stats=stats)
        return out.logprobs.sum(), out

    (_, out), with_stats = jax.value_and_grad(loss, has_aux=True)(hidden, True)
    assert np.array_equal(out.correct, stored_results(hidden, weight, labels))
    assert np.array_equal(with_stats, jax.grad(loss, has_aux=True)(hidden, False)[0])


@pytest.mark.slow
def test_under_vmap_and_without_tokens() -> None:
    hidden, weight, labels, _ = draw()
    batched = jax.vmap(lambda h, y: linear_logprobs(h, weight, y, stats=True).correct)
    assert np.array_equal(
        batched(hidden.reshape(4, -1, H), labels.reshape(4, -1)).reshape(-1), stored_results(hidden, weight, labels)
    )
    nothing = linear_logprobs(hidden[:0], weight, labels[:0], stats=True).correct
    assert (nothing.shape, nothing.dtype) == ((0,), jnp.bool_)


@pytest.mark.slow
@values_of("axis_type", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])
def test_over_a_mesh(axis_type: AxisType) -> None:
    options = OPTIONS["padded"]
    hidden, weight, labels, where = draw(**options)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        call = dict(options, where=where, batch_axes="data", stats=True)
        got = jax.jit(lambda h, w: sharded_linear_logprobs(h, w, labels, **call).correct)(hidden, weight)
    assert got.dtype == jnp.bool_
    assert np.array_equal(got, stored_results(hidden, weight, labels, where, **options))
