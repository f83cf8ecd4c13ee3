"""Trainers, adapters, wrappers and changes of a model with deferred logits: losses and parameters as stock's."""

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
NEAR = 2e-5  # float32 sums in another order, over a few steps
WORKER = "examples.frameworks.deferred_training_worker"
Results = dict[str, dict[str, Any]]


def run_part(part: str) -> Results:
    """The worker's results of a part, by name; none is an error of stock, or of ours."""
    command = [sys.executable, "-m", WORKER, part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return check(done.stdout)


def check(said: str) -> Results:
    found = {row["name"]: row for line in said.splitlines() if line.startswith("{") for row in [json.loads(line)]}
    assert found
    assert {name: row for name, row in found.items() if "stock" in row or "raises" in row} == {}
    assert {name: row for name, row in found.items() if row.get("error", 0.0) > row.get("bound", 1e-3)} == {}
    for row in found.values():
        assert "refused" in row or row["reasons"] or not row["stored"], row
    return found


@pytest.mark.parametrize("part", ["trl", "trainer"])
def test_trainers(part: str) -> None:
    for name, row in run_part(part).items():
        if name.startswith("Reward"):  # its head gives one number a sequence
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
    """Where ZeRO-3 frees the weight, the head computes its logits and says so; other hooks that do are refused."""
    for name, row in run_part("hooks").items():
        if name.startswith("ZeRO-3"):
            assert row["served"] == 0, name
            assert row["reasons"] == ["ZeRO-3 frees its weight after the head's forward"], name
        else:
            assert "refused" in row, name


def test_ranks(tmp_path: Path) -> None:
    said = ranks(2, ["-m", "examples.frameworks.deferred_ranks_worker"], tmp_path / "logs", JAX_PLATFORMS="cpu")
    found = check(next(text for text in said if '{"part"' in text))
    assert all(row["served"] for name, row in found.items() if name.startswith("DDP"))
