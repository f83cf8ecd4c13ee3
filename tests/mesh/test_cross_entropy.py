"""The loss over a mesh equals the loss of one device, and so do its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, sharded_linear_cross_entropy
from tests import cases, oracle
from tests.pairs import combined
from tests.sharding_cases import LAYOUTS, B, H, S, V, mesh_of


@pytest.mark.fast("tensor-sum")  # test_every_function has the other layout, and no reduction
@combined(layout=["data 2, tensor 4", "data 4, tensor 2, sequence over tensor"], reduction=["mean", "sum", "none"])
def test_cross_entropy_over_a_mesh(layout: str, reduction: str) -> None:
    test = cases.case("loss", leading=(B, S), H=H, V=V, labels="foreign", temperature="token", where="some")
    hidden, weight, labels, options, _ = cases.draw(test)
    options |= {"vocab_size": 120, "ignore_index": -100, "label_smoothing": 0.1, "z_loss": 1e-3, "precision": "highest"}
    mesh, where = mesh_of(layout, AxisType.Auto), LAYOUTS[layout][2]

    def run(function, **kwargs):
        def loss(hidden, weight):
            value = function(hidden, weight, labels, reduction=reduction, **options, **kwargs)
            return jnp.sum(value * jnp.cos(jnp.arange(value.size).reshape(value.shape))), value

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, weight)

    (_, got), grads = run(sharded_linear_cross_entropy, mesh=mesh, **where)
    (_, want), wanted = run(linear_cross_entropy)
    assert oracle.value_error(got, want) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param((P(("data", "tensor")), P()), marks=pytest.mark.slow),
        (P("tensor"), P("data")),
        (P("data", None, "tensor"), P("tensor", "data")),
        pytest.param((P(), P()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loss_from_any_explicit_layout(specs: tuple[P, P]) -> None:
    test = cases.case("layouts", leading=(8, 8), H=16, V=V, labels="foreign")
    hidden, weight, labels, _, _ = cases.draw(test)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": -100, "vocab_size": 120, "precision": "highest"}
    want = linear_cross_entropy(hidden, weight, labels, **options)
    mesh = mesh_of("data 2, tensor 4", AxisType.Explicit)
    hidden, weight = (
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((hidden, weight), specs, strict=True)
    )
    with jax.set_mesh(mesh):
        got = jax.jit(lambda h, w: sharded_linear_cross_entropy(h, w, labels, batch_axes="data", **options))(
            hidden, weight
        )
    assert np.isclose(got, want, rtol=2e-6)


def test_no_tokens_over_a_mesh() -> None:
    mesh = mesh_of("data 2, tensor 4", AxisType.Auto)
    hidden, weight, labels = jnp.ones((0, H)), jnp.ones((V, H)), jnp.zeros((0,), jnp.int32)

    def loss(hidden, weight):
        return sharded_linear_cross_entropy(hidden, weight, labels, mesh=mesh, batch_axes="data")

    value, (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    assert float(value) == 0
    assert dhidden.shape == (0, H)
    assert np.all(np.asarray(dweight) == 0)
