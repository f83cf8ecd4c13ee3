"""verl's, SkyRL's and NeMo RL's functions with our head in place of theirs, also in Ray's workers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEAR = 1e-6  # float32 sums in another order
FRAMEWORKS = ("verl", "skyrl", "nemo_rl")
LINES = {
    "verl": "verl: log-probabilities of the head come from lce_torch_bridge\n",
    "skyrl": "skyrl: log-probabilities of the head come from lce_torch_bridge\n",
    "nemo_rl": "nemo-rl: log-probabilities of the head come from lce_torch_bridge\n",
}
SWITCHES = {
    "skyrl": "set trainer.fused_lm_head_logprob=true",
    "nemo_rl": "set policy.megatron_cfg.use_fused_linear_logprobs=true",
}


def run(*module: str, **environment: str) -> str:
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | environment
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr + done.stdout


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    if not importlib.util.find_spec(request.param):
        pytest.skip(f"needs {request.param}: make test-frameworks")
    return request.param


@pytest.fixture(scope="module")
def results(framework: str) -> dict[str, Any]:
    output = run(f"examples.frameworks.{framework}_worker")
    assert output.count(LINES[framework]) == {"verl": 2}.get(framework, 1)  # the worker resets verl's count
    return json.loads(output.splitlines()[-1])


def test_values_and_gradients_equal_its_own_heads(results: dict[str, Any]) -> None:
    assert results["calls"] > 0
    assert results["values"] <= NEAR
    assert results["gradients"] <= NEAR


def test_skyrls_model_for_fsdp(framework: str, results: dict[str, Any]) -> None:
    if framework == "skyrl":
        assert results["FSDP"] <= NEAR
        assert (results["served"] > 0, results["stored"]) == (True, 0)


def test_nothing_else_computes_the_head(framework: str, results: dict[str, Any]) -> None:
    """In verl, all that import the function have ours. In the others, logits are an error that names the option."""
    if framework == "verl":
        assert results["replaced"] == [True, True, True]
        assert results["losses"][-1] < results["losses"][0]
    else:
        assert SWITCHES[framework] in results["refusal"]


def test_workers_that_ray_starts_have_ours(framework: str) -> None:
    output = run("examples.frameworks.ray_worker", framework)
    assert output.splitlines()[-1] == f"lce_torch_bridge.{framework}"


@pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="needs verl: make test-frameworks")
def test_verl_imports_ours_by_a_variable() -> None:
    variable = {"VERL_USE_EXTERNAL_MODULES": "lce_torch_bridge.verl"}
    output = run("examples.frameworks.ray_worker", "verl", "by itself", **variable)
    assert output.splitlines()[-1] == "lce_torch_bridge.verl"


@pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="needs verl: make test-frameworks")
def test_the_update_of_verls_actor() -> None:
    ours, deferred, logits = (
        json.loads(run("examples.frameworks.verl_engine_worker", way).splitlines()[-1])
        for way in ("ours", "deferred", "logits")
    )
    for run_of_ours in (ours, deferred):
        assert run_of_ours["losses"] == pytest.approx(logits["losses"], rel=1e-6)  # of three steps
        assert run_of_ours["losses"][-1] < run_of_ours["losses"][0]
    assert (ours["calls"], deferred["calls"], logits["calls"]) == (3, 0, 0)
    assert deferred["served"] > 0  # none is stored: that would raise
