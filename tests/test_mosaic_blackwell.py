"""The Blackwell kernels, run on the CPU by the interpreter with its race detector, against the materialised oracle.

The interpreter models shared and tensor memory, TMA, barriers, tcgen05.mma and the warps' concurrency. It models no
register layout, and one block multiplies alone. Nothing of them has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lce_jax.mosaic import _generations, sm100
from lce_jax.mosaic._pallas import interpreting, plgpu
from tests.devices import B200
from tests.mosaic_calls import CALLS, Call, budget_of, check

# `make test` runs these, which have most things together, and `make test-all` the others.
TOGETHER = {
    "five tokens, columns that are no whole atom", "cache with everything, narrow tiles", "no row left",
    "half a cache, float16", "hv with a narrow swizzle and a cache", "dweight added, padding",
}  # fmt: skip
OF_HOPPER = {"one step over H, shared", "clusters", "clusters, rows left out, cache"}  # its own ways to share a step
PARAMETERS = [
    pytest.param(one, marks=[] if one.name in TOGETHER else [pytest.mark.slow])
    for one in CALLS
    if one.name not in OF_HOPPER
]


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Call]:
    """The call, with a budget for it, and the interpreter in place of a GPU."""
    kernels = sm100.Kernels(budget=budget_of(request.param, sm100.KERNELS.budget, sm100.KERNELS.tiling))
    with _generations.using(kernels), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield request.param


@pytest.mark.parametrize("test", PARAMETERS, ids=str, indirect=True)
def test_matches_reference(test: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check(test, B200, monkeypatch, capfd)
