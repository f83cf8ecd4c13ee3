"""The kernels with a ``gradient_threshold``, lowered for CUDA; what they refuse, and what a plan says of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import lce_jax
from lce_jax.run import _local
from lce_jax.types._types import Call, Primals
from tests.mosaic.test_lowering import lower

EVERYTHING = {"stats": True, "logit_softcap": 30.0, "where": True, "temperature": True, "vocab_size": 31990}


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("T", "H", "V", "options"),
    [(4096, 4096, 151936, {"K": 64, "vocab_size": 151643}),
     *(pytest.param(*more, marks=pytest.mark.slow) for more in [
         (1003, 1024, 32000, EVERYTHING), (100, 512, 32000, {"weight_layout": "hv", "cache_bytes": 1 << 30}),
         (131072, 2880, 201088, {"stats": True}), (1003, 1024, 32000, {"floor": True, "stats": True})])],
    ids=str,
)  # fmt: skip
def test_lowers_for_cuda(T: int, H: int, V: int, options: dict[str, Any]) -> None:
    text = lower(T, H, V, gradient_threshold=2.0**-12, **options)
    assert all(f"lce_active_{name}" in text for name in ("dlogits", "dhidden", "dweight"))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_lowers_over_a_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    function = functools.partial(lce_jax.sharded_linear_logprobs, mesh=mesh, batch_axes="data", sequence_axis="tensor")
    text = lower(512, 256, 4096, gradient_threshold=0.1, stats=True, where=True, function=function)
    assert "lce_active_dweight" in text


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_lowers_for_one_shard() -> None:
    struct, call = jax.ShapeDtypeStruct, Call(gradient_threshold=0.1, requested=("mosaic_gpu",))
    operands = struct((512, 256), "bfloat16"), struct((4096, 256), "bfloat16"), struct((512,), "int32")

    def step(hidden: Any, weight: Any, labels: Any, seed: Any) -> Any:
        part = _local.LogprobPart.of(call, Primals(hidden, weight), labels, None, None, None, 0, jnp.int32(300))
        stats, cache = part.statistics(keep_cache=True)
        return part.gradients(stats, _local.Results(lce_jax.LogprobOutput(seed, seed, seed)), cache)

    found = jax.jit(step).trace(*operands, struct((512,), "float32"))
    assert "lce_active_dhidden" in found.lower(lowering_platforms=("cuda",)).as_text()
    assert found.out_info.hidden.shape == (512, 256)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_zero_is_the_same_program() -> None:
    assert lower(4096, 1024, 32000, gradient_threshold=0.0) == lower(4096, 1024, 32000)


@pytest.mark.usefixtures("hopper")
def test_what_the_kernels_refuse_and_say() -> None:
    struct = jax.ShapeDtypeStruct
    operands = struct((4096, 1024), "bfloat16"), struct((32000, 1024), "bfloat16"), struct((4096,), "int32")
    plan = lce_jax.explain(*operands, gradient_threshold=2.0**-12, cache_bytes=1 << 20)
    assert plan.implementation == "mosaic_gpu"
    assert any("0.000244141" in note for note in plan.notes)
    assert any("cache_bytes=1048576 is not used" in note for note in plan.notes)
    plan = lce_jax.explain(*operands, gradient_threshold=2.0**-12, gradients_in_forward=True)
    assert not any("exponentials" in note or "cache_bytes" in note for note in plan.notes)
    plan = lce_jax.explain(*operands, gradient_threshold=0.1, candidates=struct((4096, 3), "int32"))
    assert plan.implementation == "mosaic_gpu"
    assert any("candidate" in note for note in plan.notes)
    assert lce_jax.explain(*operands, gradient_threshold=0.1, logit_floor=0.0).implementation == "mosaic_gpu"
    odd = struct((32003, 1024), "bfloat16")
    with pytest.raises(lce_jax.UnsupportedError, match="multiple of 8, got 32003"):
        lce_jax.explain(operands[0], odd, operands[2], gradient_threshold=0.1, implementation="mosaic_gpu")
