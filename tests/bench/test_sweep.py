"""The benchmark's sweep over tunings of the kernels: what it tries, in which order, and its table."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax.numpy as jnp
import pytest

pytest.importorskip("rich")

from benchmarks import __main__ as command
from benchmarks import problem, records, shapes, sweep
from lce_jax._types import Case, Options
from lce_jax.explain._models import ModelHead
from lce_jax.mosaic import _generations
from lce_jax.mosaic.sm90._tuning import Tuning
from tests import devices

pytestmark = pytest.mark.site
TINY = shapes.Shape(24, ModelHead(32, 520))
H200 = Case(
    num_tokens=512,
    hidden_size=1024,
    vocab_size=4096,
    dtype=jnp.dtype(jnp.bfloat16),
    options=Options(),
    device=devices.H200,
)


@pytest.fixture(scope="module")
def tiny():
    return problem.random_problem(TINY, jnp.float32)


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


def test_a_sweep_without_such_a_gpu_says_so(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    told = ["sweep", "--shape", "256,256,1024", "--dtype", "bfloat16", "--kernel", "dhidden", "--out", str(out)]
    assert command.main(told) == 1
    assert "compute capability 9.0" in capsys.readouterr().out
    (job,) = records.jobs(records.read(out), "sweep")
    assert "compute capability 9.0" in job["rows"][0]["left_out"]


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


def test_which_kernels_a_sweep_is_for(monkeypatch, tmp_path):
    def found(kernels, *_):
        (kernel,) = kernels
        return [sweep.Swept(kernel, H200, {tuning_of(H200, kernel): 0.001}, {})]

    monkeypatch.setattr(sweep, "sweep", found)
    out = tmp_path / "cpu.json"
    told = ["sweep", "--shape", "256,256,1024", "--out", str(out)]
    assert command.main([*told, "--kernel", "dlogits", "--kernel", "forward"]) == 0
    assert [job["rows"][0]["name"] for job in records.jobs(records.read(out), "sweep")] == ["dlogits", "forward"]
    assert command.main(told) == 0
    jobs = list(records.jobs(records.read(out), "sweep"))
    assert {job["rows"][0]["name"] for job in jobs} == set(shapes.KERNELS)
    assert all(job["rows"][0]["entry"].startswith('("NVIDIA H200", ') for job in jobs)
    with pytest.raises(SystemExit):
        command.main(["sweep", "--kernel", "logits"])


def test_sweep_table_is_fastest_first_and_ends_in_an_entry():
    fast, slow = sweep.around(H200, "forward", tuning_of(H200, "forward"), sweep.STEPS[0])[:2]
    swept = sweep.Swept("forward", H200, {fast: 0.001, slow: 0.002}, {})
    assert swept.entry == f'("NVIDIA H200", "forward"): ((1024, {fast}),)'
    assert sweep.table(swept).row_count == 2
