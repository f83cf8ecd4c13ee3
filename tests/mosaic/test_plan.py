"""What the Hopper kernels refuse and what they plan: decided from shapes and a claimed device, nothing is lowered."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import mosaic
from lce_jax._types import Call, Device
from lce_jax.mosaic import _chunks, sm90
from lce_jax.mosaic._operands import geometry
from lce_jax.mosaic.sm90._tuning import BY_KERNEL, H100, NARROW, SHORT
from tests.devices import B200, H200


def case(**changes) -> Call:
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
    assert mosaic.supports(case()) is None
    assert reason in (mosaic.supports(case(**changes)) or "")


def test_refused_on_this_machine() -> None:
    arrays = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((256, 64), jnp.bfloat16), jnp.zeros((8,), jnp.int32)
    with pytest.raises(lce_jax.UnsupportedError, match=r"needs an NVIDIA GPU of compute capability 8\.0, 8\.6"):
        lce_jax.linear_logprobs(*arrays, implementation="mosaic_gpu")


@pytest.mark.usefixtures("hopper")
def test_chosen_on_hopper() -> None:
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 4096), jnp.bfloat16), ((151936, 4096), jnp.bfloat16), ((4096,), jnp.int32))
    ]
    plan = lce_jax.explain(*arguments)
    assert plan.implementation == "mosaic_gpu"
    assert plan.refused == {}


@pytest.mark.usefixtures("hopper")
def test_plan_on_hopper() -> None:
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 4096), jnp.bfloat16), ((151936, 4096), jnp.bfloat16), ((4096,), jnp.int32))
    ]
    plan = lce_jax.explain(*arguments, cache_bytes=1 << 29, implementation="mosaic_gpu")
    assert plan.implementation == "mosaic_gpu"
    assert 0 < plan.kept_bytes - plan.call.statistics_bytes <= 1 << 29
    assert plan.forward_bytes < 1 << 27


def test_partial_statistics_stay_small() -> None:
    budget = sm90.HOPPER.budget
    plan = mosaic.plan(case(num_tokens=131072))
    assert plan.forward_bytes <= budget.statistics_bytes
    for hidden_size in (1024, 2048, 4096, 5120):
        assert mosaic.plan(case(num_tokens=8192, hidden_size=hidden_size)).backward_bytes <= 0.35e9
    sums = mosaic.plan(case(num_tokens=65536)).backward_bytes - 65536 * budget.chunk_columns * 2
    assert sums <= 65536 * 4096 * 4  # dhidden in float32, once
    assert mosaic.plan(case(num_tokens=205280, columns=76032)).backward_bytes < 6 << 30
    few = case(num_tokens=512)  # too few tiles for 132 multiprocessors
    assert _chunks.dhidden_shape(few, geometry(few, sm90.HOPPER.tiling))[0] == 2


def test_every_kernel_fits_shared_memory() -> None:
    chosen = [*BY_KERNEL.items(), *((kernel, SHORT) for kernel in BY_KERNEL), ("dhidden", NARROW), ("dweight", NARROW)]
    chosen += [(kernel, one) for (_, kernel), entries in sm90.HOPPER.tunings.tuned.items() for _, one in entries]
    for kernel, tuning in chosen:
        assert tuning.smem_bytes(2, staged=True) <= sm90.HOPPER.smem_limit, kernel


def test_narrow_tiles_where_they_leave_no_column_empty() -> None:
    """At H 2880, not at 4096, which wider tiles fill, nor at 640, which neither fills; of "hv", for dhidden alone."""

    def widths(**fields) -> tuple[int, ...]:
        one = case(**{"num_tokens": 8192, "columns": 201088, **fields})
        return tuple(sm90.HOPPER.tunings.of(one, kernel).tile_n for kernel in ("dhidden", "dweight"))

    assert widths(hidden_size=2880) == (192, 192)
    assert widths(hidden_size=4096) == widths(hidden_size=640) == (256, 256)
    assert widths(hidden_size=2880, weight_layout="hv") == (192, 256)


@pytest.mark.parametrize(
    ("device", "shorter", "longest"), [(H200, 1024, 2944), (H200._replace(kind=H100), 256, 512)], ids=["H200", "H100"]
)
def test_turns_for_short_hidden_sizes(device: Device, shorter: int, longest: int) -> None:
    def turns(kernel: str, hidden_size: int) -> int:
        one = case(num_tokens=8192, hidden_size=hidden_size, device=device)
        return sm90.HOPPER.tunings.of(one, kernel).turns

    for kernel in ("forward", "dlogits"):
        assert [turns(kernel, size) for size in (shorter, longest, longest + 128, 4096)] == [2, 2, 1, 1]


@pytest.mark.parametrize("wrong", [{"slots": 3}, {"slots": 0}, {"snake": 3}, {"turns": 3}, {"stages": 1}], ids=str)
def test_tunings_that_no_kernel_is_written_for(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got Tuning"):
        dataclasses.replace(SHORT, **wrong)
