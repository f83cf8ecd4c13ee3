"""The Blackwell kernels, run on the CPU by the interpreter with its race detector, against the materialised oracle.

The interpreter models shared and tensor memory, TMA, barriers, tcgen05.mma and the warps' concurrency. It models no
register layout, and one block multiplies alone. Nothing of them has run on a GPU.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from lce_jax.mosaic import _generations, sm100
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.sm100 import _epilogue, _machine, _pipeline, _statistics_epilogue
from tests.devices import B200
from tests.mosaic_calls import CALLS, Call, budget_of, check

# `make test` runs these, which have most things together, and `make test-all` the others.
TOGETHER = {"cache with everything, narrow tiles", "hv with a narrow swizzle and a cache", "dweight added, padding"}
OF_HOPPER = {"one step over H, shared", "clusters", "clusters, rows left out, cache"}  # its own ways to share a step
PARAMETERS = [
    pytest.param(one, marks=[] if one.name in TOGETHER else [pytest.mark.slow])
    for one in CALLS
    if one.name not in OF_HOPPER and one.options.vocab_part_size is None  # which its kernels refuse
]


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Call]:
    """The call, with a budget for it, and the interpreter in place of a GPU."""
    kernels = sm100.Kernels(budget=budget_of(request.param, sm100.KERNELS.budget, sm100.KERNELS.tiling))
    with _generations.using(kernels), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield request.param


@pytest.mark.parametrize("test", PARAMETERS, ids=str, indirect=True)
def test_matches_reference(test: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check(test, B200, monkeypatch)
    assert "RACE DETECTED" not in capfd.readouterr().out


PAIRED = ["clusters", "dweight added, hv", "cache with everything, narrow tiles"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRED)
def test_blocks_that_multiply_together(name: str) -> None:
    """As tests/mosaic_pairs.py reads JAX's guide. A process of its own, because a wrong kernel may wait for ever."""
    command = [sys.executable, "-m", "tests.mosaic_pairs", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "RACE DETECTED" not in done.stdout


# A module, a function in it, what stands there, and what is put in its place.
FAULTS = {
    "a stage is filled while it is read": (
        _pipeline, "_copy", "lambda: plgpu.barrier_wait(ring.empty.at[stage])", "lambda: None",
    ),
    "a stage is read before it is full": (
        _pipeline, "_multiply_all", "plgpu.barrier_wait(ring.full.at[stage])", "None",
    ),
    "an accumulator is overwritten while it is read": (
        _pipeline, "_multiply_all", "lambda: plgpu.barrier_wait(ring.drained.at[slot])", "lambda: None",
    ),
    "an accumulator is read before it is done": (
        _pipeline, "walk_tiles", "plgpu.barrier_wait(ring.done.at[slot])", "None",
    ),
    "an accumulator begins with what it held": (_pipeline, "_multiply_all", "accumulate=i > 0", "accumulate=True"),
    "a slot is filled while it is sent": (
        _epilogue, "send", "plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)", "None",
    ),
    "a slot is sent before it is visible": (_epilogue, "send", "plgpu.commit_smem()", "None"),
    "a padding column counts": (_epilogue, "without_padding", "number < left", "number <= left"),
    "nothing to contract": (_epilogue, "send_product", "jnp.int32(z.num_steps) > 0", "True"),
    "a maximum of half a tile": (
        _statistics_epilogue, "_extremes", "lax.fori_loop(0, BLOCKS,", "lax.fori_loop(0, BLOCKS // 2,",
    ),
}  # fmt: skip


SHOWN_BY = {"nothing to contract": "no row left", "an accumulator is overwritten while it is read": "ragged"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the detector of races, or in the results."""
    plant(monkeypatch, *FAULTS[fault])
    name = SHOWN_BY.get(fault, "cache with everything, narrow tiles")
    (test,) = (one for one in CALLS if one.name == name)
    kernels = sm100.Kernels(budget=budget_of(test, sm100.KERNELS.budget, sm100.KERNELS.tiling))
    found = pytest.raises((AssertionError, jax.errors.JaxRuntimeError))
    with _generations.using(kernels), interpreting(plgpu.InterpretGPUParams(detect_races=True)), found:
        check(test, B200, monkeypatch)


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, there: str, wrong: str) -> None:
    """Puts the function with the fault where callers find it, in the modules that import it too."""
    right = getattr(module, name)
    source = inspect.getsource(right)
    assert source.count(there) == 1
    scope = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + source.replace(there, wrong), module.__file__, "exec"), scope)
    for each in (_pipeline, _epilogue, _statistics_epilogue, _machine):
        if getattr(each, name, None) is right:
            monkeypatch.setattr(each, name, scope[name])
    fields = {field: scope[name] for field, value in _machine.MACHINE._asdict().items() if value is right}
    monkeypatch.setattr(_machine, "MACHINE", _machine.MACHINE._replace(**fields))
