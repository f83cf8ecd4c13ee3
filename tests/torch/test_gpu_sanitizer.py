"""compute-sanitizer watches every kernel, launched directly. Its tools run side by side, in processes of their own.

Its tool initcheck does not see what TMA writes (dhidden's sums, dlogits, a cache), and takes each read of that by other
code for one of uninitialised memory. So it watches forwards, and one more process makes each call twice, in memory that
holds zeros and in memory that holds NaN.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.torch.gpu_problem import skip_unless_direct
from tests.torch.processes import ROOT

pytestmark = pytest.mark.gpu

SECONDS = 240


class Run(NamedTuple):
    """A tool, none for the kernels alone, what it watches, and its options."""

    tool: str
    parts: tuple[str, ...] = ("plain", "cached", "loss", "candidates", "live")
    options: tuple[str, ...] = ()


RUNS = {
    "memcheck": Run("memcheck"),
    "racecheck": Run("racecheck"),
    "synccheck": Run("synccheck"),
    "initcheck": Run("initcheck", ("forward",)),
    "filled memory": Run("", ("filled", "plain", "cached", "loss", "candidates", "live")),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """All runs, started at once, and where each writes."""
    skip_unless_direct()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    # Each tensor is an allocation of its own: what lies beside it belongs to nobody.
    alone = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = {}
    for name, run in RUNS.items():
        if run.tool and sanitizer is None:
            continue
        log = tmp_path_factory.mktemp("sanitizer") / "log"
        command = [str(sanitizer), "--error-exitcode", "9", "--tool", run.tool, *run.options] if run.tool else []
        command += [sys.executable, "-m", "tests.torch.sanitized", *run.parts]
        with log.open("wb") as file:
            started[name] = (
                subprocess.Popen(command, cwd=ROOT, env=os.environ | alone, stdout=file, stderr=subprocess.STDOUT),
                log,
            )
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found(processes: dict[str, tuple[subprocess.Popen[bytes], Path]], name: str) -> None:
    if name not in processes:
        pytest.skip("no compute-sanitizer")
    process, log = processes[name]
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {SECONDS} s\n{log.read_text()[-6000:]}")
    said = log.read_text()
    assert code == 0, said[-6000:]
    tool = RUNS[name].tool
    assert not tool or "ERROR SUMMARY: 0 errors" in said or "0 hazards displayed" in said, said[-6000:]
    assert "done everything" in said
