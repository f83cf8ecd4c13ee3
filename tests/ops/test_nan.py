"""NaN in a hidden state, or in a row of the weight, is NaN in every result that depends on it: XLA's maximum of two
arrays loses it on CPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_cross_entropy, linear_kl, linear_logprobs, linear_topk
from tests.draws import Draws
from tests.pairs import values_of

T, H, V = 40, 64, 700
DRAWS = Draws()
HIDDEN, WEIGHT = DRAWS.normal(T, H), DRAWS.normal(V, H)
LABELS, LARGEST = jnp.arange(T), jnp.argmax(HIDDEN @ WEIGHT.T, -1)
FUNCTIONS = {
    "loss": lambda h, w: linear_cross_entropy(h, w, LABELS, reduction="none"),
    "smoothed": lambda h, w: linear_cross_entropy(h, w, LABELS, reduction="none", label_smoothing=0.1, z_loss=1e-4),
    "mean": lambda h, w: jnp.full(T, linear_cross_entropy(h, w, LABELS)),
    "log-probability": lambda h, w: linear_logprobs(h, w, LABELS, entropy=False),
    "entropy, stats": lambda h, w: linear_logprobs(h, w, LABELS, stats=True)._replace(correct=None),
    "correct": lambda h, w: jnp.where(linear_logprobs(h, w, LARGEST, stats=True).correct, 0.0, jnp.nan),
    "temperature": lambda h, w: linear_logprobs(h, w, LABELS, entropy=False, temperature=2.0),
    "softcap": lambda h, w: linear_logprobs(h, w, LABELS, entropy=False, logit_softcap=30.0),
    "floor": lambda h, w: linear_logprobs(h, w, LABELS, entropy=False, logit_floor=jnp.full(T, -5.0)),
    "threshold": lambda h, w: linear_logprobs(h, w, LABELS, entropy=False, gradient_threshold=1e-4),
    "kl": lambda h, w: linear_kl(h, w, 1.1 * HIDDEN, WEIGHT),
    "tv of a teacher": lambda h, w: linear_kl(1.1 * HIDDEN, WEIGHT, h, w, direction="tv"),
    "jsd of a teacher": lambda h, w: linear_kl(1.1 * HIDDEN, WEIGHT, h, w, direction="jsd"),
    "largest": lambda h, w: linear_topk(h, w, 3).lse,
}
pytestmark = pytest.mark.usefixtures("optimized")


@values_of("name", FUNCTIONS, slow=["smoothed", "mean", "temperature", "softcap", "kl"])
def test_nan_is_kept(name):
    function = jax.jit(FUNCTIONS[name])
    one, every = np.arange(T) == 2, np.ones(T, bool)
    of_hidden = every if name == "mean" else one
    for hidden, weight, expected in (
        (HIDDEN.at[2, 3].set(jnp.nan), WEIGHT, of_hidden),
        (HIDDEN, WEIGHT.at[117, 5].set(jnp.nan), every),
        (HIDDEN, WEIGHT.at[V - 1].set(jnp.nan), every),
    ):
        for found in jax.tree.leaves(function(hidden, weight)):
            np.testing.assert_array_equal(np.isnan(found), expected)


@values_of("name", ["loss", "kl", "threshold"], slow=["kl"])
def test_its_gradient_is_nan(name):
    def total(hidden, weight):
        return functools.reduce(jnp.add, (jnp.sum(x) for x in jax.tree.leaves(FUNCTIONS[name](hidden, weight))))

    dhidden, dweight = jax.grad(total, argnums=(0, 1))(HIDDEN.at[2, 3].set(jnp.nan), WEIGHT)
    np.testing.assert_array_equal(np.isnan(dhidden).any(1), np.arange(T) == 2)
    assert np.isnan(dweight).any()
