"""Logits that share a large offset: what is relative to the largest logit stays right, and how far a mean is off."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType

import lce_torch_bridge
from lce_jax import explain, linear_cross_entropy, linear_logprobs, linear_topk, sharded_linear_topk
from lce_jax.mosaic import _mean_logit
from lce_jax.types._types import Operands
from tests.sharding_cases import mesh_of

T, H, V, K = 64, 32, 4096, 40
LIMITS = {8: 6e-6, 12: 1e-4, 20: 2.5e-2}  # of docs/limits.md, by the offset's exponent
SMOOTHING, USUAL = 0.1, 4e-6  # the usual error: of float32, with logits stored too


def draw(offset: float) -> tuple[Any, ...]:
    """Operands whose products are exact in float32 up to offsets of 2²⁰, and the logits without the offset."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.integers(-1, 2, (T, H)), rng.integers(-8, 9, (V, H)) / 8
    hidden[:, 0], weight[:, 0] = 1, 0.0
    z = hidden.astype(np.float64) @ weight.T
    weight[:, 0] = offset
    return hidden.astype(np.float32), weight.astype(np.float32), rng.integers(0, V, T), z


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


@pytest.mark.parametrize("exponent", LIMITS)
def test_a_smoothed_loss_is_off_by_what_limits_say(exponent: int) -> None:
    for offset in (2.0**exponent, -(2.0**exponent)):
        hidden, weight, labels, z = draw(offset)
        logp, bound = log_softmax(z), LIMITS[exponent]
        want = -(1 - SMOOTHING) * logp[np.arange(T), labels] - SMOOTHING * logp.mean(1)
        options: Any = {"label_smoothing": SMOOTHING, "reduction": "none"}
        got = linear_cross_entropy(*map(jnp.asarray, (hidden, weight, labels)), precision="highest", **options)
        assert np.max(np.abs(np.asarray(got, np.float64) - want)) < bound + USUAL
        by_torch = lce_torch_bridge.linear_cross_entropy(*map(torch.tensor, (hidden, weight, labels)), **options)
        assert np.max(np.abs(by_torch.double().numpy() - want)) < bound + USUAL
        # The kernels' mean, a product of hidden with the sum of the weight's rows.
        operands = Operands(jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(labels), None, None, None)
        call = explain(hidden, weight, labels, label_smoothing=SMOOTHING).call
        mean = np.asarray(_mean_logit.total(operands, call), np.float64) / V
        assert SMOOTHING * np.max(np.abs(mean - z.mean(1) - offset)) < bound


def test_log_probabilities_and_the_most_likely_are_right_at_any_offset() -> None:
    hidden, weight, labels, z = draw(2.0**20)
    logp = log_softmax(z)
    want = logp[np.arange(T), labels], -np.sum(np.exp(logp) * logp, 1), -np.sort(-logp, 1)[:, :K]
    hidden, weight = jnp.asarray(hidden), jnp.asarray(weight)
    out = linear_logprobs(hidden, weight, jnp.asarray(labels), precision="highest")
    alone = linear_topk(hidden, weight, K)
    shards = sharded_linear_topk(hidden, weight, K, mesh=mesh_of("tensor 8", AxisType.Auto))
    for got, exact in zip((*out[:2], alone.logprobs, shards.logprobs), (*want, want[2]), strict=True):
        assert np.max(np.abs(np.asarray(got, np.float64) - exact)) < USUAL
    jax.tree.map(np.testing.assert_array_equal, shards.ids, alone.ids)
