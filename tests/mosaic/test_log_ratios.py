"""The kernels' logarithms of a mixture, in base 2, against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax.mathematics import _kl
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic._operands import LOG2E
from lce_jax.mosaic.common._heads import Reference, relative_log_ratios

EPS = float(np.finfo(np.float32).eps)


def log_of_mixture(d: np.ndarray, beta: float) -> np.ndarray:
    """The t of eq. 9, in float64."""
    far = np.maximum(d, 0.0)
    return -(far + np.log((1.0 - beta) * np.exp(-far) + beta * np.exp(d - far)))


@pytest.mark.parametrize("beta", [0.001, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("at", [-40.0, -1.0, 0.0, 3.0])
def test_both_logarithms_are_exact_to_rounding(beta: float, at: float) -> None:
    sizes = np.geomspace(1e-6, 200.0, 600)
    distance = np.concatenate([-sizes, [0.0], sizes]).astype(np.float32)
    d = (at + distance.astype(np.float64)).astype(np.float32)
    weights = Pair(jnp.float32(1.0 - beta), jnp.float32(beta))
    reference, log_at = _kl.MixtureReference.create(jnp.float32(at), weights, _kl.log_ratio)
    other = weights.teacher / reference.total
    rows = Reference(weights.student / reference.total, other, other * reference.ratio, reference.most * LOG2E)
    base_2 = relative_log_ratios(jnp.asarray(d) * LOG2E, jnp.asarray(distance) * LOG2E, rows)
    of_p, of_q = (np.asarray(log, np.float64) / LOG2E for log in base_2)

    d64, at64 = at + distance.astype(np.float64), np.asarray([at])
    t, t_at = log_of_mixture(d64, beta), log_of_mixture(at64, beta)
    # Near the reference by its own size: however small, no digit of it is lost.
    near = np.abs(distance) < 0.1
    exact = -np.log1p(beta * np.exp(at) * np.expm1(distance[near]) / (1 - beta + beta * np.exp(at)))
    assert np.all(np.abs(of_p[near] - exact) <= 8 * EPS * np.abs(exact))
    # Elsewhere by the largest number that takes part.
    largest = np.maximum(1.0, np.abs(d64))
    assert np.all(np.abs(of_p - (t - t_at)) <= 4 * EPS * largest)
    assert np.all(np.abs(of_q - (d64 + t - t_at)) <= 4 * EPS * largest)
    np.testing.assert_allclose(float(log_at), t_at[0], rtol=4 * EPS, atol=1e-45)
