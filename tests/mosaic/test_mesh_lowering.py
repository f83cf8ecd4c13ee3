"""The Hopper kernels over meshes and under vmap, lowered for CUDA: collectives, types, what is rounded where."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import lce_jax
from tests.pairs import combined

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.fast("'bfloat16', True)-False")
@combined(
    split=[
        ("tensor", PartitionSpec(), "bfloat16", False),  # other shards' parts are added
        (None, PartitionSpec("tensor"), "bfloat16", True),
        (None, PartitionSpec("tensor"), "float32", False),
    ],
    checked=[True, False],
)
def test_dhidden_is_rounded_in_the_kernel_only_where_nothing_is_added(
    split: tuple[str | None, PartitionSpec, str, bool], checked: bool
) -> None:
    axis_name, spec, hidden_dtype, rounded = split
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    T, H, V = 16384, 1024, 32000
    weight = PartitionSpec("tensor") if axis_name else PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, weight, spec), out_specs=(spec, weight), check_vma=checked
    )
    def step(hidden, weight, labels):
        def objective(hidden, weight):
            out = lce_jax.linear_logprobs(
                hidden, weight, labels, axis_name=axis_name, cache_bytes=1 << 40, implementation="mosaic_gpu"
            )
            return jnp.sum(out.logprobs)

        return jax.grad(objective, argnums=(0, 1))(hidden, weight)

    struct = jax.ShapeDtypeStruct
    arrays = struct((T, H), hidden_dtype), struct((V, H), "bfloat16"), struct((T,), "int32")
    text = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    rows = T if axis_name else T // 2
    kernels = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert any(f"-> tensor<1x{rows}x{H}xbf16>" in line for line in kernels) == rounded
    assert any(f"-> tensor<1x{rows}x{H}xf32>" in line for line in kernels) != rounded


@pytest.mark.slow
@pytest.mark.parametrize("sequence_axis", [None, "tensor"])
def test_sharded(sequence_axis: str | None) -> None:
    mesh = jax.make_mesh((1, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((2, 512, 1024), jnp.bfloat16), ((32768, 1024), jnp.bfloat16), ((2, 512), jnp.int32))
    ]

    def objective(hidden, weight, labels):
        out = lce_jax.sharded_linear_logprobs(
            hidden, weight, labels, mesh=mesh, batch_axes="data", sequence_axis=sequence_axis,
            vocab_size=32003, implementation="mosaic_gpu",
        )  # fmt: skip
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.jit(jax.grad(objective, argnums=(0, 1)))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    summed = "all_reduce" if sequence_axis is None else "reduce_scatter"
    assert 0 < text.find("optimization_barrier") < text.rfind(summed)  # no kernel next to the collective


@pytest.mark.fast("524288")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 19, 1 << 40])
def test_results_and_gradients_vary_where_tokens_do(cache_bytes: int) -> None:
    """Typed as replicated, results would get cotangents summed over the data axis, and gradients no sum at all."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    varying = []

    def shard(hidden, weight, labels):
        def objective(hidden, weight):
            options = dict(axis_name="tensor", cache_bytes=cache_bytes, implementation="mosaic_gpu", stats=True)
            out = lce_jax.linear_logprobs(hidden, weight, labels, **options)
            varying.extend(jax.typeof(field).mat.varying for field in out if field is not None)
            return jnp.sum(out.logprobs) + jnp.sum(out.entropy)

        gradients = jax.grad(objective, argnums=(0, 1))(hidden, weight)
        assert [jax.typeof(x).mat.varying for x in gradients] == [{"data"}, {"tensor"}]
        return gradients

    split, rows = PartitionSpec("tensor"), PartitionSpec("data")
    step = jax.shard_map(shard, mesh=mesh, in_specs=(rows, split, rows), out_specs=(rows, split))
    jax.eval_shape(step, jnp.ones((512, 64), "bfloat16"), jnp.ones((1024, 64), "bfloat16"), jnp.zeros(512, "int32"))
    assert varying == [{"data"}] * 7


@pytest.mark.slow
def test_vmap() -> None:
    def objective(hidden, weight, labels):
        out = lce_jax.linear_logprobs(hidden, weight, labels, cache_bytes=1 << 40, implementation="mosaic_gpu")
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.vmap(jax.grad(objective, argnums=(0, 1)), in_axes=(0, None, 0))
    shapes = ((3, 256, 128), "bfloat16"), ((1024, 128), "bfloat16"), ((3, 256), "int32")
    jax.jit(step).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
