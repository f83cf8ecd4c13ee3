"""``vmap`` of the operation under plain ``jit`` on a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import (
    linear_logprobs,
    sharded_linear_logprobs,
)
from tests import oracle
from tests.partition_cases import HIDDEN, KINDS, LABELS, WEIGHT, mesh_of, put


def loss_of_example(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels)
    return jnp.sum(out.logprobs + 0.1 * out.entropy)


@functools.cache
def gradients_of_examples() -> Any:
    return jax.jit(jax.grad(loss_of_example, argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_vmap_over_a_split_batch(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    want = gradients_of_examples()
    many = jax.vmap(loss_of_example, in_axes=(0, None, 0))
    outside = jax.jit(jax.grad(lambda *x: many(*x).sum(), argnums=(0, 1)))(*operands)
    inside = jax.jit(jax.vmap(jax.grad(loss_of_example, argnums=(0, 1)), in_axes=(0, None, 0)))(*operands)
    for dhidden, dweight in (outside, (inside[0], inside[1].sum(0))):
        assert oracle.relative_norm(dhidden, want[0]) < 1e-5
        assert oracle.relative_norm(dweight, want[1]) < 1e-5
    weights = jnp.stack([WEIGHT, 2 * WEIGHT])
    each = jax.jit(jax.vmap(loss_of_example, in_axes=(None, 0, None)))(operands[0], weights, operands[2])
    assert oracle.value_error(each[0], loss_of_example(HIDDEN, WEIGHT, LABELS)) < 1e-5


@pytest.mark.parametrize("call", ["sharded", "shard_map"])
def test_vmap_with_a_mesh_axis(call: str) -> None:
    """``spmd_axis_name`` spreads the batch over an axis, from outside ``shard_map``."""
    mesh = mesh_of(AxisType.Auto)

    def own(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor")
        return out.logprobs + 0.1 * out.entropy

    def example(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        if call == "sharded":
            out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh)
            return out.logprobs + 0.1 * out.entropy
        return jax.shard_map(own, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P())(hidden, weight, labels)

    many = jax.vmap(example, in_axes=(0, None, 0), spmd_axis_name="data")
    grads = jax.jit(jax.grad(lambda *x: many(*x).sum(), argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS)
    for got, true in zip(grads, gradients_of_examples(), strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


def test_what_vmap_cannot_take_one_by_one_is_refused() -> None:
    mesh = mesh_of(AxisType.Explicit)
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))

    def example(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda w: linear_logprobs(hidden, w, labels, cache_bytes=1 << 20).lse.sum())(WEIGHT)

    with pytest.raises(ValueError, match="Give hidden and labels the batch as a leading dimension"):
        jax.jit(jax.vmap(example))(hidden, labels)
