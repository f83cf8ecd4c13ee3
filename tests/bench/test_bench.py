"""The benchmark: its check of results, its peers, its rows and its bounds."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import lce_jax

pytest.importorskip("rich")

from benchmarks import __main__ as command
from benchmarks import candidates, heads, peers, problem, report, run, shapes, text
from lce_jax.explain._models import MODELS, ModelHead

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]
TINY = shapes.Shape(24, ModelHead(32, 520))


@pytest.fixture(scope="module")
def tiny():
    return problem.random_problem(TINY, jnp.float32)


def without_entropy_gradient(hidden, weight, labels):
    logprobs, entropy = candidates.materialised(None)(hidden, weight, labels)
    return logprobs, jax.lax.stop_gradient(entropy)


def with_an_unmasked_padding_column(hidden, weight, labels):
    return candidates.materialised(None)(hidden, jnp.pad(weight, ((0, 8), (0, 0))), labels)


def not_a_number(hidden, weight, labels):
    logprobs, entropy = candidates.materialised(None)(hidden, weight, labels)
    return logprobs.at[3].set(jnp.nan), entropy


@pytest.mark.parametrize(
    ("function", "direction", "quantity"),
    [
        (without_entropy_gradient, candidates._both, "dhidden"),
        (with_an_unmasked_padding_column, candidates._forward, "entropy"),
        (not_a_number, candidates._forward, "logprobs"),
    ],
)
def test_a_wrong_candidate_is_not_timed(tiny, function, direction, quantity):
    wrong = direction(tiny, "wrong", "wrong", function)
    right = direction(tiny, "right", "right", candidates.materialised(None))
    runs, _, refused = run.admit([wrong, right], tiny)
    assert [one.key for one in runs] == ["right"]
    assert refused[f"wrong, {wrong.direction}"].startswith(f"wrong result: {quantity}")


def test_a_candidate_that_fails_is_left_out_and_the_rest_goes_on(tiny):
    def out_of_memory():
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nmany more lines")

    fails = candidates.Candidate("fails", "fails", "forward", out_of_memory)
    runs, _, refused = run.admit([fails, *candidates.jax_candidates(tiny, None)], tiny)
    assert refused == {"fails, forward": "RuntimeError: RESOURCE_EXHAUSTED: no memory"}
    assert ("ours", "forward+backward") in {(one.key, one.direction) for one in runs}


def fails_in_its_second_timing(compiled):
    calls = itertools.count(1)

    def launch():
        if next(calls) == 3:  # after the check, and the first timing
            raise RuntimeError("RESOURCE_EXHAUSTED: two results of 29 GiB")
        return compiled.launch()

    return compiled._replace(launch=launch)


def test_what_runs_out_of_memory_while_it_is_timed_is_left_out_and_the_rest_goes_on(monkeypatch):
    gemm = candidates._gemm

    def failing(drawn):
        one = gemm(drawn)
        return dataclasses.replace(one, compile=lambda: fails_in_its_second_timing(one.compile()))

    monkeypatch.setattr(candidates, "_gemm", failing)
    measured = run.measure(TINY, jnp.dtype("float32"), None, 2, with_peers=False)
    name = "bare GEMM hidden · weightᵀ, gemm"
    assert measured.left_out == {name: "RuntimeError: RESOURCE_EXHAUSTED: two results of 29 GiB"}
    rows = report.as_rows(measured)
    assert rows.pop(name) == {"left_out": measured.left_out[name]}
    assert {row["ratio_to_gemm"] for row in rows.values()} == {None}
    assert rows["lce_jax (xla), forward"]["ratio_to_materialised"] > 0
    assert report.table(measured).row_count > len(rows)
    assert report.held_bounds(measured, {"platform": "gpu", "device_kind": "NVIDIA H200"}) == []


@pytest.mark.parametrize(("dtype", "softcap"), [("float32", None), ("bfloat16", 5.0), ("float16", None)])
def test_right_candidates_pass_the_check(dtype, softcap):
    shape = shapes.Shape(40, ModelHead(64, 1003, logit_softcap=softcap))
    drawn = problem.random_problem(shape, jnp.dtype(dtype))
    rows = [*candidates.jax_candidates(drawn, None), candidates.in_forward(drawn, "lce_jax", "xla")]
    runs, errors, refused = run.admit(rows, drawn)
    assert not refused
    ours = {"ours", "ours half cache", "ours full cache", "ours in forward"}
    assert {one.key for one in runs} == {"gemm", "materialised", "materialised by hand"} | ours
    found = next(errors[one] for one in runs if (one.key, one.direction) == ("ours", shapes.BOTH))
    assert set(found) == {"logprobs", "entropy", "dhidden", "dweight"}


def test_the_reference_is_the_same_in_blocks(tiny, monkeypatch):
    whole = problem.reference(tiny, "logprob+entropy")
    monkeypatch.setattr(problem, "BLOCK_BYTES", 17 * 4 * TINY.head.vocab_size)  # 24 tokens: 16 and 8
    blocks = problem.reference(tiny, "logprob+entropy")
    for name, x in whole.results.items():
        assert problem.error(name, blocks.results[name], x) < 2e-6, name


def test_peers_can_be_left_out():
    assert command.parser("heads", heads).parse_args(["--no-peers"]).no_peers
    measured = run.measure(shapes.Shape(8, ModelHead(16, 64)), jnp.dtype("float32"), None, 1, with_peers=False)
    assert measured.row("ours", shapes.BOTH)
    assert measured.row("ours", shapes.TOPK).errors["logprobs of the most likely"] < 1e-6
    assert measured.ratio(measured.row("ours", shapes.TOPK), "materialised", shapes.TOPK)
    assert not measured.left_out


def test_rows_can_be_chosen():
    wanted = command.parser("heads", heads).parse_args(["--rows", "materialised by hand", "Apple CCE"]).rows
    measured = run.measure(shapes.Shape(8, ModelHead(16, 64)), jnp.dtype("float32"), None, 1, wanted=wanted)
    found = [(row.key, row.direction) for row in measured.rows]
    assert sorted(found) == sorted([("gemm", "gemm"), ("ours", shapes.FORWARD), ("ours", shapes.BOTH),
                                    ("materialised by hand", shapes.BOTH)])  # fmt: skip
    assert set(measured.left_out) == {"Apple CCE"}  # which needs a GPU


@pytest.mark.parametrize("vocab_size", [520, 521])
def test_the_vocabulary_split_over_devices(vocab_size):
    shape = shapes.Shape(24, ModelHead(32, vocab_size))
    measured = run.measure(shape, jnp.dtype("float32"), None, 1, with_peers=False, devices=2)
    if vocab_size % 2:  # two devices cannot share 521 columns evenly
        assert any("2 devices" in name and "521" in reason for name, reason in measured.left_out.items())
        return
    assert measured.row("ours split", shapes.FORWARD)
    assert measured.row("ours split", shapes.BOTH).errors["dweight"] < 1e-6
    assert not measured.left_out


def test_a_split_that_cannot_be_timed_is_a_failure(tmp_path):
    options = ["--devices", "2", "--no-peers", "--rounds", "1", "--out", str(tmp_path / "cpu.json")]
    assert command.main([*options, "--shape", "24,32,520"]) == 0
    assert command.main([*options, "--shape", "24,32,521"]) == 1


def test_objectives_of_peers_have_their_own_references(tiny):
    summed = problem.reference(tiny, "sum of logprobs").results
    assert summed["loss"] == pytest.approx(float(jnp.sum(summed["logprobs"])), rel=1e-6)
    alone = problem.reference(tiny, "logprob").results
    assert problem.error("dweight", alone["dweight"], summed["dweight"]) > 0.1


def test_peers_say_why_they_are_not_timed_on_cpu(tiny):
    rows, skipped = peers.peer_candidates(tiny)
    assert rows == []
    assert set(skipped) == set(peers.PEERS)
    assert all("CUDA" in reason for reason in skipped.values())


def test_a_peer_without_its_package_says_so(tiny, monkeypatch):
    def missing(_):
        raise ImportError("No module named 'nobody_has_this'")

    monkeypatch.setattr(peers, "_no_torch_gpu", lambda: None)
    monkeypatch.setattr(peers, "PEERS", {"one": missing, "two": lambda _: "has no softcap"})
    rows, skipped = peers.peer_candidates(tiny)
    assert rows == []
    assert skipped == {"one": "not installed: No module named 'nobody_has_this'", "two": "has no softcap"}


def test_text_like_data_has_a_row_with_a_threshold():
    shape = shapes.Shape(64, ModelHead(32, 2000))
    measured = run.measure(shape, jnp.dtype("float32"), None, 1, with_peers=False, text=True)
    row = measured.row("ours threshold", shapes.BOTH)
    assert (row.skipped, row.dropped_mass) == (0.0, 0.0)  # on a CPU the gradients are exact
    exact = measured.row("ours", shapes.BOTH)
    assert exact.skipped is None
    assert all(row.errors[name] == exact.errors[name] for name in problem.GRADIENTS)
    shown = [column.header for column in report.table(measured).columns]
    assert shown[-4:] == ["skipped", "dropped", "off dhidden", "off dweight"]
    without = measured.row("ours threshold without entropy", shapes.BOTH)
    assert without.objective == "logprob"
    assert set(without.errors) == {"logprobs", *problem.GRADIENTS}
    drawn = text.text_problem(shape, jnp.float32)
    out = lce_jax.linear_logprobs(*drawn.arrays[:3])
    assert 0.2 < float(out.entropy.mean()) < 3.0
    assert float(jnp.exp(out.logprobs).mean()) > 0.1


def test_the_bound_of_a_threshold_falls_with_what_it_skips():
    rows = [timed("gemm", "gemm", 1.0), dataclasses.replace(timed("ours threshold", shapes.BOTH, 1.8), skipped=0.75)]
    shape = shapes.Shape(8192, ModelHead(4096, 151936))
    where = {"platform": "gpu", "device_kind": "NVIDIA H200"}
    (line,) = report.held_bounds(run.Measurement(shape, "bfloat16", rows, {}, "text"), where)
    assert "1.80x" in line
    assert "(bound 1.85x): holds" in line


def test_shapes_from_the_command_line():
    assert [one.tokens for one in shapes.select("cpu", [], [], ())] == [2048]
    assert len(shapes.select("gpu", [], [], ())) == len(shapes.GPU_SHAPES)
    assert shapes.select("gpu", ["gemma2-9b"], [], ())[0].head.logit_softcap == 30.0
    swept = shapes.select("gpu", [], [(1, 64, 512), (2, 64, 512)], (8, 16))
    assert [(one.tokens, one.head) for one in swept] == [(8, ModelHead(64, 512)), (16, ModelHead(64, 512))]
    assert all(head.hidden_size % 64 == 0 for head in MODELS.values())


def timed(key, direction, seconds):
    return run.Row(key, key, direction, "logprob+entropy", [seconds], 0, 0.0, {})


def test_bounds_in_plain_words():
    cpu = {"platform": "cpu", "device_kind": "cpu"}
    rows = [
        timed("ours", "forward", 1.0),
        timed("ours", "forward+backward", 3.0),
        timed("materialised", "forward", 1.25),
        timed("materialised", "forward+backward", 2.0),
    ]
    measured = run.Measurement(shapes.select("cpu", [], [], ())[0], "float32", rows, {})
    forward, backward, by_hand = report.held_bounds(measured, cpu)
    assert forward.endswith("0.80x materialised (bound 1.15x): holds")
    assert backward.endswith("1.50x materialised (bound 1.45x): DOES NOT HOLD")
    assert "not measured" in by_hand
    assert report.held_bounds(dataclasses.replace(measured, dtype="bfloat16"), cpu) == []
