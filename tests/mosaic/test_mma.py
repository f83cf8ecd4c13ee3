"""The kernels by mma.sync, interpreted with the race detector, against stored logits in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import linear_kl, mosaic
from lce_jax.mosaic import _generations, mma
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._pallas import interpreting, lowering_for, plgpu
from lce_jax.mosaic.common import _cached_dlogits
from lce_jax.run.kernels import trace_for_device
from lce_jax.types._types import Device
from tests.devices import H200
from tests.mosaic.test_lowering import EVERYTHING, lower, lower_adapter
from tests.mosaic.test_threshold import check_active_tiles, with_threshold
from tests.mosaic_cases import CASES, Case, budget_of, case, check, make_call
from tests.mosaic_interpreter import afresh, races_found


def generation_of(test: Case, generation: Generation) -> Generation:
    """On the device of the tests, with several chunks and launches."""
    budget = budget_of(test, generation.budget, generation.tiling)
    return dataclasses.replace(generation, budget=budget, compute_capabilities=("9.0",), ran_on=None)


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Case]:
    test, generation = request.param
    used, lowered = (
        _generations.using(generation_of(test, generation)),
        lowering_for(generation.compute_capabilities[0]),
    )
    with used, lowered, interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield test


def is_served(case: Case, generation: Generation) -> bool:
    whole_parts = (case.options.vocab_part_size or 0) % generation.tiling.atom == 0
    return generation.machine.has_tma or (case.options.weight_layout == "vh" and whole_parts)


def cases(generation: Generation, of: list[Case] = CASES) -> list[Any]:
    capability = generation.compute_capabilities[0]
    return [pytest.param((case, generation), id=f"{case}-{capability}") for case in of if is_served(case, generation)]


# What others have alone, and what differs between the ways of copying.
@pytest.mark.fast("shared, clusters-12.0", "narrow tiles-8.9")
@pytest.mark.parametrize("test", [*cases(mma.SM120), *cases(mma.SM89)], indirect=True)
def test_matches_float64(test: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check(test, H200, monkeypatch)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("test", cases(mma.SM80, [case("one step too many in flight", T=128, V=256)]), indirect=True)
def test_a_copy_that_is_not_waited_for_is_a_race(test: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = plgpu.wait_gmem_to_smem
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda n: wait(n + 2), raising=False)
    with pytest.raises(Exception, match="RACE DETECTED"):
        check(test, H200, monkeypatch)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight_layout": "hv"}, 'weight_layout must be "vh" on a GPU without TMA'),
        ({"vocab_part_size": 264}, "needs vocab_part_size to be a multiple of 128, got 264"),
        ({"gradient_threshold": 0.1, "columns": 1032}, "gradient_threshold needs V to be a multiple of 128, got 1032"),
    ],
)
def test_what_cp_async_cannot_read_is_refused(options: dict[str, Any], reason: str) -> None:
    call = dataclasses.replace(make_call(case("refused", V=1024)), **options)
    with _generations.using(dataclasses.replace(mma.SM89, compute_capabilities=("9.0",), ran_on=None)):
        assert mosaic.supports(call) == reason


def test_two_heads_need_whole_atoms() -> None:
    call = make_call(case("student", V=264))
    with _generations.using(dataclasses.replace(mma.SM89, compute_capabilities=("9.0",))):
        assert mosaic.supports(call) is None
        assert mosaic.supports(dataclasses.replace(call, teacher=call)) == "V must be a multiple of 128, got 264"


HEADS: list[tuple[int, int, int, dict[str, Any]]] = [
    (2048, 4096, 151936, {**EVERYTHING, "cache_bytes": 1 << 29, "vocab_size": 151669}),
    (1003, 704, 19008, {"logit_scale": True, "where": True, "vocab_size": 18100, "floor": True, "stats": True}),
    (600, 2880, 50257, {"cache_bytes": 1 << 40}),
]


@pytest.mark.slow
@pytest.mark.parametrize("generation", [mma.SM80, mma.SM89, mma.SM120], ids=lambda one: one.compute_capabilities[0])
@pytest.mark.parametrize(("T", "H", "V", "options"), HEADS, ids=[head[0] for head in HEADS])
def test_lowers_for_cuda(T: int, H: int, V: int, options: dict[str, Any], generation: Generation) -> None:
    capability = generation.compute_capabilities[0]
    claimed = trace_for_device(Device("gpu", generation.devices[0], capability, 108))
    with _generations.using(generation), lowering_for(capability), claimed:
        lower(T, H, V, **options)
        if T == 600:
            lower_adapter(T, H, V, 16)


@pytest.mark.parametrize("generation", [mma.SM80, mma.SM120], ids=lambda one: one.compute_capabilities[0])
def test_kept_tiles_of_two_heads_go_where_the_gpu_can_send_them(generation: Generation) -> None:
    """By TMA where there is one, and room for what it sends."""
    given, capability = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), generation.compute_capabilities[0]

    def divergence(weight: Any) -> Any:
        return jnp.sum(
            linear_kl(weight, weight, weight[::-1], weight, cache_bytes=1 << 30, implementation="mosaic_gpu")
        )

    tested, device = dataclasses.replace(generation, ran_on=None), Device("gpu", generation.devices[0], capability, 108)
    with _generations.using(tested), trace_for_device(device):
        text = str(jax.jit(jax.grad(divergence)).trace(given).jaxpr)
    name = "lce_cached_kl_dlogits"
    assert name in text
    assert ("copy_smem_to_gmem" in text) == generation.machine.has_tma
    kept, output = [jnp.empty(1, jnp.bfloat16), jnp.empty(1, jnp.float32)], jnp.empty(1, jnp.bfloat16)
    staged, needed = _cached_dlogits.plan_shared_memory(generation, kept, output)
    assert not staged
    assert needed <= generation.smem_limit


LIVE = [
    case("several batches, padding, candidates", T=264, V=1152, H=64, num_columns=1100, num_rows=200, chunk=1,
         num_candidates=3, temperature=True, stats=True),
    case("several batches, padding, floor", T=264, V=1152, H=64, num_columns=1100, num_rows=200, chunk=1,
         has_floor=True, temperature=True, stats=True),
    case("padding, softcap, no entropy, dweight added, float16", T=136, V=896, H=64, num_columns=600,
         logit_softcap=3.0, entropy=False, adds_dweight=True, dtype="float16"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("test", [*cases(mma.SM120, LIVE), *cases(mma.SM89, LIVE)], indirect=True)
def test_active_tiles_alone(test: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    test = with_threshold(test)
    call = make_call(test)
    assert mosaic.supports(call) is None
    check_active_tiles(test, call)
    assert not races_found()
    assert "RACE DETECTED" not in capfd.readouterr().out
