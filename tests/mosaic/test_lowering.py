"""The Hopper kernels, traced and lowered for CUDA over the real model heads: layouts, alignment, shared memory.

No GPU is needed: the device is only claimed, and lowering stops before machine code.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import mosaic
from lce_jax.run import _local
from lce_jax.types._types import Call, Primals

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

    if options.pop("floor", False):
        arrays["logit_floor"] = jax.ShapeDtypeStruct((T,), jnp.float32)
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


def lower_adapter(T: int, H: int, V: int, rank: int, **options) -> str:
    """The gradients of hidden, A and B, PEFT's in float32."""
    struct = jax.ShapeDtypeStruct
    given = struct((T, H), "bfloat16"), struct((rank, H), "float32"), struct((V, rank), "float32")

    def objective(hidden, a, b, weight, labels):
        out = lce_jax.linear_logprobs(hidden, weight, labels, lora=(a, b, 2.0), implementation="mosaic_gpu", **options)
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2)))
    traced = step.trace(*given, struct((V, H), "bfloat16"), struct((T,), "int32"))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    launched = str(traced.jaxpr)
    assert launched.count("name=lce_dhidden") >= 2 * launched.count("name=lce_dweight") > 0  # of hidden and u; of B
    return text


# Every kind of size, layout, cache and option: `test_every_head` has the combinations.
CALLS = [
    (1, 8192, 16032, {"cache_bytes": 1 << 18}),
    (100, 12288, 18992, {"weight_layout": "hv", "dtype": "float16", "cache_bytes": 1 << 40}),
    (1003, 704, 19008, {"logit_scale": True, "where": True, "vocab_size": 18100, "floor": True, "stats": True}),
    (512, 192, 31040, {"weight_layout": "hv", "entropy": False, "cache_bytes": 1 << 20}),
    (600, 64, 4000, {"cache_bytes": 1 << 20}),
    (2048, 4096, 151936, {**EVERYTHING, "cache_bytes": 1 << 29, "vocab_size": 151669}),
    (8192, 2880, 201088, {"cache_bytes": 1 << 40}),
    (4096, 5120, 262144, {}),
    (4096, 2048, 64128, {"weight_layout": "hv"}),
    (1, 1024, 32768, {"logit_scale": True, "cache_bytes": 1 << 40}),
]
MANY = {(512, 192), (600, 64), (8192, 2880), (4096, 5120), (4096, 2048), (1, 1024)}  # with what others have


@pytest.mark.fast("1003-704")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("T", "H", "V", "options"),
    [pytest.param(*call, marks=pytest.mark.slow if call[:2] in MANY else ()) for call in CALLS],
    ids=str,
)
def test_lowers(T: int, H: int, V: int, options: dict) -> None:
    lower(T, H, V, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("T", "H", "V", "rank", "options"),
    [(1003, 576, 50257, 8, {"vocab_size": 50000}), (4096, 4096, 151936, 100, {"cache_bytes": 1 << 40})],
)
def test_an_adapter_lowers(T: int, H: int, V: int, rank: int, options: dict) -> None:
    text = lower_adapter(T, H, V, rank, **options)
    assert f"{V}x{H}xf32" not in text  # neither is the adapter merged nor is the weight differentiated


@pytest.mark.usefixtures("hopper")
def test_an_adapter_on_columns_that_are_no_whole_atom_lowers() -> None:
    """The forward alone. No interpreter knows that TMA copies whole atoms, of the weight and of B."""
    struct = jax.ShapeDtypeStruct
    given = struct((8, 64), "bfloat16"), struct((515, 64), "bfloat16"), struct((8,), "int32")
    lora = struct((8, 64), "float32"), struct((515, 8), "float32")

    def call(a: Any, b: Any, *head: Any) -> Any:
        return lce_jax.linear_logprobs(*head, lora=(a, b, 2.0), entropy=False, implementation="mosaic_gpu").logprobs

    assert "lce_statistics" in jax.jit(call).trace(*lora, *given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_no_kernel_needs_a_search_for_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaic's search reduces all equations of a kernel at each guess: 409 guesses took 13 s."""
    from jax.experimental.mosaic.gpu import layout_inference

    guesses, infer, find = [], layout_inference.infer_layout, layout_inference.find_assignments_for

    def count_guesses(*arguments: Any, **options: Any) -> Any:
        guesses[-1] += 1
        return find(*arguments, **options)

    def infer_counted(*arguments: Any, **options: Any) -> Any:
        guesses.append(-1)  # the first call is no guess
        return infer(*arguments, **options)

    monkeypatch.setattr(layout_inference, "find_assignments_for", count_guesses)
    for name, module in sys.modules.items():
        if name.startswith("jax.") and vars(module).get("infer_layout") is infer:
            monkeypatch.setattr(module, "infer_layout", infer_counted)
    head = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)
    for direction in ("forward", "jsd", "tv"):
        for cache_bytes in (0, 1 << 30):
            options = {"direction": direction, "cache_bytes": cache_bytes, "implementation": "mosaic_gpu"}
            loss = functools.partial(_sum_divergence, **options)
            jax.jit(jax.grad(loss, (0, 1))).trace(*head, *head).lower(lowering_platforms=("cuda",))
    lower(512, 256, 4096, gradient_threshold=1e-6, cache_bytes=0)
    lower(512, 256, 4096, **EVERYTHING)
    assert guesses
    assert max(guesses) < 30


def _sum_divergence(*heads: Any, **options: Any) -> Any:
    return jnp.sum(lce_jax.linear_kl(*heads, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_more_chunks_compile_no_more_kernels() -> None:
    few, many = (lower(T, 1024, 151936, cache_bytes=1 << 30).count("@mosaic_gpu_v2") for T in (65536, 131072))
    assert few == many


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_recomputed_dlogits_overwrite_cached_ones_and_share_their_products() -> None:
    text = lower(512, 256, 31040, cache_bytes=1 << 24)
    for name in ("update_dhidden", "write_dweight"):
        assert (text.count(f"call @{name}"), text.count(f"func.func private @{name}")) == (2, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("V", [151936, pytest.param(50257, marks=pytest.mark.slow)])
def test_the_gradient_takes_the_place_of_a_whole_cache(V: int) -> None:
    """Then dhidden is written once, rounded: it is no sum in float32. 50257 columns are no whole atom."""
    text = lower(8192, 1024, V, cache_bytes=1 << 40)
    in_place = V == 151936
    assert overwrites_cache(text) == in_place
    assert ("8192x1024xf32" in text) != in_place


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_64_bit_numbers_outside() -> None:
    with jax.enable_x64(True):
        lower(4096, 1024, 32003, cache_bytes=1 << 26, where=True, temperature=True, logit_softcap=3.0, vocab_size=31000)
        lower(100, 512, 32000, weight_layout="hv", cache_bytes=1 << 40)


@pytest.mark.usefixtures("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("H", [*HIDDEN, 448, 576])
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("split", TENSOR_PARALLEL)
def test_every_head(H: int, V: int, split: int) -> None:
    for T, options in itertools.product((1, 2048, 131072), ({}, {**EVERYTHING, "cache_bytes": 1 << 28})):
        lower(T, H, V // split, **options)


def trace_shard() -> Any:
    """What the bridge asks of JAX: statistics of a shard, the results of all, the shard's gradients."""
    call = Call(caller_vocab_size=151669, cache_bytes=1 << 22, requested=("mosaic_gpu",))

    def step(hidden, weight, labels, seeds, start, num_rows):
        part = _local.LogprobPart.of(call, Primals(hidden, weight), labels, None, None, None, start, num_rows)
        stats, cache = part.statistics(keep_cache=True)
        parts = jax.tree.map(lambda x: x[None], stats)
        merged, found = _local.results(parts, labels, labels >= 0, None, vocab_size=151669)
        return found, part.gradients(merged, _local.Results(lce_jax.LogprobOutput(*seeds)), cache)

    struct = jax.ShapeDtypeStruct
    arrays = struct((2048, 1024), "bfloat16"), struct((75968, 1024), "bfloat16"), struct((2048,), "int32")
    seeds, scalar = [struct((2048,), "float32")] * 3, struct((), "int32")
    return jax.jit(step).trace(*arrays, seeds, scalar, scalar)


@pytest.mark.usefixtures("hopper")
def test_one_shard_leaves_its_cache_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the caller's, who may differentiate again."""
    asked, gradients = list[bool](), mosaic.gradients

    def noted(*given: Any, **how: Any) -> Any:
        asked.append(how["may_overwrite_cache"])
        return gradients(*given, **how)

    monkeypatch.setattr(mosaic, "gradients", noted)
    trace_shard()
    assert asked == [False]


@pytest.mark.slow  # tests/torch/test_wrapped.py runs it by XLA
@pytest.mark.usefixtures("hopper")
def test_one_shard_with_padded_rows() -> None:
    text = trace_shard().lower(lowering_platforms=("cuda",)).as_text()
    assert not overwrites_cache(text)
    assert "lce_per_token" in text
