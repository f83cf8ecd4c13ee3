"""MaxText trains with ``examples/maxtext_head.py`` as with its own loss: make test-frameworks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("maxtext"), reason="needs maxtext: make test-frameworks")
ROOT = Path(__file__).parents[2]
NEAR = 5e-6  # by norm: float32 sums in another order, after four steps of AdamW


def run_module(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    command = (sys.executable, *command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(run_module("-m", "examples.frameworks.maxtext_worker").splitlines()[-1])


@pytest.mark.parametrize("mesh", ["4", "2 x 2", "explicit 2 x 2"])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_four_steps_equal_those_with_its_own_loss(results: dict[str, Any], head: str, mesh: str) -> None:
    """MaxText rounds a tied table, and its gradient, to bfloat16 once per tile. Our head rounds it once."""
    run, is_tied = results["runs"][f"{head}, {mesh}"], head == "tied"
    assert run["calls"] > 0
    assert len(run["want"]) == 4
    assert run["got"] == pytest.approx(run["want"], rel=5e-6 if is_tied else 1e-6)
    assert run["parameters"] <= (2 * results["their tilings"] if is_tied else NEAR)
    assert run["got"][-1] < run["got"][0]


def test_their_tilings_differ_by_rounding_alone(results: dict[str, Any]) -> None:
    assert results["their tilings"] <= 2e-4  # of the table: AdamW moves its elements by 3e-3 in a step


def test_logits_are_refused(results: dict[str, Any]) -> None:
    assert results["refusal"] == "MaxText computes logits: set num_vocab_tiling=2"


def test_the_program_runs_its_trainer(tmp_path: Path) -> None:
    options = [
        "run_name=tiny",
        f"base_output_directory={tmp_path}",
        "hardware=cpu",
        "dataset_type=synthetic",
        "steps=1",
    ]
    options += ["base_emb_dim=32", "base_mlp_dim=32", "base_num_decoder_layers=1", "vocab_size=64", "head_dim=8"]
    options += ["base_num_query_heads=2", "base_num_kv_heads=2", "max_target_length=16", "enable_checkpointing=false"]
    options += ["per_device_batch_size=2", "attention=dot_product", "num_vocab_tiling=2", "log_config=false"]
    line = "maxtext_head: the loss comes from lce_jax\n"
    assert line in run_module("-m", "maxtext_head", *options, "skip_jax_distributed_system=true")
