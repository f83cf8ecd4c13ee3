"""``python -m benchmarks step`` on a small model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("optax")

from benchmarks import __main__ as bench
from benchmarks import records, step

pytestmark = pytest.mark.site


def test_both_heads_train_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    assert bench.main(["step", "--batch", "2", "--length", "32", "--rounds", "1", "--out", str(out)]) == 0
    jobs = list(records.jobs(records.read(out), "step"))
    assert [job["rows"][0]["objective"] for job in jobs] == list(step.OBJECTIVES)
    for job in jobs:
        stored, ours = job["rows"]
        assert (stored["name"], ours["name"]) == ("logits stored", "lce_jax")
        assert ours["loss"] == pytest.approx(stored["loss"], rel=1e-5)
        assert stored["tokens"] == ours["tokens"] == 64
        assert job["sizes"]["vocab_size"] == 512
    assert sum("tokens/s" in line for line in capsys.readouterr().out.splitlines()) == 4


def test_what_does_not_fit_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(step, "draw", no_memory)
    row = step.measure(step.MODELS["tiny"], "cross entropy", "lce_jax", 2, 32, 1, jnp.dtype("float32"))
    assert (row["seconds"], row["memory_bytes"], row["tokens"]) == (None, None, 64)
