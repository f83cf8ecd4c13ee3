"""``python -m benchmarks accuracy`` on a CPU, at a small size."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import accuracy, peers, problem, records
from benchmarks.candidates import BOTH, Candidate, both, materialised

pytestmark = pytest.mark.site
SMALL = (32, 64, 1024)


def drop_entropy_gradient(hidden, weight, labels):
    logprobs, entropy = materialised(hidden, weight, labels)
    return logprobs, jnp.zeros_like(entropy)


@pytest.fixture
def two_peers(monkeypatch):
    """The peers are two that PyTorch computes on any device, and one that is not installed."""

    def missing(*_):
        raise ImportError("No module named 'nobody_has_this'")

    made = {key: peers.PEERS[key] for key in ("torch", "torch linear CE")}
    monkeypatch.setattr(peers, "PEERS", made | {"missing": peers.Peer("missing", "logprob", missing)})


@pytest.mark.usefixtures("two_peers")
def test_the_command_writes_errors_of_each_way_and_spread(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    assert bench.main(["accuracy", "--shape", "32,64,1024", "--out", str(out)]) == 0
    file = records.read(out, "cpu")
    jobs = {job["spread"]: {row["name"]: row for row in job["rows"]} for job in records.jobs(file, "accuracy")}
    assert list(jobs) == list(accuracy.SPREADS)
    for spread, rows in jobs.items():
        ours, stored = (rows[f"{name}, {BOTH}"]["errors"] for name in ("lce_jax (xla)", "XLA, stored bfloat16 logits"))
        assert set(ours) == {"logprobs", "entropy", *problem.GRADIENTS}
        assert ours["logprobs"] < 1e-5 * spread
        assert ours["entropy"] < 1e-5 * spread
        assert stored["logprobs"] > 100 * ours["logprobs"]  # logits are rounded to bfloat16
        assert max(ours[name] for name in problem.GRADIENTS) < 3e-3
        assert rows[f"torch, stored logits, {BOTH}"]["errors"]["logprobs"] > 100 * ours["logprobs"]
        assert rows[f"missing, {BOTH}"]["left_out"].endswith("not installed: No module named 'nobody_has_this'")
    printed = capsys.readouterr().out
    assert "missing" in printed
    assert "left out: UnsupportedError: not installed" in printed


def test_an_error_is_the_distance_from_float64():
    drawn = problem.random_problem(SMALL, jnp.dtype("bfloat16"), 3)
    right = accuracy.compute_float64(drawn, "logprob+entropy")
    off = right["logprobs"].copy()
    off[3] += 0.25
    moved = {"logprobs": (off, 0.25), "loss": (right["loss"] + 3.2, 0.1), "dweight": (1.01 * right["dweight"], 0.01)}
    for name, (result, error) in moved.items():
        assert accuracy.distance(name, jnp.asarray(result), right[name], 32) == pytest.approx(error, rel=1e-3)


def test_a_wrong_result_has_no_error_but_the_reason(monkeypatch, capsys):
    def wrong(drawn: problem.Problem, _: None) -> list[Candidate]:
        return [both(drawn, "ours", "wrong", drop_entropy_gradient, logits_rounded=True)]

    monkeypatch.setattr(accuracy, "jax_candidates", wrong)
    measured = accuracy.measure(SMALL, 3, with_peers=False)
    assert not measured.healthy
    reason = measured.rows[f"wrong, {BOTH}"]["left_out"]
    assert reason.startswith("wrong result: ")
    assert "entropy is off by" in reason
    assert "left out: wrong result" in capsys.readouterr().out


def test_logits_spread_as_the_job_says():
    for spread in accuracy.SPREADS:
        drawn = problem.random_problem(SMALL, jnp.dtype("bfloat16"), spread)
        hidden, weight = (np.asarray(x, np.float64) for x in drawn[:2])
        assert np.std(hidden @ weight.T) == pytest.approx(spread, rel=0.05)


def test_the_shape_of_a_gpu(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    command, module = bench.parser("accuracy")
    keys = [job.key for job in module.jobs(command.parse_args(["--no-peers"]), command)]
    assert keys == [f"accuracy --shape 2048,4096,32768 --spread {spread} --no-peers" for spread in (1, 3, 8)]
