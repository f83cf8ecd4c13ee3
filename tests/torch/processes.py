"""Python in processes of its own, with a hard limit of time, and its output where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

CLEAN = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def run(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout, check=False, env=_environment(environment),
    )  # fmt: skip


def succeed(code: str, timeout: float = 120, **environment: str) -> str:
    """The standard output of ``code``, which must end with exit code 0."""
    done = run(code, timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def ranks(path: Path, size: int, scratch: Path, *args: str, timeout: float = 240, **environment: str) -> list[str]:
    """The standard outputs of ``size`` processes of the script at ``path``, which all must end with exit code 0.

    Each gets RANK, WORLD_SIZE and STORE, a file for ``torch.distributed`` to meet at, in its environment.
    """
    store = scratch / f"store-{time.time_ns()}"
    outputs = [scratch / f"{store.name}-rank{rank}.txt" for rank in range(size)]
    processes = []
    for rank, output in enumerate(outputs):
        told = {"RANK": str(rank), "WORLD_SIZE": str(size), "STORE": str(store), **environment}
        with output.open("w") as file:
            command = [sys.executable, "-W", "error", str(path), *args]
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=_environment(told)))
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(2)  # the others may yet say why
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [output.read_text() for output in outputs]
    codes = [process.returncode for process in processes]
    report = "\n".join(f"--- rank {rank}: exit code {codes[rank]}\n{text}" for rank, text in enumerate(texts))
    assert codes == [0] * size, report
    return texts


def _environment(told: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    root = str(Path(__file__).parents[2])
    return {**environment, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **told}
