"""Losses and parameters with deferred logits equal stock's, with trainers, adapters, wrappers and changed models."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch.processes import ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft", "trl"))),
    reason="needs transformers, accelerate, peft and trl: make test-frameworks",
)
ROOT = Path(__file__).parents[2]
NEAR = 2e-5  # float32 sums in another order, after a few steps
WORKER = "examples.frameworks.deferred_training_worker"
Results = dict[str, dict[str, Any]]


def run_part(part: str) -> Results:
    """Runs a part of the worker. Returns its results by name, and checks that none is an error."""
    command = [sys.executable, "-m", WORKER, part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return check(done.stdout)


def check(output: str) -> Results:
    results = {row["name"]: row for line in output.splitlines() if line.startswith("{") for row in [json.loads(line)]}
    assert results
    assert {name: row for name, row in results.items() if "stock" in row or "raises" in row} == {}
    assert {name: row for name, row in results.items() if row.get("error", 0.0) > row.get("bound", 1e-3)} == {}
    for row in results.values():
        assert "refused" in row or row["reasons"] or not row["stored"], row
    return results


@pytest.mark.parametrize("part", ["trl", "trainer"])
def test_trainers(part: str) -> None:
    for name, row in run_part(part).items():
        if name.startswith("Reward"):  # its head returns one number per sequence
            assert "refused" in row
            continue
        assert row["losses"] <= NEAR, name
        assert row["parameters"] <= 1e-3, name
        assert row["moved"] > 1e-3, name
        assert row["steps"] == 4, name


def test_adapters_store_logits_only_where_they_change_the_head() -> None:
    for name, row in run_part("peft").items():
        if "head" not in name:
            assert row["served"], name
            assert not row["stored"], name


def test_changes_of_a_model() -> None:
    assert all("error" in row for row in run_part("changes").values())


def test_weights_that_come_and_go() -> None:
    """If ZeRO-3 frees the weight, the head computes its logits and says so. Other hooks that free it are refused."""
    for name, row in run_part("hooks").items():
        if name.startswith("ZeRO-3"):
            assert row["served"] == 0, name
            assert row["reasons"] == ["ZeRO-3 frees its weight after the head's forward"], name
        else:
            assert "refused" in row, name


def test_ranks(tmp_path: Path) -> None:
    outputs = ranks(2, ["-m", "examples.frameworks.deferred_ranks_worker"], tmp_path / "logs", JAX_PLATFORMS="cpu")
    results = check(next(text for text in outputs if '{"part"' in text))
    assert all(row["served"] for name, row in results.items() if name.startswith("DDP"))
