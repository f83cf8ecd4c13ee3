"""The Hopper kernels under `jax.shard_map` on real GPUs, both with and without the tracking of varying axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from tests.gpu.test_mosaic_gpu import draw, supported

pytestmark = pytest.mark.multi_gpu

CALLS = {
    "plain": {},
    "padded, where, cache": {"vocab_size": 40000, "where": 0.4, "temperature": True, "cache_bytes": 20 << 20},
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_vocabulary_split_over_every_gpu(name: str, check_vma: bool) -> None:
    hidden, weight, rows, options = draw(1003, 1024, 64128, **CALLS[name])
    supported(hidden, weight, options)
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("tensor",), axis_types=(AxisType.Auto,))
    static = {**options, "implementation": "mosaic_gpu"}

    def step(hidden, weight, rows, **axis):
        def objective(hidden, weight):
            rest = {name: rows[name] for name in ("where", "temperature") if name in rows}
            out = lce_jax.linear_logprobs(hidden, weight, rows["labels"], **rest, **static, **axis)
            return sum(jnp.sum(seed * field) for seed, field in zip(rows["seeds"], out[:3], strict=True)), out

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)

    def shard(hidden, weight, rows):
        (dhidden, dweight), out = step(hidden, weight, rows, axis_name="tensor")
        if not check_vma:  # each shard differentiates its own copy of the objective: JAX's sum, over all copies
            dhidden, dweight = jax.lax.psum(dhidden, "tensor") / count, dweight / count
        return (dhidden, dweight), out

    split = P("tensor")
    sharded = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(P(), split, P()), out_specs=((P(), split), P()), check_vma=check_vma)
    )
    one = jax.device_get(jax.jit(step)(hidden, weight, rows))
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((hidden, P()), (weight, split), (rows, P()))
    ]
    split_results = jax.device_get(sharded(*arguments))
    for got, want in zip(jax.tree.leaves(split_results[1]), jax.tree.leaves(one[1]), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    for got, want in zip(split_results[0], one[0], strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want)
