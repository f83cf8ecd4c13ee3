"""`linear_logits` of global arrays: partitioned by their types, or by the axes that the caller names."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logits, sharded_linear_logits
from lce_jax.mesh import _custom_partitioning
from tests import cases, oracle
from tests.ops.test_logits import call, evaluate, expected
from tests.partition_cases import names, put
from tests.sharding_cases import mesh_of

CALL = call(cases.case(
    "split", leading=(4, 8), V=128, K=6, vocab_size=101, where="nan", temperature="token", logit_softcap=3.0,
    weight_layout="hv", bias="float32",
))  # fmt: skip


def assert_expected(z: Any, gradients: Any) -> None:
    want, wanted = expected(*CALL)
    assert oracle.value_error(z, want) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("place", [(P("data"), P(None, "tensor")), (P("data"), P("tensor"))], ids=str)
def test_operands_over_explicit_axes_split_the_work(place: tuple[P, P]) -> None:
    """Gradients are split as their operands are, also where hidden's sequence or H is split."""
    mesh = mesh_of("data 2, tensor 4", AxisType.Explicit)
    (hidden, weight, bias), *rest = CALL
    operands = put(hidden, mesh, place[0]), put(weight, mesh, place[1]), put(bias, mesh, P("tensor"))
    z, gradients = evaluate(operands, *rest)
    assert_expected(z, gradients)
    for gradient, operand in zip(gradients, operands, strict=True):
        assert names(gradient) == names(operand)
    assert z.sharding.shard_shape(z.shape)[0] == 2


def test_auto_axes(caplog: pytest.LogCaptureFixture) -> None:
    """XLA splits the call by a rule: no device has the whole weight."""
    mesh = mesh_of("data 2, tensor 4", AxisType.Auto)
    hidden, weight = jnp.ones((4, 8)), jnp.arange(16.0)[:, None] * jnp.ones(8)
    ids = jnp.array([[3, 15]] * 4)
    _custom_partitioning.warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, "lce_jax"):
        operands = put(hidden, mesh, P("data")), put(weight, mesh, P("tensor"))
        run = jax.jit(jax.value_and_grad(lambda h, w: linear_logits(h, w, ids).sum(), argnums=(0, 1)))
        compiled = run.lower(*operands).compile()
        z, gradients = jax.jit(linear_logits)(*operands, ids), compiled(*operands)[1]
        told = sharded_linear_logits(*operands, ids, mesh=mesh, vocab_axis="tensor", batch_axes="data")
    assert not caplog.text
    assert z.tolist() == told.tolist() == [[24.0, 120.0]] * 4
    assert "all-gather" not in compiled.as_text()
    for gradient, operand in zip(gradients, operands, strict=True):
        assert names(gradient) == names(operand)
    want = jax.grad(lambda h, w: jnp.take_along_axis(h @ w.T, ids, 1).sum(), argnums=(0, 1))(hidden, weight)
    assert all(np.array_equal(a, b) for a, b in zip(gradients, want, strict=True))


@pytest.mark.parametrize(("changed", "message"), [
    (dict(stats=True), "sharded_linear_logits has no option stats"),
    (dict(entropy=True), "sharded_linear_logits has no option entropy"),
    (dict(id=3), "unknown option id"),
])  # fmt: skip
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    (hidden, weight, _), ids, *_ = CALL
    with pytest.raises(TypeError, match=message):
        sharded_linear_logits(hidden, weight, ids, mesh=mesh_of("tensor 8", AxisType.Auto), **changed)
