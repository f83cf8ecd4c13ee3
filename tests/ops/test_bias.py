"""The head's bias: vmap, shards, traced scales, losses and refusals. Values: `test_parity`; meshes: `test_sharding`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import UnsupportedError, explain, linear_cross_entropy
from tests import cases, oracle
from tests.agreement import assert_same, evaluate

PLAIN = cases.case("plain", leading=(4, 8), H=16, V=128, bias="float32")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"logit_scale": -1.3}, {"logit_scale": 1.3, "logit_softcap": 4.0}], ids=str)
def test_beside_a_traced_scale_and_softcap(options: dict[str, float]) -> None:
    traced = {name: jnp.float32(value) for name, value in options.items()}
    assert_same(evaluate(PLAIN, **traced), evaluate(PLAIN, **options))


@pytest.mark.fast("True")
@pytest.mark.parametrize("bias_batched", [False, True])
def test_under_vmap(bias_batched: bool) -> None:
    hidden, weight, labels, options, _ = cases.draw(PLAIN)
    bias = options["bias"]
    biases = np.stack([np.asarray(bias) * i for i in range(4)]) if bias_batched else bias

    def loss(hidden, weight, bias, labels):
        return linear_cross_entropy(hidden, weight, labels, bias=bias, label_smoothing=0.1)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    axes = (0, None, 0 if bias_batched else None, 0)
    got = jax.tree.map(np.asarray, jax.jit(jax.vmap(grad, in_axes=axes))(hidden, weight, biases, labels))
    hidden, labels = np.asarray(hidden), np.asarray(labels)
    for i in range(4):
        want = grad(hidden[i], weight, biases[i] if bias_batched else bias, labels[i])
        assert all(oracle.relative_norm(a[i], b) < 1e-5 for a, b in zip(got, want, strict=True))


def test_a_loss_of_no_tokens_has_a_zero_gradient() -> None:
    def loss(bias):
        return linear_cross_entropy(jnp.ones((0, 8)), jnp.ones((32, 8)), jnp.zeros((0,), int), bias=bias)

    assert np.all(np.asarray(jax.grad(loss)(jnp.ones((32,)))) == 0)


@pytest.mark.usefixtures("hopper")
def test_the_kernels_refuse_a_bias() -> None:
    struct = jax.ShapeDtypeStruct
    call = (struct((512, 256), jnp.bfloat16), struct((1024, 256), jnp.bfloat16), struct((512,), jnp.int32))
    plan = explain(*call, bias=struct((1024,), jnp.float32))
    assert plan.implementation == "xla"
    assert "the kernels' epilogues do not add a bias" in plan.refused["mosaic_gpu"]
    with pytest.raises(UnsupportedError, match="bias: the kernels"):
        explain(*call, bias=struct((1024,), jnp.float32), implementation="mosaic_gpu")
