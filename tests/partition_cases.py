"""One call, its mesh, and the comparison of results, which the tests of partitioning share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs
from tests import oracle
from tests.draws import Draws

B, S, H, V = 8, 16, 64, 4096  # several vocabulary tiles per device: XLA would merge a single tile with the backward's
DRAWS = Draws()
HIDDEN = DRAWS.normal(B, S, H)
WEIGHT = DRAWS.normal(V, H) / 8
LABELS = DRAWS.integers(-1, V, B, S)
WHERE = DRAWS.chances(0.6, B, S)
TEMPERATURE = DRAWS.uniform(0.5, 2.0, B, S)
SEEDS = DRAWS.normal(3, B, S)
KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))


def put(x: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def objective(function: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array, *rows: jax.Array) -> Any:
    where, temperature = rows or (None, 1.0)
    out = function(hidden, weight, labels, where=where, temperature=temperature)
    return jnp.sum(SEEDS[0] * out.logprobs + SEEDS[1] * out.entropy + SEEDS[2] * out.lse), out


def step(function: Any = linear_logprobs) -> Any:
    run = functools.partial(objective, function)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


def assert_same(got: Any, want: Any) -> None:
    ((value, out), grads), ((true, true_out), true_grads) = got, want
    assert oracle.value_error(value, true) < 1e-5
    for a, b in zip(out[:3], true_out[:3], strict=True):
        assert oracle.value_error(a, b) < 2e-6
    for a, b in zip(grads, true_grads, strict=True):
        assert oracle.relative_norm(a, b) < 1e-5


def flops(run: Any, *operands: Any) -> float:
    """Returns the FLOPs of one device's program."""
    return run.lower(*operands).compile().cost_analysis()["flops"]


def names(x: jax.Array) -> tuple[Any, ...]:
    """Returns the mesh axes of each dimension."""
    return tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
