"""A floor of the logits: every way of calling, its boundary, empty sets, refusals. `test_parity` has its values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax import explain, linear_logprobs, linear_loss
from tests import cases, oracle
from tests.agreement import evaluate
from tests.small_call import HIDDEN, LABELS, WEIGHT

PLAIN = cases.case("plain", leading=(24,), V=104, floor=7, stats=True, labels="foreign")


def test_a_loss_in_the_forward_and_vmap() -> None:
    hidden, weight, labels, options, _ = cases.draw(PLAIN)
    floor = options["logit_floor"]

    def loss(logprob, entropy, lse, advantage):
        return -advantage * logprob - 0.1 * entropy + 0.01 * lse

    def loss_in_forward(hidden, weight, labels, floor):
        more = {"logit_floor": floor, "chunk_bytes": 1, "precision": "highest"}
        return linear_loss(loss, hidden, weight, labels, jnp.cos(labels), **more)[0]

    def loss_of_results(hidden, weight, labels, floor):
        out = linear_logprobs(hidden, weight, labels, logit_floor=floor, precision="highest")
        return jnp.sum(jax.vmap(loss)(*out[:3], jnp.cos(labels)))

    want = jax.jit(jax.value_and_grad(loss_of_results, argnums=(0, 1)))(hidden, weight, labels, floor)
    got = jax.jit(jax.value_and_grad(loss_in_forward, argnums=(0, 1)))(hidden, weight, labels, floor)
    assert oracle.value_error(got[0], want[0]) < 2e-5  # a sum of 24 tokens
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got[1], want[1], strict=True))
    halves = (hidden.reshape(2, 12, -1), labels.reshape(2, 12), floor.reshape(2, 12))
    sums = jax.jit(jax.vmap(lambda h, y, f: loss_of_results(h, weight, y, f)))(*halves)
    assert oracle.value_error(jnp.sum(sums), want[0]) < 2e-5


def test_a_floor_that_all_reach_changes_no_bit() -> None:
    test = cases.case("none", leading=(24,), V=104, stats=True)
    want = evaluate(test)
    got = evaluate(test, logit_floor=-jnp.inf)
    for a, b in zip(jax.tree.leaves((got[0]._replace(support=None), got[1])), jax.tree.leaves(want), strict=True):
        assert np.array_equal(a, b)
    assert np.all(got[0].support == 104)
    in_half = np.asarray(-np.inf, jnp.bfloat16)[()]  # NumPy's scalars of ml_dtypes are no floats of NumPy
    assert explain(HIDDEN, WEIGHT, LABELS, logit_floor=in_half).implementation


def test_the_boundary_is_inside_and_the_label_is_in_any_set() -> None:
    weight, hidden = jnp.array([[1.0], [2.0], [4.0], [8.0]]), jnp.ones((3, 1))
    out = linear_logprobs(hidden, weight, jnp.array([3, 3, 0]), stats=True, logit_floor=jnp.array([4.0, 4.000001, 4.0]))
    assert out.support.tolist() == [2, 1, 3]
    assert np.allclose(out.lse, np.log(np.exp([4, -np.inf, 4.0]) + np.exp(8) + np.exp([-np.inf, -np.inf, 1])))
    assert out.min_logit.tolist() == [4.0, 8.0, 1.0]


def test_a_row_without_a_token_is_zero_and_one_with_nan_is_nan() -> None:
    labels, floor = jnp.array([3, -100, 5, 7]), jnp.array([0.0, jnp.inf, jnp.nan, jnp.inf])

    def run(hidden, weight, floor):
        out = linear_logprobs(hidden, weight, labels, logit_floor=floor, stats=True, logit_softcap=4.0)
        return jnp.nansum(out.lse + out.entropy + out.logprobs), out

    hidden = jax.random.normal(jax.random.key(0), HIDDEN.shape)
    (_, out), grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(hidden, WEIGHT, floor)
    values = np.stack(out[:5])
    assert np.all(values[:, 1] == 0)
    assert np.all(np.isnan(values[:, 2]))
    assert np.all(np.isfinite(values[:, [0, 3]]))
    assert out.support[1:].tolist() == [0, -1, 1]
    assert out.logprobs[3] == out.entropy[3] == 0
    assert np.all(np.isfinite(grads[1]))
    assert np.all(np.asarray(grads[0])[1:3] == 0)
