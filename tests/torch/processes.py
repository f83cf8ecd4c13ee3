"""Python in processes of its own, one or several side by side, with a hard limit of time, and what a failure said."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = 12_000  # characters of a process's output in the message of a failure
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
    logs = [scratch / f"{store.name}-rank{rank}.txt" for rank in range(size)]
    command = [sys.executable, "-W", "error", str(path), *args]
    told = {"WORLD_SIZE": str(size), "STORE": str(store), **environment}
    environments = [_environment({"RANK": str(rank), **told}) for rank in range(size)]
    failure = together([command] * size, environments, logs, timeout)
    assert failure is None, failure
    return [log.read_text() for log in logs]


def together(
    commands: list[list[str]], environments: list[dict[str, str]], logs: list[Path], seconds: float
) -> str | None:
    """Runs processes side by side and leaves none behind: what went wrong, if anything did, with the ends of ``logs``.

    Their output goes to ``logs``. The first to fail, or the end of the time, ends them all.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment, log in zip(commands, environments, logs, strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        failure = _wait(processes, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failure is None:
        return None
    return failure + "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-SHOWN:]}" for log in logs)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Until all have ended, or one has failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(2)  # for the others to say what they have to
            return f"rank {failed[0]} ended with code {codes[failed[0]]}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return "the ranks were not done in time"


def _environment(told: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **told}
