"""The bench's command line, and the file it writes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import jax
import pytest

pytest.importorskip("rich")

from benchmarks import __main__ as command
from benchmarks import records, run, shapes

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "'1,2' must be three numbers: tokens, hidden size, vocabulary"),
        (["--shape", "0,64,512"], "0 is not between 1 and"),
        (["--tokens", "8k"], "'8k' is no whole number: write all its digits, such as 8192"),
        (["--model", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--shape", "16,32,520", "--implementation", "mosaic_gpu"], "--implementation: T 16, H 32, V 520: impl"),
        (["--shape", "16,32,520", "--devices", "99"], "argument --devices: 99, and this machine has"),
    ],
)
def test_bad_arguments_end_with_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert "usage: python -m benchmarks heads" in said.err
    assert message in said.err
    assert said.out == ""


BRIEFLY = """
import runpy
from benchmarks import measure
measure.SAMPLE_SECONDS = 0.005
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def test_the_whole_command(tmp_path):
    out = tmp_path / "cpu.json"
    arguments = ["--shape", "16,32,520", "--tokens", "16,32", "--rounds", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BRIEFLY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    for words in ("T 16, H 32, V 520, float32", "bare GEMM", "lce_jax (xla)", "÷ stored", "peers are timed on CUDA"):
        assert words in done.stdout
    assert "round 2 of 2, lce_jax (xla), forward+backward" in done.stderr  # no terminal: progress goes to a log
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout + done.stderr)
    file = records.read(out, "cpu")
    assert list(file["jobs"]) == ["heads --shape 16,32,520", "heads --shape 32,32,520"]
    (run_of_both,) = file["runs"].values()
    assert run_of_both["device"]["jax"] == jax.__version__
    assert (run_of_both["rounds"], run_of_both["code"]) == (2, records.code())
    fields = {field.name for field in dataclasses.fields(run.Row)}
    derived = {"median_seconds", "useful_flops_per_second", "ratio_to_gemm", "ratio_to_materialised"}
    for job in records.jobs(file, "heads"):
        assert set(job) == {"shape", "dtype", "data", "rows", "arguments"}
        assert records.command(job).startswith("python -m benchmarks heads --shape")
        rows = records.timed(job["rows"])
        assert {(row["key"], row["direction"]) for row in rows} >= {
            ("gemm", "gemm"),
            ("ours", "forward"),
            ("ours", "forward+backward"),
            ("materialised", "forward"),
            ("materialised", "forward+backward"),
            ("ours", "top-k"),
            ("materialised", "top-k"),
        }
        for row in rows:
            assert set(row) == fields | derived | {"name", "run"}
            assert len(row["seconds"]) == 2
            assert row["median_seconds"] > 0
        left_out = {row["name"] for row in job["rows"] if "left_out" in row}
        assert left_out == set(shapes.PEERS)
