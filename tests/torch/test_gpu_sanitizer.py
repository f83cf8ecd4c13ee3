"""compute-sanitizer watches every kernel, launched directly. Its tools run side by side, in processes of their own."""

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
    """A tool, what it watches, and its options."""

    tool: str
    parts: tuple[str, ...] = ("whole", "live", "counted", "bridge")
    options: tuple[str, ...] = ()


RUNS = {
    "memcheck": Run("memcheck"),
    "racecheck": Run("racecheck"),
    "synccheck": Run("synccheck"),
    "initcheck": Run("initcheck", ("whole",)),
    # Where rows are left out, generated code loads numbers that no kernel has written, and drops them.
    "initcheck of the kernels": Run(
        "initcheck", ("live", "counted", "bridge"), ("--kernel-name-exclude", "kns=stage_")
    ),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """All runs, started at once, and where each writes."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    skip_unless_direct()
    # Each tensor is an allocation of its own: what lies beside it belongs to nobody.
    alone = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = {}
    for name, run in RUNS.items():
        log = tmp_path_factory.mktemp("sanitizer") / "log"
        command = [sanitizer, "--error-exitcode", "9", "--tool", run.tool, *run.options]
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
def test_the_sanitizer_finds_nothing(processes: dict[str, tuple[subprocess.Popen[bytes], Path]], name: str) -> None:
    process, log = processes[name]
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {SECONDS} s\n{log.read_text()[-6000:]}")
    said = log.read_text()
    assert code == 0, said[-6000:]
    assert "ERROR SUMMARY: 0 errors" in said or "0 hazards displayed" in said, said[-6000:]
    assert "done everything" in said
