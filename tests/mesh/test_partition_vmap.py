"""``vmap`` of the operation under plain ``jit`` on a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_kl, linear_logprobs, linear_loss, sharded_linear_logprobs
from tests import oracle
from tests.pairs import combined
from tests.partition_cases import HIDDEN, KINDS, LABELS, WEIGHT, mesh_of, put


def loss_of_example(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels)
    return jnp.sum(out.logprobs + 0.1 * out.entropy)


@functools.cache
def gradients_of_examples() -> Any:
    return jax.jit(jax.grad(loss_of_example, argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_vmap_over_weights(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    operands = put(HIDDEN, mesh, P("data")), jnp.stack([WEIGHT, 2 * WEIGHT]), put(LABELS, mesh, P("data"))
    each = jax.jit(jax.vmap(loss_of_example, in_axes=(None, 0, None)))(*operands)
    assert oracle.value_error(each[0], loss_of_example(HIDDEN, WEIGHT, LABELS)) < 1e-5


@pytest.mark.fast("shard_map")
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


def loss_in_one_pass(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    def loss(logprob: Any, entropy: Any, _: Any, label: Any) -> Any:
        return jnp.where(label % 2 == 0, -logprob, 0.1 * entropy)

    return linear_loss(loss, hidden, weight, labels, labels, chunk_bytes=1)[0]


def cached_logprobs(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return linear_logprobs(hidden, weight, labels, cache_bytes=1 << 20).logprobs.sum()


def divergence(hidden: jax.Array, weight: jax.Array, labels: jax.Array, direction: str = "forward") -> jax.Array:
    """From a teacher of another head; the labels make up the other options."""
    bias, head = weight.sum(1), lax.stop_gradient(-weight)
    own = {"where": labels % 3 > 0, "temperature": 0.5 + labels / 64, "bias": bias, "teacher_bias": 0.5 * bias}
    return linear_kl(hidden, weight, hidden[:, ::-1], head, direction=direction, precision="highest", **own).sum()


EXAMPLES = {
    "cache": cached_logprobs,
    "linear_loss": loss_in_one_pass,
    "linear_kl": divergence,
    "linear_kl, jsd": functools.partial(divergence, direction="jsd"),
}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESHES: dict[str, tuple[dict[str, AxisType], P]] = {
    "vocabulary": ({"data": EXPLICIT, "tensor": EXPLICIT}, P("tensor")),
    "hidden": ({"data": EXPLICIT, "tensor": EXPLICIT}, P(None, "tensor")),
    "with Auto": ({"data": EXPLICIT, "tensor": AUTO}, P()),
    "alone": ({"data": EXPLICIT}, P()),
}


@pytest.mark.fast("cache-True-vocabulary")
@combined(example=list(EXAMPLES), shared=[True, False], mesh=list(MESHES))
def test_examples_over_explicit_axes(example: str, shared: bool, mesh: str) -> None:
    """Each with a dweight of its own, with a weight that they share or of its own."""
    one, (kinds, spec) = EXAMPLES[example], MESHES[mesh]
    sizes = (4, 2)[: len(kinds)]
    devices = jax.devices("cpu")[: math.prod(sizes)]
    on = jax.make_mesh(sizes, tuple(kinds), axis_types=tuple(kinds.values()), devices=devices)
    weight = WEIGHT[:64] if shared else jnp.stack([WEIGHT[64 * i : 64 * (i + 1)] for i in range(len(HIDDEN))])
    operands = HIDDEN[:, :8], weight, LABELS[:, :8] % 64
    specs = P("data"), spec if shared else P("data", *spec), P("data")

    def both(*operands: Any) -> Any:
        axes = 0, None if shared else 0, 0
        each = jax.vmap(jax.value_and_grad(one, argnums=(0, 1)), in_axes=axes)(*operands)
        summed = jax.grad(lambda *x: jax.vmap(one, in_axes=axes)(*x).sum(), argnums=(0, 1))(*operands)
        return each, summed

    want = jax.jit(both)(*operands)
    got = jax.jit(both)(*(put(x, on, spec) for x, spec in zip(operands, specs, strict=True)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.relative_norm(x, y) < 5e-6
