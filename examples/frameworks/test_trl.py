"""TRL with our function in place of its own: fields and gradients of its fused head, and its trainers' losses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs trl: make test-frameworks")
NEAR = 1e-6  # float32 sums in another order


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.frameworks.trl_worker"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("trl: log-probabilities and divergences of the head come from lce_torch_bridge") == 1
    return json.loads(done.stdout.splitlines()[-1])


def test_fused_head(results: dict[str, Any]) -> None:
    result = results["fused head"]
    assert result["fields"] <= 2 * NEAR
    assert result["top1"]
    assert result["gradients"] <= NEAR


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "SFT", "KTO", "DPO", "forward KL", "JSD", "reverse KL"])
def test_trainers(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert result["calls"] >= result["steps"] == 3
    # TRL's own JSD of two similar models is off by up to 2e-4, because its two halves cancel.
    assert result["losses"] <= (1e-4 if name == "JSD" else 2e-5 if "KL" in name else 3e-6)
    assert result["moved"] > 1e-3  # training has changed the weights by at least this


def test_the_program(results: dict[str, Any]) -> None:
    assert len(results["program"]) == 2
