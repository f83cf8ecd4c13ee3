"""The benchmark's sweep over tunings of the kernels: what it tries, in which order, and its table."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import problem, records, sweep
from lce_jax import UnsupportedError
from lce_jax.mosaic import _generations
from lce_jax.mosaic.common._tiles import Tuning
from lce_jax.types._types import Call
from tests import devices

pytestmark = pytest.mark.site
H200 = Call(num_tokens=512, hidden_size=1024, columns=4096, dtype=jnp.dtype("bfloat16"), device=devices.H200)


@pytest.mark.parametrize("kernel", sweep.KERNELS)
def test_a_sweep_tries_tunings_that_fit_and_puts_the_table_back(kernel):
    before = _generations.GENERATIONS
    start = tuning_of(H200, kernel)
    choices = [sweep.vary_fields(H200, kernel, start, step) for step in sweep.STEPS]
    for step in choices:
        assert start in step
        assert 4 <= len(set(step)) == len(step) <= 40
    for tuning in itertools.chain(*choices):
        with sweep.use_tuning(H200, kernel, tuning):
            assert tuning_of(H200, kernel) == tuning
            assert _generations.refusal(H200) is None
    assert before == _generations.GENERATIONS


def tuning_of(call, kernel):
    return _generations.serving(call.device).tunings.of(call, kernel)


def test_a_sweep_leaves_no_entry_for_a_device_that_had_none():
    unknown = dataclasses.replace(H200, device=H200.device._replace(kind="NVIDIA H100 PCIe"))
    tuning, before = Tuning(tile_k=64, stages=3), tuning_of(unknown, "forward")
    with sweep.use_tuning(unknown, "forward", tuning):
        assert tuning_of(unknown, "forward") == tuning != before
        assert tuning_of(H200, "forward") == before
    assert tuning_of(unknown, "forward") == before


def test_a_sweep_without_such_a_gpu_says_so(capsys, tmp_path):
    arguments = ["sweep", "--shape", "256,256,1024", "--kernel", "dhidden", "--out", str(tmp_path / "cpu.json")]
    assert command.main(arguments) == 1
    message = 'sweep --shape 256,256,1024 --kernel dhidden: implementation "mosaic_gpu": needs an NVIDIA GPU'
    assert message in capsys.readouterr().out


def fastest_first(choices):
    """Returns seconds by tuning: the most stages are fastest, then no cluster, then the longest snake."""
    key = lambda one: (-one.stages, one.cluster, one.minor, one.in_flight, -one.snake)  # noqa: E731
    return {one: float(i) for i, one in enumerate(sorted(choices, key=key), 1)}


def test_each_step_of_a_sweep_begins_with_the_best_of_the_one_before():
    steps = []
    seconds = sweep.sweep("dlogits", H200, lambda choices: steps.append(choices) or fastest_first(choices))
    assert [len({one.stages for one in step}) > 1 for step in steps] == [True, False, False]
    best = next(iter(seconds))
    assert best.stages == max(one.stages for one in steps[0])
    assert (best.cluster, best.minor, best.in_flight, best.snake) == (1, 0, 0, 32)
    with pytest.raises(UnsupportedError, match="no tuning of the dlogits kernel gave right results"):
        sweep.sweep("dlogits", H200, lambda _: {})


def test_which_kernels_a_sweep_is_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sweep, "explain", lambda *_, **__: types.SimpleNamespace(call=H200))
    monkeypatch.setattr(sweep, "_time", lambda *operands: fastest_first(operands[-1]))
    out = tmp_path / "cpu.json"
    arguments = ["sweep", "--shape", "32,16,64", "--out", str(out)]
    assert command.main([*arguments, "--kernel", "dlogits", "--kernel", "forward"]) == 0
    assert [job["rows"][0]["name"] for job in records.jobs(records.read(out), "sweep")] == ["dlogits", "forward"]
    assert command.main(arguments) == 0
    jobs, printed = list(records.jobs(records.read(out), "sweep")), capsys.readouterr().out
    assert {job["rows"][0]["name"] for job in jobs} == set(sweep.KERNELS)
    for kernel, job in zip(("dlogits", "forward"), jobs, strict=False):
        best = next(iter(sweep.sweep(kernel, H200, fastest_first)))
        assert job["rows"][0]["entry"] == f'("NVIDIA H200", "{kernel}"): ((1024, {best}),)'
        assert job["rows"][0]["entry"] in printed
    with pytest.raises(SystemExit):
        command.main(["sweep", "--kernel", "logits"])


def test_tunings_are_timed_as_candidates_and_printed_the_fastest_first(monkeypatch, capsys):
    """It times the implementation for every device, because the kernels need a Hopper GPU."""
    drawn = problem.random_problem((24, 32, 520), jnp.float32)
    monkeypatch.setattr(sweep, "NAME", "xla")
    choices = sweep.vary_fields(H200, "forward", tuning_of(H200, "forward"), sweep.STEPS[2])[:2]
    seconds = sweep._time("forward", drawn, H200, 1, choices)
    assert set(seconds) == set(choices)
    assert list(seconds.values()) == sorted(seconds.values())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "forward kernel, forward"
    assert [line.partition(", forward ")[0] for line in printed[1:]] == [str(one) for one in seconds]
