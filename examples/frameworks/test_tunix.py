"""Tunix's PeftTrainer and GRPOLearner with our head have the same losses as with stored logits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("tunix"), reason="needs google-tunix, in a separate environment"
)

NEAR = 1e-6  # float32 sums in another order, after five steps
MOVED = 1e-2  # training changes the weights by at least this


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.frameworks.tunix_worker"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["SFT, own head", "SFT, own head, 2 x 2", "SFT, tied", "SFT, tied, 2 x 2", "GRPO"])
def test_the_losses_equal_those_of_stored_logits(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert result["steps"] >= 5
    assert result["losses"] <= NEAR
    assert result["parameters"] <= NEAR
    assert result["moved"] >= MOVED


def test_packed_sequences(results: dict[str, Any]) -> None:
    result = results["packed"]
    assert result["values"] <= 5e-6  # nats: float32 sums in another order
    assert result["gradients"] <= NEAR
    assert result["firsts"] == 0  # no sequence's first token is predicted by another sequence


def test_grpo_ran_without_logits(results: dict[str, Any]) -> None:
    assert results["GRPO"]["traced"] >= 2  # the policy's gradient, and the old policy with the reference
    assert results["GRPO"]["last"] > 0  # a KL divergence


def test_the_step_holds_no_logits(results: dict[str, Any]) -> None:
    fused, stock = results["largest array"]
    assert stock == 8 * 128 * 4096
    assert fused <= stock / 8
