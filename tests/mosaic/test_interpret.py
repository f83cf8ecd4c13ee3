"""The Hopper kernels, run on the CPU by the interpreter with its race detector, against stored logits in float64.

The interpreter models shared memory, TMA, barriers, wgmma and the warpgroups' concurrency; unwritten memory is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.mathematics import _logprobs
from lce_jax.mosaic import _generations, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.common._tiles import Tuning
from lce_jax.mosaic.sm90._tuning import Tunings
from lce_jax.types import _types
from lce_jax.types._types import LogprobOutput, Operands
from tests.devices import H200
from tests.mosaic_cases import CASES, MULTIPROCESSORS, Case, Oracle, budget_of, check


def kernels_of(test: Case) -> Generation:
    """Hopper with settings that a small call does not get: turns, clusters, several chunks, several launches."""
    tunings = Tunings(short_tokens=1) if test.shared else Tunings(many_row_blocks=1)
    if test.cluster > 1:
        tuning = Tuning(tile_k=64, stages=2, cluster=test.cluster)
        tuned = {("NVIDIA H200", kernel): ((64, tuning),) for kernel in ("forward", "dlogits")}
        tunings = dataclasses.replace(tunings, tuned=tuned)
    budget = budget_of(test, sm90.HOPPER.budget, sm90.HOPPER.tiling)
    return dataclasses.replace(sm90.HOPPER, budget=budget, tunings=tunings)


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Case]:
    """The call, with its kernels in place of the usual ones and the interpreter in place of a GPU."""
    with _generations.using(kernels_of(request.param)), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield request.param


# What others have alone. tests/torch/test_kernels.py has candidates, and test_lora.py an adapter.
@pytest.mark.fast(
    "a sum, no row left",
    "dhidden written once",
    "chunks, columns",
    "hv with a narrow",
)
@pytest.mark.parametrize("test", CASES, ids=str, indirect=True)
def test_matches_float64(test: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check(test, H200, monkeypatch)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(("temperature", "options"), [
    pytest.param(1.0, {"cache_bytes": 1 << 30}, marks=pytest.mark.slow), (0.1, {"logit_scale": 1.7}),
])  # fmt: skip
def test_no_probability_is_above_one(temperature: float, options: dict[str, Any]) -> None:
    """The likeliest labels of peaked logits, in tiles and in columns that are no whole atom."""
    T, H, V = 128, 64, 515
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((T, H)) * np.linspace(5, 40, T)[:, None], jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((V, H)) / np.sqrt(H), jnp.bfloat16).at[512:].mul(2)
    raw = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    targets = jnp.asarray(raw.argmax(1), jnp.int32)
    inverse = None if temperature == 1.0 else jnp.full((T,), 1.0 / temperature, jnp.float32)
    operands = Operands(hidden, weight, targets, inverse, None, None)
    call = _types.Call(
        num_tokens=T, hidden_size=H, columns=V, dtype=jnp.dtype("bfloat16"), **options,
        device=H200._replace(core_count=MULTIPROCESSORS),
    )  # fmt: skip

    @jax.jit
    def results(operands: Operands) -> LogprobOutput:
        stats, _ = mosaic.statistics(operands, call, True)
        scale = _logprobs.compute_row_scale(call, operands.inverse_temperature)
        return _logprobs.finish(stats, scale, operands.targets, None, V).outputs

    with interpreting(plgpu.InterpretGPUParams()):
        out = results(operands)
    assert np.all(np.asarray(out.logprobs) <= 0)
    assert np.all(np.asarray(out.entropy) >= 0)
    exact = Oracle(operands, call).statistics()
    np.testing.assert_allclose(out.logprobs, exact.target - np.log(exact.sumexp), atol=2e-5 / temperature)
    assert np.asarray(targets >= 512).any()
