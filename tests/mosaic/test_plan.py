"""What the Hopper kernels refuse and what they plan: decided from shapes and a claimed device, nothing is lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import mosaic
from lce_jax.mosaic import sm90
from lce_jax.mosaic.sm90._tuning import BY_KERNEL, NARROW, SHORT
from lce_jax.types._types import Call, Device
from tests.devices import B200, H200


def make_call(**changes) -> Call:
    fields = {
        "num_tokens": 4096, "hidden_size": 4096, "columns": 151936, "dtype": jnp.dtype("bfloat16"),
        "device": H200,
    }  # fmt: skip
    return Call(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": Device("cpu")}, "this is cpu"),
        ({"device": B200}, "NVIDIA B200 has 10.0"),
        ({"dtype": jnp.dtype("float32")}, "got float32"),
        ({"hidden_size": 1000}, "got 1000"),
        ({"columns": 200}, "at least 256"),
        ({"columns": 50257, "weight_layout": "hv"}, "got 50257"),
        ({"logit_scale": -1.0}, "got -1.0"),
    ],
)
def test_refusals_say_why(changes: dict, reason: str) -> None:
    assert mosaic.supports(make_call()) is None
    assert reason in (mosaic.supports(make_call(**changes)) or "")


def test_refused_on_this_machine() -> None:
    arrays = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((256, 64), jnp.bfloat16), jnp.zeros((8,), jnp.int32)
    with pytest.raises(lce_jax.UnsupportedError, match="needs an NVIDIA GPU"):
        lce_jax.linear_logprobs(*arrays, implementation="mosaic_gpu")


@pytest.mark.usefixtures("hopper")
def test_plan_on_hopper() -> None:
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 4096), jnp.bfloat16), ((151936, 4096), jnp.bfloat16), ((4096,), jnp.int32))
    ]
    plan = lce_jax.explain(*arguments, cache_bytes=1 << 29)
    assert (plan.implementation, plan.refused) == ("mosaic_gpu", {})
    assert 0 < plan.kept_bytes - plan.call.statistics_bytes <= 1 << 29
    assert plan.forward_bytes < 1 << 27


def test_partial_statistics_stay_small() -> None:
    budget = sm90.HOPPER.budget
    plan = mosaic.plan(make_call(num_tokens=131072))
    assert plan.forward_bytes <= budget.statistics_bytes
    for hidden_size in (1024, 2048, 4096, 5120):
        assert mosaic.plan(make_call(num_tokens=8192, hidden_size=hidden_size)).backward_bytes <= 0.35e9
    sums = mosaic.plan(make_call(num_tokens=65536)).backward_bytes - 65536 * budget.chunk_columns * 2
    assert sums <= 65536 * 4096 * 4  # dhidden in float32, once
    assert mosaic.plan(make_call(num_tokens=205280, columns=76032)).backward_bytes < 6 << 30


def test_every_kernel_fits_shared_memory() -> None:
    chosen = [*BY_KERNEL.items(), *((kernel, SHORT) for kernel in BY_KERNEL), ("dhidden", NARROW), ("dweight", NARROW)]
    chosen += [(kernel, one) for (_, kernel), entries in sm90.HOPPER.tunings.tuned.items() for _, one in entries]
    for kernel, tuning in chosen:
        assert tuning.smem_bytes(2, staged=True) <= sm90.HOPPER.smem_limit, kernel
