"""The Hopper kernels, traced and lowered for CUDA over the real model heads: layouts, alignment, shared memory.

No GPU is needed: the device is only claimed, and lowering stops before machine code.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import lce_jax
from lce_jax import local

HIDDEN = (1024, 2048, 4096, 5120, 8192)
VOCABULARIES = (32000, 50257, 128256, 151936, 152064, 248320, 262144)
TENSOR_PARALLEL = (1, 2, 4, 8)
EVERYTHING = {"stats": True, "logit_softcap": 30.0, "logit_scale": 0.5, "where": True, "temperature": True}


def lower(T: int, H: int, V: int, dtype: str = "bfloat16", **options) -> str:
    """Lowers value and gradient of the public function. ``where``, ``temperature``, ``logit_scale`` True: an array."""
    layout = options.get("weight_layout", "vh")
    arrays = {
        "hidden": jax.ShapeDtypeStruct((T, H), dtype),
        "weight": jax.ShapeDtypeStruct((V, H) if layout == "vh" else (H, V), dtype),
        "labels": jax.ShapeDtypeStruct((T,), jnp.int32),
    }
    if options.pop("where", False):
        arrays["where"] = jax.ShapeDtypeStruct((T,), jnp.bool_)
    if options.pop("temperature", False):
        arrays["temperature"] = jax.ShapeDtypeStruct((T,), jnp.float32)

    if options.get("K"):
        arrays["candidates"] = jax.ShapeDtypeStruct((T, options.pop("K")), jnp.int32)
    if options.get("logit_scale") is True:
        arrays["logit_scale"], _ = jax.ShapeDtypeStruct((), jnp.float32), options.pop("logit_scale")

    function = options.pop("function", lce_jax.linear_logprobs)

    def objective(hidden, weight, rest):
        out = function(hidden, weight, **rest, **options, implementation="mosaic_gpu")
        return sum(jnp.sum(field) for field in out if field is not None)

    rest = {name: array for name, array in arrays.items() if name not in ("hidden", "weight")}
    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))
    text = step.trace(arrays["hidden"], arrays["weight"], rest).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


def overwrites_cache(text: str) -> bool:
    """Whether a kernel's output takes its first operand's memory; in the products, their fourth operand's."""
    return "output_operand_alias<output_tuple_indices = [], operand_index = 0," in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("T", [1, 100, 1003, 8192, 131072])
def test_tokens(T: int) -> None:
    lower(T, 1024, 32000)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 40])
def test_narrow_tiles(cache_bytes: int) -> None:
    lower(8192, 2880, 201088, cache_bytes=cache_bytes)


@pytest.mark.usefixtures("hopper")
def test_a_traced_scale_is_a_factor_of_the_rows() -> None:
    lower(1003, 1024, 32003, logit_scale=True, where=True, vocab_size=31000)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("V", "whole"), [(151936, True), (50257, False)])
def test_the_gradient_takes_the_place_of_the_cache(V: int, whole: bool) -> None:
    """And goes into one product each; else, as without a cache, through a buffer of its own, chunk by chunk.

    Then dhidden is a sum, in fp32; else it is written once, rounded.
    """
    text = lower(8192, 1024, V, cache_bytes=1 << 40)
    assert overwrites_cache(text) == whole
    assert ("stablehlo.while" in text) != whole
    assert ("8192x1024xf32" in text) != whole
    text = lower(8192, 1024, V)
    assert not overwrites_cache(text)
    assert "stablehlo.while" in text
    assert "8192x1024xf32" in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("cache_bytes", "kernels"), [(0, 4), (1 << 30, 8), (1 << 40, 4)])
@pytest.mark.parametrize(("T", "V"), [(8192, 151936), (131072, 151936), (8192, 50257)])
def test_how_many_kernels_are_compiled(T: int, V: int, cache_bytes: int, kernels: int) -> None:
    """One of each kind for all chunks and launches, however many they are and whatever is left for the last."""
    if cache_bytes == 1 << 30 and V == 50257:
        kernels = 4  # it is all of it
    assert lower(T, 1024, V, cache_bytes=cache_bytes).count("@mosaic_gpu_v2") == kernels


@pytest.mark.usefixtures("hopper")
def test_64_bit_numbers_outside() -> None:
    with jax.enable_x64(True):
        lower(4096, 1024, 32003, cache_bytes=1 << 26, where=True, temperature=True, logit_softcap=3.0, vocab_size=31000)
        lower(100, 512, 32000, weight_layout="hv", cache_bytes=1 << 20)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.parametrize(
    ("axis_name", "spec", "hidden_dtype", "rounded"),
    [
        ("tensor", PartitionSpec(), "bfloat16", False),  # other shards' parts are added
        (None, PartitionSpec("tensor"), "bfloat16", True),
        (None, PartitionSpec("tensor"), "float32", False),
    ],
)
def test_dhidden_is_rounded_in_the_kernel_only_where_nothing_is_added(
    axis_name: str | None, spec: PartitionSpec, hidden_dtype: str, rounded: bool, checked: bool
) -> None:
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


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_narrow(layout: str) -> None:
    lower(600, 64, 4000, weight_layout=layout, cache_bytes=1 << 20)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("H", "V"), list(zip(itertools.cycle(HIDDEN), VOCABULARIES, strict=False)))
def test_vocabularies(H: int, V: int) -> None:
    lower(4096, H, V, cache_bytes=1 << 30)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("V", [16032, 18992, 19008, 31040, 32768, 64128])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_tensor_parallel_shards(V: int, layout: str) -> None:
    lower(4096, 2048, V, weight_layout=layout, cache_bytes=1 << 26)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options",
    [
        {"entropy": False},
        {"dtype": "float16", "cache_bytes": 1 << 40},
        {"vocab_size": 151669},
        {"where": True},
        EVERYTHING,
        {**EVERYTHING, "cache_bytes": 1 << 29, "vocab_size": 151669},
    ],
    ids=str,
)
def test_options(options: dict) -> None:
    lower(2048, 4096, 151936, **options)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("H", [64, 192, 448, 576, 704, 12288])
def test_hidden_sizes_nobody_tuned(H: int) -> None:
    lower(512, H, 32000, cache_bytes=1 << 20)


@pytest.mark.usefixtures("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("H", HIDDEN)
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("split", TENSOR_PARALLEL)
def test_every_head(H: int, V: int, split: int) -> None:
    for T, options in itertools.product((1, 2048, 131072), ({}, {**EVERYTHING, "cache_bytes": 1 << 28})):
        lower(T, H, V // split, **options)


@pytest.mark.usefixtures("hopper")
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
            vocab_size=32003, cache_bytes=1 << 22, implementation="mosaic_gpu",
        )  # fmt: skip
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.jit(jax.grad(objective, argnums=(0, 1)))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    summed = "all_reduce" if sequence_axis is None else "reduce_scatter"
    assert 0 < text.find("optimization_barrier") < text.rfind(summed)  # no kernel next to the collective


@pytest.mark.usefixtures("hopper")
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
    assert varying == [{"data"}] * 6


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))

    def objective(hidden, weight, labels, where):
        out = lce_jax.linear_logprobs(
            hidden, weight, labels, where=where, axis_name="tensor", cache_bytes=1 << 22, implementation="mosaic_gpu"
        )
        return jnp.sum(out.logprobs + out.entropy)

    spec = PartitionSpec("tensor")
    step = jax.shard_map(
        jax.grad(objective, argnums=(0, 1)),
        mesh=mesh,
        in_specs=(PartitionSpec(), spec, PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(), spec),
        check_vma=check_vma,
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((512, 1024), jnp.bfloat16), ((32768, 1024), jnp.bfloat16))
    ]
    rows = [jax.ShapeDtypeStruct((512,), dtype) for dtype in (jnp.int32, jnp.bool_)]
    jax.jit(step).trace(*arguments, *rows).lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 22])
def test_one_shard_with_padded_rows(cache_bytes: int) -> None:
    options = {"vocab_size": 151669, "cache_bytes": cache_bytes, "implementation": "mosaic_gpu"}

    def step(hidden, weight, labels, seeds, start, num_rows):
        rows = {"vocab_start": start, "num_rows": num_rows}
        stats, cache = local.statistics(hidden, weight, labels, keep_cache=True, **rows, **options)
        cotangent = lce_jax.LogprobOutput(*seeds)
        return local.gradients(hidden, weight, labels, stats, cotangent, cache=cache, **rows, **options)

    struct = jax.ShapeDtypeStruct
    arrays = struct((2048, 1024), "bfloat16"), struct((75968, 1024), "bfloat16"), struct((2048,), "int32")
    seeds, scalar = [struct((2048,), "float32")] * 3, struct((), "int32")
    text = jax.jit(step).trace(*arrays, seeds, scalar, scalar).lower(lowering_platforms=("cuda",)).as_text()
    assert not overwrites_cache(text)  # it is the caller's


@pytest.mark.usefixtures("hopper")
def test_vmap() -> None:
    def objective(hidden, weight, labels):
        out = lce_jax.linear_logprobs(hidden, weight, labels, cache_bytes=1 << 18, implementation="mosaic_gpu")
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.vmap(jax.grad(objective, argnums=(0, 1)), in_axes=(0, None, 0))
    shapes = ((3, 256, 128), "bfloat16"), ((1024, 128), "bfloat16"), ((3, 256), "int32")
    jax.jit(step).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
