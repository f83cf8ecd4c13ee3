"""How the benchmark times: rounds, warm-up, calls per timing, medians."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import measure

pytestmark = pytest.mark.site


@pytest.fixture
def gpu_backend(monkeypatch):
    monkeypatch.setattr(measure.jax, "default_backend", lambda: "gpu")


def fake_run(log, name, seconds=0.0):
    def launch():
        log.append(name)
        return seconds

    return measure.Run(launch, wait=lambda outputs: outputs, temp_bytes=0, compile_seconds=0.0)


def test_every_round_times_every_run_once_before_the_next_round(monkeypatch):
    monkeypatch.setattr(measure, "calls_within", lambda _run, _seconds: 2)
    log = []
    samples = measure.interleave({name: fake_run(log, name) for name in "abcd"}, 6, {})
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abcd", 6)
    rounds = [log[i : i + 8] for i in range(0, len(log), 8)]
    assert len(rounds) == 6
    assert all(sorted(one) == sorted("aabbccdd") and one[::2] == one[1::2] for one in rounds)  # back to back
    assert len({tuple(one) for one in rounds}) > 1  # not the same order every time


@pytest.mark.usefixtures("gpu_backend")
def test_on_a_gpu_a_run_settles_before_its_timing(monkeypatch):
    monkeypatch.setattr(measure, "calls_within", lambda _run, _seconds: 1)
    timed, log = [], []
    real = measure.time_calls

    def time_calls(run, calls):
        timed.append(calls)
        return real(run, calls)

    monkeypatch.setattr(measure, "time_calls", time_calls)
    samples = measure.interleave({name: fake_run(log, name) for name in "abc"}, 4, {})
    assert timed == [2, measure.MIN_GPU_CALLS] * 12  # two fifths untimed, then the sample
    groups = [log[i : i + 5] for i in range(0, len(log), 5)]
    assert all(len(set(group)) == 1 for group in groups)
    assert [len(taken) for taken in samples.values()] == [4, 4, 4]


@pytest.mark.parametrize(("platform", "seconds"), [("cpu", measure.SAMPLE_SECONDS / 5), ("gpu", measure.GPU_SECONDS)])
def test_how_much_work_a_timing_holds(monkeypatch, platform, seconds):
    asked = []
    monkeypatch.setattr(measure.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(measure, "calls_within", lambda _run, seconds: asked.append(seconds) or 1)
    measure.interleave({"a": fake_run([], "a")}, 5, {})
    assert asked == [seconds]


def fail_in_call(log, name, call):
    """Returns a run that runs out of memory in its ``call``-th call."""

    def launch():
        log.append(name)
        if log.count(name) == call:
            raise RuntimeError("RESOURCE_EXHAUSTED: 29 GiB")

    return fake_run(log, name)._replace(launch=launch)


@pytest.mark.usefixtures("gpu_backend")
@pytest.mark.parametrize("call", [1, 3, 9], ids=["counting", "settling", "a later round"])
def test_a_run_that_fails_while_it_is_timed_has_no_samples_and_the_others_go_on(monkeypatch, call):
    monkeypatch.setattr(measure, "GPU_SECONDS", 1e-9)  # 2 calls to count, then 2 + 3 in each round
    monkeypatch.setattr(measure, "GPU_SETTLE_SECONDS", 4e-10)
    log, left_out = [], {}
    runs = {"a": fake_run(log, "a"), "b": fail_in_call(log, "b", call), "c": fake_run(log, "c")}
    samples = measure.interleave(runs, 3, left_out)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "c": 3}
    assert left_out == {"b": "RuntimeError: RESOURCE_EXHAUSTED: 29 GiB"}
    assert log.count("b") == call  # it is not tried again


def test_calls_within_a_time(monkeypatch):
    ticks = itertools.count(step=0.004)  # each reading of the clock is 4 ms after the last one, so a timing takes 4 ms
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    fast = fake_run([], "fast")
    assert measure.calls_within(fast, 0.05) == 13  # of 4 ms
    assert measure.calls_within(fast, 0.0001) == 1


def test_a_row_is_the_median_of_its_rounds(monkeypatch):
    samples = {"product": [5.0, 1.0, 100.0], "a": [10.0, 20.0, 3.0]}
    monkeypatch.setattr(measure, "interleave", lambda *_: samples)
    programs = {name: lambda: fake_run([], "x") for name in samples}
    rows = measure.rows(programs, lambda name, _: (None, {"said": name}), 3)
    assert (rows["product"]["median_seconds"], rows["a"]["median_seconds"]) == (5.0, 10.0)
    assert (rows["a"]["ratio_to_gemm"], rows["a"]["said"], rows["a"]["seconds"]) == (2.0, "a", samples["a"])
