"""Tunix's PeftTrainer and GRPOLearner with this package's head: the curves of stored logits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("tunix"), reason="needs google-tunix, in a venv of its own"
)

NEAR = 1e-6  # of float32 sums in another order, after five steps
MOVED = 1e-2  # the least that training has changed


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.frameworks.tunix_worker"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["SFT, own head", "SFT, own head, 2 x 2", "SFT, tied", "SFT, tied, 2 x 2", "GRPO"])
def test_the_curves_are_those_of_stored_logits(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert found["steps"] >= 5
    assert found["losses"] <= NEAR
    assert found["parameters"] <= NEAR
    assert found["moved"] >= MOVED


def test_packed_sequences(results: dict[str, Any]) -> None:
    found = results["packed"]
    assert found["values"] <= 5e-6  # nats, of float32 sums in another order
    assert found["gradients"] <= NEAR
    assert found["firsts"] == 0  # no sequence's first token is predicted by another sequence


def test_grpo_ran_without_logits(results: dict[str, Any]) -> None:
    assert results["GRPO"]["traced"] >= 2  # the policy's gradient, and the old policy with the reference
    assert results["GRPO"]["last"] > 0  # a KL divergence


def test_the_step_holds_no_logits(results: dict[str, Any]) -> None:
    fused, stock = results["largest array"]
    assert stock == 8 * 128 * 4096
    assert fused <= stock / 8
