"""The benchmark: its medians, its check of results, its command line and the files it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from lce_jax._types import Case, Device, Options
from lce_jax.bench import __main__ as command
from lce_jax.bench import candidates, measure, peers, problem, report, run, shapes, sweep
from lce_jax.mosaic import _generations
from lce_jax.mosaic.sm90._tuning import Tuning

TINY = shapes.Shape(24, shapes.Head(32, 520))


@pytest.fixture(scope="module")
def tiny():
    return problem.random_problem(TINY, jnp.float32)


def fake_run(log, name, seconds=0.0):
    def launch():
        log.append(name)
        return seconds

    return measure.Run(launch, wait=lambda outputs: outputs, temp_bytes=0, compile_seconds=0.0)


def test_every_round_times_every_run_once_before_the_next_round(monkeypatch):
    monkeypatch.setattr(measure, "calls_within", lambda _run, _seconds: 2)
    log = []
    samples = measure.interleave({name: fake_run(log, name) for name in "abcd"}, rounds=6)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abcd", 6)
    rounds = [log[i : i + 8] for i in range(0, len(log), 8)]
    assert len(rounds) == 6
    assert all(sorted(one) == sorted("aabbccdd") and one[::2] == one[1::2] for one in rounds)  # back to back
    assert len({tuple(one) for one in rounds}) > 1  # not the same order every time


def test_on_a_gpu_a_run_settles_before_its_timing(monkeypatch):
    monkeypatch.setattr(measure, "calls_within", lambda _run, _seconds: 1)
    timed, log = [], []
    real = measure.time_calls

    def time_calls(run, calls):
        timed.append(calls)
        return real(run, calls)

    monkeypatch.setattr(measure, "time_calls", time_calls)
    samples = measure.interleave({name: fake_run(log, name) for name in "abc"}, rounds=4, on_gpu=True)
    assert timed == [2, measure.MIN_GPU_CALLS] * 12  # two fifths untimed, then the sample
    groups = [log[i : i + 5] for i in range(0, len(log), 5)]
    assert all(len(set(group)) == 1 for group in groups)
    assert [len(taken) for taken in samples.values()] == [4, 4, 4]


@pytest.mark.parametrize(("on_gpu", "seconds"), [(False, measure.SAMPLE_SECONDS / 5), (True, measure.GPU_SECONDS)])
def test_how_much_work_a_timing_holds(monkeypatch, on_gpu, seconds):
    asked = []
    monkeypatch.setattr(measure, "calls_within", lambda _run, seconds: asked.append(seconds) or 1)
    measure.interleave({"a": fake_run([], "a")}, rounds=5, on_gpu=on_gpu)
    assert asked == [seconds]


def test_calls_within_a_time(monkeypatch):
    ticks = itertools.count(step=0.004)  # every look at the clock is 4 ms after the one before: 4 ms a timing
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    fast = fake_run([], "fast")
    assert measure.calls_within(fast, 0.05) == 13  # of 4 ms
    assert measure.calls_within(fast, 0.0001) == 1


def test_median_and_spread():
    assert measure.median([5.0, 1.0, 100.0]) == 5.0
    assert measure.median([1.0, 3.0]) == 2.0
    assert measure.spread([2.0]) == 0.0
    assert measure.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)  # quartiles 2 and 4 around 3


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


@pytest.mark.parametrize(("dtype", "softcap"), [("float32", None), ("bfloat16", 5.0), ("float16", None)])
def test_right_candidates_pass_the_check(dtype, softcap):
    shape = shapes.Shape(40, shapes.Head(64, 1003, logit_softcap=softcap))
    drawn = problem.random_problem(shape, jnp.dtype(dtype))
    runs, errors, refused = run.admit(candidates.jax_candidates(drawn, None), drawn)
    assert not refused
    assert {one.key for one in runs} == {"gemm", "ours", "materialised", "materialised by hand"}
    ours = next(errors[one] for one in runs if (one.key, one.direction) == ("ours", shapes.BOTH))
    assert set(ours) == {"logprobs", "entropy", "dhidden", "dweight"}


def test_the_reference_is_the_same_in_blocks(tiny, monkeypatch):
    whole = problem.reference(tiny, "logprob+entropy")
    monkeypatch.setattr(problem, "BLOCK_BYTES", 17 * 4 * TINY.head.vocab_size)  # 24 tokens: 16 and 8
    blocks = problem.reference(tiny, "logprob+entropy")
    for name, x in whole.results.items():
        assert problem.error(name, blocks.results[name], x) < 2e-6, name


def test_peers_can_be_left_out():
    assert command.parser().parse_args(["--no-peers"]).no_peers
    measured = run.measure(shapes.Shape(8, shapes.Head(16, 64)), jnp.dtype("float32"), None, 1, with_peers=False)
    assert measured.row("ours", shapes.BOTH)
    assert not measured.left_out


@pytest.mark.parametrize("vocab_size", [520, 521])
def test_the_vocabulary_split_over_devices(vocab_size):
    shape = shapes.Shape(24, shapes.Head(32, vocab_size))
    measured = run.measure(shape, jnp.dtype("float32"), None, 1, with_peers=False, devices=2)
    if vocab_size % 2:  # the call says so
        assert any("2 devices" in name and "521" in reason for name, reason in measured.left_out.items())
        return
    assert measured.row("ours split", shapes.FORWARD)
    assert measured.row("ours split", shapes.BOTH).errors["dweight"] < 1e-6
    assert not measured.left_out


def test_a_split_that_cannot_be_timed_is_a_failure(tmp_path):
    options = ["--devices", "2", "--no-peers", "--rounds", "1", "--out", str(tmp_path)]
    assert command.main([*options, "--shape", "24,32,520"]) == 0
    assert command.main([*options, "--shape", "24,32,521"]) == 1
    with pytest.raises(SystemExit):
        command.main([*options, "--sweep"])


def test_more_devices_than_there_are(capsys):
    assert command.main(["--devices", str(jax.device_count() + 1)]) == 2
    assert f"there are {jax.device_count()} here" in capsys.readouterr().out


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


def test_shapes_from_the_command_line():
    assert [one.tokens for one in shapes.select("cpu", [], [], ())] == [2048]
    assert len(shapes.select("gpu", [], [], ())) == len(shapes.GPU_SHAPES)
    assert shapes.select("gpu", ["gemma2-9b"], [], ())[0].head.logit_softcap == 30.0
    swept = shapes.select("gpu", [], [(1, 64, 512), (2, 64, 512)], (8, 16))
    assert [(one.tokens, one.head) for one in swept] == [(8, shapes.Head(64, 512)), (16, shapes.Head(64, 512))]
    assert all(head.hidden_size % 64 == 0 for head in shapes.MODELS.values())


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


H200 = Case(
    num_tokens=512,
    hidden_size=1024,
    vocab_size=4096,
    dtype=jnp.dtype(jnp.bfloat16),
    options=Options(),
    device=Device("gpu", "NVIDIA H200", "9.0", 132),
)


@pytest.mark.parametrize("kernel", shapes.KERNELS)
def test_a_sweep_tries_tunings_that_fit_and_puts_the_table_back(kernel):
    before = _generations.KERNEL_SETS
    start = tuning_of(H200, kernel)
    choices = [sweep.around(H200, kernel, start, step) for step in sweep.STEPS]
    for step in choices:
        assert start in step
        assert 4 <= len(set(step)) == len(step) <= 40
    for tuning in itertools.chain(*choices):
        with sweep.tuned(H200, kernel, tuning):
            assert tuning_of(H200, kernel) == tuning
            assert _generations.refusal(H200) is None
    assert before == _generations.KERNEL_SETS


def tuning_of(case, kernel):
    return _generations.serving(case.device).tunings.of(case, kernel)


def test_a_sweep_leaves_no_entry_for_a_device_that_had_none():
    unknown = dataclasses.replace(H200, device=H200.device._replace(kind="NVIDIA H100 PCIe"))
    tuning, before = Tuning(tile_k=64, stages=3), tuning_of(unknown, "forward")
    with sweep.tuned(unknown, "forward", tuning):
        assert tuning_of(unknown, "forward") == tuning != before
        assert tuning_of(H200, "forward") == before
    assert tuning_of(unknown, "forward") == before


def test_a_sweep_without_such_a_gpu_says_so(capsys):
    assert command.main(["--sweep", "--shape", "256,256,1024", "--dtype", "bfloat16"]) == 1
    assert "compute capability 9.0" in capsys.readouterr().out


def test_each_step_of_a_sweep_begins_with_the_best_of_the_one_before(tiny, monkeypatch):
    """The fastest here: the deepest, then the one without a cluster, then the longest snake."""
    steps = []

    def time(kernel, choices, *_):
        steps.append(choices)
        key = lambda one: (-one.stages, one.cluster, one.minor, one.in_flight, -one.snake)  # noqa: E731
        return sweep.Swept(kernel, H200, dict.fromkeys(sorted(choices, key=key), 1.0), {})

    monkeypatch.setattr(sweep, "random_problem", lambda *_: tiny)
    monkeypatch.setattr(sweep, "explain", lambda *_, **__: types.SimpleNamespace(case=H200))
    monkeypatch.setattr(sweep, "_time", time)
    (found,) = sweep.sweep(["dlogits"], TINY, jnp.dtype("float32"), 1, print)
    assert [len({one.stages for one in step}) > 1 for step in steps] == [True, False, False]
    best = next(iter(found.seconds))
    assert best.stages == max(one.stages for one in steps[0])
    assert (best.cluster, best.minor, best.in_flight, best.snake) == (1, 0, 0, 32)


def test_which_kernels_a_sweep_is_for(monkeypatch):
    asked = []
    monkeypatch.setattr(sweep, "sweep", lambda kernels, *_: asked.append(list(kernels)) or [])
    for line in (["--sweep"], ["--sweep", "dlogits", "forward"]):
        assert command.main([*line, "--shape", "256,256,1024"]) == 0
    assert asked == [["forward", "dlogits", "dhidden", "dweight"], ["dlogits", "forward"]]
    with pytest.raises(SystemExit):
        command.main(["--sweep", "logits"])


def test_sweep_table_is_fastest_first_and_ends_in_an_entry():
    fast, slow = sweep.around(H200, "forward", tuning_of(H200, "forward"), sweep.STEPS[0])[:2]
    swept = sweep.Swept("forward", H200, {fast: 0.001, slow: 0.002}, {})
    assert swept.entry == f'("NVIDIA H200", "forward"): ((1024, {fast}),)'
    assert sweep.table(swept).row_count == 2


@pytest.mark.parametrize(
    "arguments", [["--shape", "1,2"], ["--shape", "0,64,512"], ["--model", "gpt-5"], ["--dtype", "int8"]]
)
def test_bad_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m lce_jax.bench" in capsys.readouterr().err


def test_the_whole_command(tmp_path):
    arguments = ["--shape", "16,32,520", "--tokens", "16,32", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "lce_jax.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    for words in ("T 16, H 32, V 520, float32", "bare GEMM", "lce_jax (xla)", "÷ stored", "peers are timed on CUDA"):
        assert words in done.stdout
    data = json.loads((tmp_path / "bench.json").read_text())
    assert set(data) == {"device", "rounds", "measurements"}
    assert data["device"]["platform"] == "cpu"
    assert [one["shape"]["tokens"] for one in data["measurements"]] == [16, 32]
    fields = {field.name for field in dataclasses.fields(run.Row)}
    derived = {"median_seconds", "useful_flops_per_second", "ratio_to_gemm", "ratio_to_materialised"}
    for one in data["measurements"]:
        assert set(one) == {"shape", "dtype", "rows", "left_out", "bounds"}
        assert {(row["key"], row["direction"]) for row in one["rows"]} >= {
            ("gemm", "gemm"),
            ("ours", "forward"),
            ("ours", "forward+backward"),
            ("materialised", "forward"),
            ("materialised", "forward+backward"),
        }
        for row in one["rows"]:
            assert set(row) == fields | derived
            assert len(row["seconds"]) == 2
            assert row["median_seconds"] > 0
    image = (tmp_path / "bench.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 20_000
