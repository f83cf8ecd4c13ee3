"""Runs Python in separate processes, one or several ranks, with a time limit and the output of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHOWN = 12_000  # characters of a process's output in the message of a failure
CLEAN = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def run(
    code: str, timeout: float = 120, under: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with warnings as errors, as an argument of the command ``under``, if there is one."""
    return subprocess.run(
        [*under, sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout, check=False, env=_environment(environment),
    )  # fmt: skip


def succeed(code: str, timeout: float = 120, **environment: str) -> str:
    """The standard output of ``code``, which must end with exit code 0."""
    done = run(code, timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def forked(size: int, command: list[str], logs: Path, seconds: float, **environment: str) -> str | None:
    """As `torchrun`, of a module of the tests on the CPU: `tests.torch.forked` says how, and why."""
    at = command.index("-m") + 1
    words = [sys.executable, *command[:at], "tests.torch.forked", str(size), str(logs), *command[at:]]
    return _failure_of(words, logs, seconds, environment)


def torchrun(
    size: int, command: list[str], logs: Path, seconds: float, own_gpus: bool = False, **environment: str
) -> str | None:
    """Runs Python ``size`` times under torchrun and ends all processes. Returns what went wrong, if anything did.

    The first to fail, or the end of the time, ends them all. Their output goes to ``logs``, a new directory; its ends
    are part of the answer. With ``own_gpus`` each process sees one GPU; torchrun shows it all of them.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    launcher += ["--redirects=3", f"--log-dir={logs}", "--no-python"]
    if own_gpus:  # in the environment before Python begins: importing megatron-core opens the GPUs
        environment["GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        own = 'CUDA_VISIBLE_DEVICES=$(echo "$GPUS" | cut -d , -f $((LOCAL_RANK + 1))) exec "$@"'
        launcher += ["sh", "-c", own, "sh"]
    return _failure_of([*launcher, sys.executable, *command], logs, seconds, environment)


def ranks(
    size: int, command: list[str], logs: Path, timeout: float = 400, launcher: Callable[..., Any] = forked, **told: Any
) -> list[str]:
    """The standard outputs of ``size`` processes of Python, which all must end with exit code 0."""
    failure = launcher(size, command, logs, timeout, **told)
    assert failure is None, failure
    said = [log.read_text() for log in sorted(logs.rglob("stdout.log"))]
    assert len(said) == size
    return said


def _failure_of(command: list[str], logs: Path, seconds: float, environment: dict[str, str]) -> str | None:
    logs.mkdir(parents=True)
    with (logs / "launcher").open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(environment), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        failure = f"ended with code {process.returncode}" if process.wait(seconds) else None
    except subprocess.TimeoutExpired:
        failure = "the ranks were not done in time"
    finally:
        process.terminate()  # it ends the ranks, after half a minute with force
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if failure is None:
        return None
    found = sorted(path for name in ("launcher", "*.log") for path in logs.rglob(name))
    texts = {path.relative_to(logs): path.read_text(errors="replace") for path in found}
    return failure + "".join(f"\n--- {name}\n{text[-SHOWN:]}" for name, text in texts.items() if text)


def _environment(told: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Ranks in step compile the same programs at the same time: one would read a file that another is writing.
    alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return {**environment, **alone, **told}
