"""The bench's command line, and the file it writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import peers, records

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "'1,2' must be three numbers: tokens, hidden size, vocabulary"),
        (["--shape", "0,64,512"], "0 is not between 1 and"),
        (["--shape", "8k,64,512"], "'8k' is not a whole number: write all its digits, such as 8192"),
        (["--implementation", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_bad_arguments_end_with_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert "usage: python -m benchmarks heads" in printed.err
    assert message in printed.err
    assert printed.out == ""


def test_an_implementation_that_cannot_serve_a_shape_says_why(capsys, tmp_path):
    arguments = ["--shape", "16,32,520", "--implementation", "mosaic_gpu", "--out", str(tmp_path / "cpu.json")]
    assert command.main(arguments) == 1
    message = 'heads --shape 16,32,520 --implementation mosaic_gpu: implementation "mosaic_gpu": needs an NVIDIA GPU'
    assert message in capsys.readouterr().out


BRIEFLY = """
import runpy
from benchmarks import measure
measure.SAMPLE_SECONDS = 0.005
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def test_the_whole_command(tmp_path):
    out = tmp_path / "cpu.json"
    arguments = ["--shape", "16,32,520", "--shape", "32,32,520", "--rounds", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BRIEFLY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    for words in ("T 16, H 32, V 520, float32", "bare GEMM", "lce_jax (xla)", "peers are timed on CUDA"):
        assert words in done.stdout
    assert "compiling and checking lce_jax (xla), forward+backward" in done.stderr  # progress goes to a log
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout + done.stderr)
    file = records.read(out, "cpu")
    assert list(file["jobs"]) == ["heads --shape 16,32,520", "heads --shape 32,32,520"]
    (run_of_both,) = file["runs"].values()
    assert run_of_both["device"]["jax"] == jax.__version__
    assert (run_of_both["rounds"], run_of_both["code"]) == (2, records.code())
    fields = {"name", "run", "key", "label", "direction", "objective", "seconds", "median_seconds", "ratio_to_gemm"}
    fields |= {"useful_flops_per_second", "temp_bytes", "compile_seconds", "errors"}
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
            assert set(row) == fields
            assert len(row["seconds"]) == 2
            assert row["median_seconds"] > 0
        left_out = {row["name"].rpartition(", forward")[0] for row in job["rows"] if "left_out" in row}
        assert left_out == {peer.label for peer in peers.PEERS.values()}
