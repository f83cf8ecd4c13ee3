"""The benchmark: its check of results, and its rows."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from benchmarks import candidates, heads, measure, problem, programs, text
from benchmarks.candidates import BOTH, FORWARD, TOPK, materialised
from tests.bench.conftest import TINY

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]
LOGIT_OPTIONS = ("temperature", "logit_softcap", "logit_scale", "vocab_size")


def rows(drawn, selected, rounds=1):
    return measure.rows({one.name: one.compile for one in selected}, candidates.judge(selected, drawn), rounds)


def rows_by_key(measured):
    """Returns the rows that were timed, by key and direction."""
    return {(row["key"], row["direction"]): row for row in measured.rows.values() if "left_out" not in row}


def drop_entropy_gradient(hidden, weight, labels):
    logprobs, entropy = materialised(hidden, weight, labels)
    return logprobs, jax.lax.stop_gradient(entropy)


def count_a_padding_column(hidden, weight, labels):
    return materialised(hidden, jnp.pad(weight, ((0, 8), (0, 0))), labels)


def return_nan(hidden, weight, labels):
    logprobs, entropy = materialised(hidden, weight, labels)
    return logprobs.at[3].set(jnp.nan), entropy


@pytest.mark.parametrize(
    ("function", "direction", "quantity"),
    [
        (drop_entropy_gradient, candidates.both, "dhidden"),
        (count_a_padding_column, candidates.forward, "entropy"),
        (return_nan, candidates.forward, "logprobs"),
    ],
)
def test_a_wrong_candidate_is_not_timed(tiny, function, direction, quantity):
    wrong, right = direction(tiny, "wrong", "wrong", function), direction(tiny, "right", "right", materialised)
    timed = rows(tiny, [wrong, right])
    assert timed[wrong.name]["left_out"].startswith(f"wrong result: {quantity}")
    assert timed[right.name]["median_seconds"] > 0


def test_a_candidate_that_fails_is_left_out_and_the_rest_goes_on(tiny):
    def run_out_of_memory():
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nmany more lines")

    fails = candidates.Candidate("fails", "fails", FORWARD, run_out_of_memory)
    timed = rows(tiny, [fails, candidates.forward(tiny, "right", "right", materialised)])
    assert timed["fails, forward"] == {"left_out": "RuntimeError: RESOURCE_EXHAUSTED: no memory"}
    assert timed["right, forward"]["ratio_to_gemm"] is None  # the product is the first program, which failed


def fails_in_its_second_timing(compiled):
    calls = itertools.count(1)

    def launch():
        if next(calls) == 3:  # after the check and the first timing
            raise RuntimeError("RESOURCE_EXHAUSTED: two results of 29 GiB")
        return compiled.launch()

    return compiled._replace(launch=launch)


def test_what_runs_out_of_memory_while_it_is_timed_is_left_out_and_the_rest_goes_on(monkeypatch, capsys):
    gemm = candidates._gemm

    def failing(drawn):
        one = gemm(drawn)
        return dataclasses.replace(one, compile=lambda: fails_in_its_second_timing(one.compile()))

    monkeypatch.setattr(candidates, "_gemm", failing)
    measured = heads.measure(TINY, jnp.dtype("float32"), None, 2, with_peers=False)
    timed = dict(measured.rows)
    reason = "RuntimeError: RESOURCE_EXHAUSTED: two results of 29 GiB"
    assert timed.pop("bare GEMM hidden · weightᵀ, gemm") == {"left_out": reason}
    assert {row["ratio_to_gemm"] for row in timed.values()} == {None}
    assert measured.healthy
    printed = capsys.readouterr().out
    assert re.search(rf"^bare GEMM hidden · weightᵀ, gemm +not timed: {re.escape(reason)}$", printed, re.MULTILINE)
    assert "– products" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_candidates_pass_the_check(dtype):
    drawn = problem.random_problem((40, 64, 1003), jnp.dtype(dtype))
    timed = rows(drawn, candidates.jax_candidates(drawn, None))
    assert not [row for row in timed.values() if "left_out" in row]
    ours = {"ours", "ours half cache", "ours full cache", "ours in forward"}
    assert {row["key"] for row in timed.values()} == {"gemm", "materialised", "materialised by hand"} | ours
    assert set(timed["lce_jax (xla), forward+backward"]["errors"]) == {"logprobs", "entropy", "dhidden", "dweight"}
    assert set(timed["lce_jax.linear_topk, k 64, top-k"]["errors"]) == {problem.TOPK_NAME, "lse"}


def test_the_reference_is_the_same_in_blocks(tiny, monkeypatch):
    seeds = problem.cotangents(tiny, "logprob+entropy")
    at_once = problem.reference(tiny, *seeds)
    monkeypatch.setattr(problem, "BLOCK_BYTES", 17 * 4 * TINY[-1])  # 24 tokens: 16 and 8
    blocks = problem.reference(tiny, *seeds)
    for name, x in at_once.items():
        assert problem.error(name, blocks[name], x) < 2e-6, name


def test_the_reference_is_that_of_the_package_and_shares_no_code_with_it(tiny):
    a, b = problem.cotangents(tiny, "logprob+entropy")
    key = jax.random.key(1)
    options = {
        "temperature": jax.random.uniform(key, (24,), minval=0.5, maxval=2.0),
        "where": jax.random.bernoulli(key, 0.7, (24,)),
        "candidates": jax.random.randint(key, (24, 5), -1, 520),
        "logit_softcap": 10.0,
        "logit_scale": 0.5,
        "vocab_size": 400,
    }

    def loss(hidden, weight):
        out = lce_jax.linear_logprobs(hidden, weight, tiny.labels, stats=True, **options)
        return problem.weighted(out._asdict(), a, b), out

    (value, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(tiny.hidden, tiny.weight)
    right = problem.reference(tiny, a, b, **options)
    top = lce_jax.linear_topk(tiny.hidden, tiny.weight, 64, **{x: options[x] for x in ("where", *LOGIT_OPTIONS)})
    results = {name: x for name, x in out._asdict().items() if name in right} | {"loss": value}
    results[problem.TOPK_NAME] = top.logprobs
    assert set(results) == {*right} - {"label logit", "dhidden", "dweight"}
    for name, x in (results | dict(zip(problem.GRADIENTS, gradients, strict=True))).items():
        assert problem.error(name, x, right[name]) < 1e-5, name


def test_peers_can_be_left_out():
    measured = heads.measure((8, 16, 64), jnp.dtype("float32"), None, 1, with_peers=False)
    timed = rows_by_key(measured)
    assert len(timed) == len(measured.rows)
    flops = timed["ours", BOTH]["useful_flops_per_second"] * timed["ours", BOTH]["median_seconds"]
    assert flops == pytest.approx(6 * 8 * 16 * 64)
    assert timed["ours", TOPK]["errors"][problem.TOPK_NAME] < 1e-6


def test_a_divergence_of_tensors_is_that_of_arrays(torch_on_cpu):
    drawn, made = programs.PARTS["kl"]
    operands, made_programs = drawn((24, 16, 600)), made()

    def plain(hidden, weight, teacher_hidden, teacher_weight):
        q, p = (
            torch_on_cpu.log_softmax(h @ w.t(), -1) for h, w in ((hidden, weight), (teacher_hidden, teacher_weight))
        )
        return (p.exp() * (p - q)).sum(-1)

    trl, right = (dict(made_programs)[f"forward, {name}, + backward"] for name in ("TRL", "stored logits"))
    ours, other = (one.compile(function, *operands) for one, function in ((trl, plain), (right, right.function)))
    assert programs.relative_distance(trl.results(ours.wait(ours.launch())), other.wait(other.launch())) < 1e-5


def test_text_like_data_has_a_row_with_a_threshold():
    measured = heads.measure((64, 32, 2000), jnp.dtype("float32"), None, 1, with_peers=False, is_text=True)
    timed = rows_by_key(measured)
    row, exact = timed["ours threshold", BOTH], timed["ours", BOTH]
    assert (row["skipped"], row["dropped_mass"]) == (0.0, 0.0)  # on a CPU the gradients are exact
    assert "skipped" not in exact
    assert row["errors"] == exact["errors"]
    without = timed["ours threshold without entropy", BOTH]
    assert without["objective"] == "logprob"
    assert set(without["errors"]) == {"logprobs", *problem.GRADIENTS}
    drawn = text.text_problem((64, 32, 2000), jnp.float32)
    out = lce_jax.linear_logprobs(*drawn[:3])
    assert 0.2 < float(out.entropy.mean()) < 3.0
    assert float(jnp.exp(out.logprobs).mean()) > 0.1


def test_the_share_of_tiles_below_a_threshold():
    """Three tiles of columns, the last of one column. A likely id, a label, or neither decides."""
    hidden, labels = jnp.ones((6, 1)), jnp.array([0, 0, 0, 5, 0, 0])  # rows 0 to 3 and 4 to 5
    weight = jnp.zeros((9, 1)).at[1].set(30.0)
    drawn = problem.Problem(hidden, weight, labels, hidden[:, 0], hidden[:, 0])
    assert text.share_below(drawn, 4, 4) == pytest.approx((1 / 3 + 2 / 3) / 2)


def test_the_devices_shapes():
    assert heads.shapes_here() == problem.CPU_SHAPES
    assert heads.job_arguments("heads", TINY) == ["heads", "--shape", "24,32,520"]
