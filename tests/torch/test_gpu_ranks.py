"""Two GPUs over NCCL: CUDA graphs that hold its collectives, the time of a call, and megatron-core's models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.torch import megatron_cases
from tests.torch.gpu_problem import skip_unless_direct
from tests.torch.megatron_cases import Case, of, run_ranks
from tests.torch.processes import ranks

pytestmark = pytest.mark.multi_gpu


def skip_without_megatron() -> None:
    if not importlib.util.find_spec("megatron.core"):
        pytest.skip("needs megatron-core")


@pytest.mark.parametrize("check", ["replays", "megatron", "time"])
def test_on_two_ranks(check: str, tmp_path: Path) -> None:
    skip_unless_direct()
    if check == "megatron":
        skip_without_megatron()
    for said in ranks(2, ["-m", "tests.torch.graphs_worker", check], tmp_path / "logs", 240, JAX_PLATFORMS="cpu"):
        print(said)
        assert f"done {check}" in said


# Of float32, through two layers, the products by two libraries.
VALUES, GRADIENTS = 1e-5, 1e-5
BLUR = 1.05  # of 16 bits, as in test_megatron


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    skip_without_megatron()
    return run_ranks(tmp_path_factory.mktemp("ranks") / "own", "ON_GPUS", ranks=2, seconds=400, gpus="own")


@pytest.fixture(scope="module")
def results_seeing_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    skip_without_megatron()
    return run_ranks(tmp_path_factory.mktemp("ranks") / "all", "SEEING_ALL_GPUS", ranks=2, seconds=180, gpus="all")


def cases(*checks: str, table: list[Case] = megatron_cases.ON_GPUS) -> Any:
    return pytest.mark.parametrize("case", [case for case in table if case.check in checks], ids=str)


def test_the_ranks_end_well(results: dict[str, Any], results_seeing_all: dict[str, Any]) -> None:
    for outcome in (results, results_seeing_all):
        assert "failure" not in outcome, outcome["failure"]


@cases("parity")
def test_parity(results: dict[str, Any], case: Case) -> None:
    check_parity(of(results, case))


@cases("parity", table=megatron_cases.SEEING_ALL_GPUS)
def test_parity_of_ranks_that_see_all_gpus(results_seeing_all: dict[str, Any], case: Case) -> None:
    check_parity(of(results_seeing_all, case))


def check_parity(result: dict[str, Any]) -> None:
    assert result["logprobs"] <= VALUES
    assert result.get("entropy", 0.0) <= VALUES
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["ranks agree"]
    assert result["every parameter"]


@cases("half precision", "main_grad half precision", "optimizer")
def test_half_precision_is_no_further_from_float64_than_stock(results: dict[str, Any], case: Case) -> None:
    result = of(results, case)
    fields = {name.removesuffix(" fused") for name in result if name.endswith(" fused")}
    assert fields
    for field in fields:
        assert result[f"{field} fused"] <= BLUR * result[f"{field} stock"], field


@cases("reduction left out", "reduction doubled")
def test_a_wrong_reduction_is_noticed(results: dict[str, Any], case: Case) -> None:
    assert of(results, case)["gradient"] > 0.5


@cases("main_grad")
def test_three_micro_batches_into_main_grad(results: dict[str, Any], case: Case) -> None:
    result = of(results, case)
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["added to main_grad"]
    assert result["no grad left"]


@cases("losses")
def test_losses_of_a_models_own(results: dict[str, Any], case: Case) -> None:
    result = of(results, case)
    assert result["loss"] <= VALUES
    assert result["logged loss"] <= VALUES
    assert result["logged counts"]
    assert result["gradient"] <= GRADIENTS, result["worst"]
