"""The demo as a user runs it, in a tiny form, and its reward."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("tokenizers")

from examples.demo import reward, rl, text
from examples.demo.model import Config

pytestmark = pytest.mark.site


def run_demo(*arguments: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "COLUMNS": "120"}
    command = [sys.executable, "-W", "error", "-m", "tests.small_demo", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def table_row(output: str, name: str) -> list[str]:
    """Returns the cells of the first row that starts with ``name``."""
    row = next(line for line in output.splitlines() if re.match(rf"│ +{name}\b", line))
    return [cell.strip() for cell in row.strip("│").split("│")][1:]


def test_a_tiny_run_on_a_mesh_does_everything(tmp_path):
    done = run_demo("--steps", "2", "--rl-steps", "1", "--out", str(tmp_path / "new" / "folder"), devices=2)
    assert done.returncode == 0, done.stderr
    assert "data 1 × tensor 2" in done.stdout
    figure = (tmp_path / "new" / "folder" / "curves.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert len(figure) > 10_000
    for name in ("loss", "entropy", "reward"):
        cells = [float(cell) for cell in table_row(done.stdout, name)]
        assert len(cells) == 3
        assert all(math.isfinite(cell) for cell in cells)
    names = ("phase 1", "phase 1, logits stored", "phase 1, gradient_threshold")
    for line in (*(f"{name}: 2 of 2, loss 7" for name in names), "phase 2: 1 of 1, reward 0"):
        assert re.search(rf"\n{line}\.\d+; about \d+ s left\n", done.stdout)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout)  # no terminal: lines, and nothing that moves
    assert "phase 2, logits stored" not in done.stdout
    assert "Phase 1: the same 2 steps from the same seed" in done.stdout
    fused, stored, threshold = table_row(done.stdout, "loss of the last tenth")
    assert fused == stored == threshold  # on a CPU nothing is left out
    assert all(float(cell) < 1e-5 for cell in table_row(done.stdout, "largest difference")[1:])
    memory, time = (table_row(done.stdout, name) for name in ("peak", "time"))
    assert memory[2].endswith("× less")
    assert float(memory[2].split("×")[0]) > 1
    assert float(time[0].split()[0]) > 0
    errors = done.stdout.partition("against float64")[2]
    for name in ("loss", "log-probabilities", "gradients"):  # of float32, at a loss of 7.6
        fused, stored, _ = table_row(errors, name)
        assert 0 < float(fused) < 1e-5
        assert 0 < float(stored) < 1e-5


def test_two_runs_are_compared_step_by_step():
    from examples.demo.sft import SecondRun

    run = SecondRun([5.0, 4.0, 3.5], [5.0, 4.25, 3.0])
    assert run.difference == 0.5
    assert run.last == (3.5, 3.0)


def test_the_time_left_is_that_of_the_rest_at_the_same_pace(monkeypatch):
    from rich.console import Console

    from examples.demo import progress

    monkeypatch.setattr(progress.time, "perf_counter", lambda: 30.0)
    console = Console(record=True, width=120)
    so_far = progress.Progress(console, work=100, done=20, start=0.0)
    assert so_far.collect("part", "abc", 3, (20, 10), str.upper) == ["a", "b", "c"]
    lines = ["part: 1 of 3, A; about 45 s left", "part: 2 of 3, B; about 30 s left", "part: 3 of 3, C; about 20 s left"]
    assert console.export_text().splitlines() == lines  # 60, 50 and 40 hundredths of the work are left
    assert so_far.done == 60


@pytest.mark.parametrize(("rl_steps", "threshold"), [(1, False), (12, True)])
def test_the_work_of_a_run_is_the_sum_of_its_parts(rl_steps, threshold):
    """Otherwise the estimate of the time left would not end at 0."""
    from rich.console import Console

    from examples.demo import cli, progress

    work = cli._total_work(cli._parser().parse_args(["--steps", "7", "--rl-steps", str(rl_steps)]), threshold)
    parts = progress.Progress(Console(quiet=True), work, progress.TEXT + 3 * progress.EVALUATION + progress.COMPARISON)
    for _ in range(3 if threshold else 2):
        parts.collect("phase 1", range(7), 7, (progress.FIRST_STEP, 1), str)
    parts.collect("phase 2", range(rl_steps), rl_steps, (progress.FIRST_RL_STEP, progress.RL_STEP), str)
    assert parts.done == work


def test_a_threshold_is_compared_only_where_it_leaves_tiles_out(tmp_path):
    from rich.console import Console

    from examples.demo import cli, model, report, sft
    from examples.demo.compare import Comparison, ProgramCost
    from examples.demo.evaluate import Evaluation

    assert not sft.supports_threshold(cli._plan_head(model.make_mesh()))  # CPU devices
    stages, program = [Evaluation(5.0, 4.0, 0.5, "x = 1")] * 3, ProgramCost(1 << 20, 0.1, 1e-7, 1e-7, 1e-7)
    comparison = Comparison(4, 8, 16, "float32", program, program, None)
    console = Console(record=True, width=120)
    stored_run = sft.SecondRun([5.0], [5.0])
    report.print_tables(console, stages, 0.9, stored_run, None, comparison)
    report.draw(tmp_path / "curves.png", [rl.RlMetrics(0.5, 4.0)], stages, 0.9, stored_run, None)
    printed = console.export_text()
    assert "threshold" not in printed
    assert "logits stored" in printed
    assert "largest error against float64" in printed


def test_a_head_of_real_size_is_timed_both_ways():
    from examples.demo import compare, model

    real = compare._time_real_size(model.make_mesh(), (64, 128, 512))
    assert real.shape == (64, 128, 512)
    assert real.fused_seconds > 0
    assert real.materialised_seconds > 0
    assert not compare._fits_real_size(model.make_mesh())  # CPU devices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: 0 is not between 1 and"),
        (["--rl-steps", "few"], "argument --rl-steps: 'few' is not a whole number"),
        (["--seed", "-1"], "argument --seed: -1 is not between 0 and"),
        (["--out", __file__], "argument --out:"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    from examples.demo import cli

    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["x = 1", "    return x", "if x:", "else:", "elif a < b:", "except ValueError as error:", "finally:", "@cache",
     "def f(self, *, key=None):", "class A(B):", "import os", "print(x)", "await f()", "x: int", "pass", "x = '\\d'"],
)  # fmt: skip
def test_statements_are_accepted(line):
    assert reward.is_statement(line)


@pytest.mark.parametrize(
    "line",
    ["", "   ", "# x = 1", "x", "12", "'text'", '"""', "a < b", "This is prose.", "x = (", "def f(", "):", "return =",
     "x = 1 y = 2", "\0", "-" * 400 + "x", "~" * 100_000 + "x"],
)  # fmt: skip
def test_what_is_no_statement_is_refused(line):
    assert not reward.is_statement(line)


def test_repetitions_comments_and_blanks_earn_nothing():
    lines = [("x = 1\n", 4), ("    x = 1\n", 5), ("# note\n", 3), ("\n", 1), ("y = 2\n", 4), ("nonsense here", 3)]
    assert reward.statement_share(lines, 20) == (4 + 4) / 20
    assert reward.statement_share([], 20) == 0.0


def test_rewards_stop_at_the_end_of_text():
    tokenizer = text.train_tokenizer(["x = 1\ny = 2\nx y z\n"] * 3, vocab_size=300)
    corpus = text.Corpus(tokenizer, np.zeros(0, np.int32), np.zeros(0, np.int32))
    first, second = tokenizer.encode("x = 1\n").ids, tokenizer.encode("y = 2\n").ids
    assert first[-1] == second[-1] == corpus.newline
    window = len(first) + 1 + len(second)
    completions = np.array([[*first, corpus.end_of_text, *second], [*first, corpus.newline, *second]])
    generated = reward.generated(completions, corpus)
    assert generated.sum(axis=1).tolist() == [len(first) + 1, window]
    expected = [len(first) / window, (len(first) + len(second)) / window]
    np.testing.assert_allclose(reward.rewards(completions, corpus), expected, rtol=1e-6)


def test_tokens_are_drawn_with_the_probabilities_of_their_logits():
    probabilities = np.array([0.0, 0.5, 0.3, 0.0, 0.2, 0.0])
    logits = jnp.log(jnp.asarray(probabilities, jnp.float32))
    drawn = rl.draw_tokens(jax.random.key(0), jnp.tile(logits, (20_000, 1)))
    shares = np.bincount(drawn, minlength=6) / 20_000
    assert not shares[probabilities == 0].any()
    np.testing.assert_allclose(shares, probabilities, atol=4 * 0.5 / 20_000**0.5)  # four standard deviations


def test_advantages_are_within_the_group():
    advantages = rl.group_advantages(np.array([0.0, 1.0, 5.0, 5.0], np.float32), group=2)
    np.testing.assert_allclose(advantages, [-1, 1, 0, 0], atol=1e-3)


def test_the_vocabulary_is_padded_to_whole_shards():
    assert Config(16_000, 128).padded_vocab_size == 16_000
    assert Config(16_000, 512).padded_vocab_size == 16_384


def test_real_text_earns_a_reward():
    documents = text.read_standard_library()
    lines = [(line, 1) for line in documents[0].splitlines()]
    assert len(documents) > 100
    assert reward.statement_share(lines, len(lines)) > 0.05
