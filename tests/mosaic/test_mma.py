"""The kernels by mma.sync, run on the CPU by the interpreter with its race detector, against stored logits in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from lce_jax.mosaic import _generations, mma
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._pallas import interpreting, lowering_for, plgpu
from tests.devices import H200
from tests.mosaic_calls import CALLS, Call, budget_of, check


def generation_of(test: Call, generation: Generation) -> Generation:
    """On the device of the tests, with several chunks and launches."""
    budget = budget_of(test, generation.budget, generation.tiling)
    return dataclasses.replace(generation, budget=budget, compute_capabilities=("9.0",))


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Call]:
    test, generation = request.param
    used, lowered = _generations.using(generation_of(test, generation)), lowering_for(generation.compute_capabilities[0])
    with used, lowered, interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield test


def is_served(call: Call, generation: Generation) -> bool:
    whole_parts = (call.options.vocab_part_size or 0) % generation.tiling.atom == 0
    return generation.has_tma or (call.options.weight_layout == "vh" and whole_parts)


def calls(generation: Generation) -> list[Any]:
    capability = generation.compute_capabilities[0]
    return [pytest.param((call, generation), id=f"{call}-{capability}") for call in CALLS if is_served(call, generation)]


@pytest.mark.parametrize("test", [*calls(mma.SM120), *calls(mma.SM89)], indirect=True)
def test_matches_float64(test: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check(test, H200, monkeypatch)
    assert "RACE DETECTED" not in capfd.readouterr().out
