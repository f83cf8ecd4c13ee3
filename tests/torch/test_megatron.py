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
from tests.torch.megatron_cases import REFUSALS, REFUSED_LOSSES, Case, run_ranks

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("torch") or not importlib.util.find_spec("megatron.core"),
    reason="needs torch and megatron-core",
)

# Of float32: the same sums in another order, through two layers.
VALUES, GRADIENTS = 2e-6, 1e-6
BOUNDS = dict(logprobs=VALUES, entropy=VALUES, candidates=VALUES, error=VALUES, loss=VALUES, gradient=GRADIENTS)
BOUNDS["logged loss"] = VALUES
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
    return megatron_cases.of(results("MORE" if case in megatron_cases.MORE else "ALL"), case)


@pytest.mark.parametrize("table", ["ALL", pytest.param("MORE", marks=pytest.mark.slow)])
def test_the_ranks_end_well(results: Results, table: str) -> None:
    found = results(table)
    assert "failure" not in found, found["failure"]
    assert found.keys() == {case.name for case in getattr(megatron_cases, table)}


ABSENT = ["entropy", "max_logit", "min_logit", "mean_logit", "candidate_logprobs", "sum_p_squared", "support"]
# By check: the errors that are below their bounds, and what the rest must be.
WANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "parity": ("logprobs gradient", {"ranks agree": True, "every parameter": True}),
    "main_grad": ("gradient", {"no grad left": True}),
    "megatron loss": ("logprobs gradient", {}),
    "losses": ("loss gradient", {"logged counts": True, "depths move the gradient": True}),
    "predictions dropped": ("logprobs", {}),
    # The control: without the output layer's hook there must be NaN.
    "parameter gather": ("", {"same bits": True, "noticed without the hook": True}),
    "pipeline stages": ("logprobs entropy gradient", {}),
    "result": ("error", {"type": "LogprobOutput", "shapes": "{(3, 32)}", "dtypes": "{torch.float32}",
                         "contiguous": True, "without DDP": True, "absent": str(ABSENT)}),
    "float16 module": ("", {"same bits": True}),
    "hidden as it is": ("", {"same memory": True, "contiguous": True, "shape": "(32, 3, 64)"}),
    "further arguments": ("", {"same bits": True, "passed on": True}),
    "threads": ("", {"same bits": True, "logits": True}),
    "readme": ("loss gradient", {"first ratio is 1": True, "without tokens: loss": 0.0,
                                 "without tokens: gradient": 0.0, "cut alike": True}),
    "restored": ("", {"shape": "(3, 32)", "dtype": "torch.float32", "as before": True, "same bits": True}),
    "wrapped": ("logprobs", {"logits after": 0.0, "labels refused": True}),
    # The forward pass does not show it.
    "reduction left out": ("logprobs", {}),
    "reduction doubled": ("logprobs", {}),
    "half precision": ("", {}),
    "main_grad half precision": ("", {}),
    "optimizer": ("", {}),
}  # fmt: skip
CASES = [case for case in (*megatron_cases.ALL, *megatron_cases.MORE) if "refus" not in case.check]


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow if x in megatron_cases.MORE else ()) for x in CASES], ids=str
)
def test_case(results: Results, case: Case) -> None:
    result, options, model = of(results, case), dict(case.options), dict(case.model)
    errors, wanted = WANTED[case.check]
    assert wanted.items() <= result.items()
    assert {*errors.split()} <= result.keys()
    if case.check.startswith("reduction"):
        assert result.pop("gradient") > 0.5  # a missing or a second one is noticed
    if case.check == "parity":
        assert ("candidates" in result) == ("candidates" in options)
    elif case.check == "main_grad":
        fused = options.get("fusion", True) or options.get("wgrad") == "main_grad"
        assert result["added to main_grad"] == (fused and "frozen" not in model)
    elif case.check == "losses":
        assert "logged loss" in result
        assert result["some accepted"] or "bias" not in model
    elif case.check == "pipeline stages":
        assert result["hidden"] == ("(16, 3, 64)" if case.tp == 2 else "(32, 3, 64)")
    elif case.check == "float16 module":
        assert result["type"] == "tuple", "Float16Module keeps named tuples now: say so in output_processor"
    if "half precision" in case.check or case.check == "optimizer":
        no_further_than_stock(result, head=case.check == "half precision")
    else:
        assert all(result[name] <= bound for name, bound in BOUNDS.items() if name in result), result


def no_further_than_stock(result: dict[str, Any], head: bool) -> None:
    """From float64."""
    for field in ("gradient", "weight's gradient", *(("logprobs", "entropy") if head else ())):
        assert result[f"{field} fused"] <= BLUR * result[f"{field} stock"], field
    if head:
        for field in ("logprobs", "entropy"):  # the products of bf16 are exact in float32: no logit is rounded
            assert result[f"head's {field} fused"] <= 0.01 * result[f"head's {field} stock"], field
        assert "head's dhidden fused" in result
        for field in ("dhidden", "dweight"):  # a tied weight has no dweight of the head alone
            assert result.get(f"head's {field} fused", 0.0) <= result.get(f"head's {field} stock", 0.0), field


OF_REFUSALS = {"refusals": REFUSALS, "losses refused": REFUSED_LOSSES}


@pytest.mark.parametrize(("check", "name"), [(check, name) for check, x in OF_REFUSALS.items() for name in x])
def test_refusal(results: Results, check: str, name: str) -> None:
    (case,) = (case for case in megatron_cases.ALL if case.check == check)
    result, messages = of(results, case), OF_REFUSALS[check]
    assert result.keys() == messages.keys()
    assert re.search(messages[name], result[name]), result[name]
