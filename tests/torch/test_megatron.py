"""Real megatron-core models on two CPU ranks (gloo): the op against their own logits, every parameter's gradient.

The ranks run once (`megatron_worker`), because starting them is much of the cost; each test judges one case.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.torch import megatron_cases
from tests.torch.megatron_cases import REFUSALS, REFUSED_LOSSES, Case
from tests.torch.megatron_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("torch") or not importlib.util.find_spec("megatron.core"),
    reason="needs torch and megatron-core",
)

# Of float32: the same sums in another order, through two layers.
VALUES, GRADIENTS = 2e-6, 1e-6
# The decoder's own 16-bit errors have the same bits in both ways, and add to the head's with either sign.
BLUR = 1.05
type Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """The results of a table's cases: the ranks run it once in a session, started by the first of xdist's workers."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent

    @functools.cache
    def of_table(table: str) -> dict[str, Any]:
        found = shared / f"megatron-{table}.json"
        with open(shared / f"megatron-{table}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                found.write_text(json.dumps(run_ranks(shared / f"megatron-{table}", table, ranks=2, seconds=400)))
        return json.loads(found.read_text())

    return of_table


def of(results: Results, case: Case) -> dict[str, Any]:
    found = results("MORE" if case in megatron_cases.MORE else "ALL")
    if case.name not in found:
        pytest.fail(f"the ranks did not get to {case.name!r}: {found.get('failure', '')[-2000:]}")
    return found[case.name]


def cases(check: str) -> Any:
    params = [pytest.param(case, marks=pytest.mark.slow if case in megatron_cases.MORE else ())
              for case in [*megatron_cases.ALL, *megatron_cases.MORE] if case.check == check]  # fmt: skip
    return pytest.mark.parametrize("case", params, ids=str)


@pytest.mark.parametrize("table", ["ALL", pytest.param("MORE", marks=pytest.mark.slow)])
def test_the_ranks_end_well(results: Results, table: str) -> None:
    found = results(table)
    assert "failure" not in found, found["failure"]
    assert found.keys() == {case.name for case in getattr(megatron_cases, table)}


@cases("parity")
def test_parity(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["logprobs"] <= VALUES
    assert result.get("entropy", 0.0) <= VALUES
    assert ("candidates" in result) == ("candidates" in dict(case.options))
    assert result.get("candidates", 0.0) <= VALUES
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["ranks agree"]
    assert result["every parameter"]


@cases("half precision")
def test_half_precision_is_no_further_from_float64_than_stock(results: Results, case: Case) -> None:
    result = of(results, case)
    for field in ("logprobs", "entropy", "gradient", "weight's gradient"):
        assert result[f"{field} fused"] <= BLUR * result[f"{field} stock"], field
    for field in (
        "head's logprobs",
        "head's entropy",
    ):  # the products of bf16 are exact in float32: no logit is rounded
        assert result[f"{field} fused"] <= 0.01 * result[f"{field} stock"], field
    for field in ("head's dhidden", "head's dweight"):
        assert field.endswith("dweight") or f"{field} fused" in result
        assert result.get(f"{field} fused", 0.0) <= result.get(f"{field} stock", 0.0), field


@cases("reduction left out")
def test_a_missing_reduction_is_noticed(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["logprobs"] <= VALUES  # the forward pass does not show it
    assert result["gradient"] > 0.5


@cases("reduction doubled")
def test_a_second_reduction_is_noticed(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["logprobs"] <= VALUES
    assert result["gradient"] > 0.5


@cases("main_grad")
def test_three_micro_batches_into_main_grad(results: Results, case: Case) -> None:
    result, options = of(results, case), dict(case.options)
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["no grad left"]
    frozen = "frozen" in dict(case.model)
    fused = options.get("fusion", True) or options.get("wgrad") == "main_grad"
    assert result["added to main_grad"] == (fused and not frozen)


@cases("main_grad half precision")
def test_main_grad_of_half_precision(results: Results, case: Case) -> None:
    result = of(results, case)
    for field in ("gradient", "weight's gradient"):
        assert result[f"{field} fused"] <= BLUR * result[f"{field} stock"], field


@cases("optimizer")
def test_steps_on_float32_main_parameters(results: Results, case: Case) -> None:
    result = of(results, case)
    for field in ("gradient", "weight's gradient"):
        assert result[f"{field} fused"] <= BLUR * result[f"{field} stock"], field


@cases("megatron loss")
def test_megatrons_own_loss(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["logprobs"] <= VALUES
    assert result["gradient"] <= GRADIENTS, result["worst"]


@cases("losses")
def test_losses_of_a_models_own(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["loss"] <= VALUES
    assert result["logged loss"] <= VALUES
    assert result["logged counts"]
    assert result["some accepted"] or "bias" not in dict(case.model)
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["depths move the gradient"]


@cases("predictions dropped")
def test_a_megatron_without_labels_for_predictions(results: Results, case: Case) -> None:
    assert of(results, case)["logprobs"] <= VALUES


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_losses_refused(results: Results, name: str) -> None:
    (case,) = (case for case in megatron_cases.LOSSES if case.check == "losses refused")
    result = of(results, case)
    assert result.keys() == REFUSED_LOSSES.keys()
    assert re.search(REFUSED_LOSSES[name], result[name]), result[name]


@cases("parameter gather")
def test_parameters_gathered_by_hooks(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["same bits"]
    assert result["noticed without the hook"], "the control: without the output layer's hook there must be NaN"


@cases("pipeline stages")
def test_pipeline_stages(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["hidden"] == ("(16, 3, 64)" if case.tp == 2 else "(32, 3, 64)")
    assert result["logprobs"] <= VALUES
    assert result["entropy"] <= VALUES
    assert result["gradient"] <= GRADIENTS, result["worst"]


@cases("result")
def test_result(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["type"] == "LogprobOutput"
    assert result["shapes"] == "{(3, 32)}"
    assert result["dtypes"] == "{torch.float32}"
    assert result["contiguous"]
    assert result["without DDP"]
    absent = ["entropy", "max_logit", "min_logit", "mean_logit", "candidate_logprobs", "sum_p_squared", "support"]
    assert result["absent"] == str(absent)
    assert result["error"] <= VALUES


@cases("float16 module")
def test_inside_float16_module(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["same bits"]
    assert result["type"] in ("tuple", ""), "Float16Module keeps named tuples now: say so in output_processor"


@cases("hidden as it is")
def test_hidden_is_not_copied(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["same memory"]
    assert result["contiguous"]
    assert result["shape"] == "(32, 3, 64)"


@cases("further arguments")
def test_further_arguments_pass_through(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["same bits"]
    assert result["passed on"]


@cases("threads")
def test_threads_share_a_model(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["same bits"]
    assert result["logits"]


@cases("readme")
def test_the_readmes_block(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["loss"] <= VALUES
    assert result["gradient"] <= GRADIENTS, result["worst"]
    assert result["first ratio is 1"]
    assert result["without tokens: loss"] == 0.0
    assert result["without tokens: gradient"] == 0.0
    assert result["cut alike"]


@cases("restored")
def test_the_model_is_restored(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["shape"] == "(3, 32, 2)"
    assert result["dtype"] == "torch.float32"
    assert result["as before"]
    assert result["same bits"]


@cases("wrapped")
def test_wrapped_models(results: Results, case: Case) -> None:
    result = of(results, case)
    assert result["logprobs"] <= VALUES
    assert result["logits after"] == 0.0
    assert result["labels refused"]


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(results: Results, name: str) -> None:
    (case,) = (case for case in megatron_cases.ALL if case.check == "refusals")
    result = of(results, case)
    assert result.keys() == REFUSALS.keys()
    assert re.search(REFUSALS[name], result[name]), result[name]
