"""Runs Python in separate processes, one or several ranks, with a time limit and the output of failures."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHOWN = 12_000  # characters of a process's output in the message of a failure
CLEAN = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@functools.cache
def server() -> subprocess.Popen[str]:
    """`tests.torch.forked`, which lives as long as this process."""
    command, pipe = [sys.executable, "-m", "tests.torch.forked"], subprocess.PIPE
    started = subprocess.Popen(command, cwd=ROOT, env=_environment({}), stdin=pipe, stdout=pipe, text=True)
    atexit.register(started.communicate)
    return started


def ask(size: int, words: list[str], logs: Path, seconds: float, environment: dict[str, str]) -> list[int] | str:
    """The exit codes of processes that the server forks, or what went wrong."""
    logs.mkdir(parents=True, exist_ok=True)
    talk = server()
    assert talk.stdin is not None
    assert talk.stdout is not None
    request = {"size": size, "words": words, "logs": str(logs), "seconds": seconds, "environment": environment}
    talk.stdin.write(json.dumps(request) + "\n")
    talk.stdin.flush()
    return json.loads(talk.stdout.readline())


def run(
    code: str, timeout: float = 120, under: tuple[str, ...] = (), fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with warnings as errors: forked, ``fresh`` or as an argument of the command ``under``."""
    code = textwrap.dedent(code)
    if fresh or under:
        return subprocess.run(
            [*under, sys.executable, "-W", "error", "-c", code],
            capture_output=True, text=True, timeout=timeout, check=False, env=_environment(environment),
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        codes = ask(1, ["-c", code], Path(folder), timeout, environment)
        assert isinstance(codes, list), codes
        out, err = ((Path(folder) / "0" / f"{name}.log").read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(code, codes[0], out, err)


def succeed(code: str, timeout: float = 120, fresh: bool = False, **environment: str) -> str:
    """The standard output of ``code``, which must end with exit code 0."""
    done = run(code, timeout, fresh=fresh, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def forked(size: int, command: list[str], logs: Path, seconds: float, **environment: str) -> str | None:
    """As `torchrun`, of a module of the tests on the CPU: `tests.torch.forked` says how, and why."""
    codes = ask(size, command[command.index("-m") + 1 :], logs, seconds, environment)
    wrong = f"exit codes {codes}" if isinstance(codes, list) and any(codes) else codes
    return _with_logs(wrong, logs) if isinstance(wrong, str) else None


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
    return None if failure is None else _with_logs(failure, logs)


def _with_logs(failure: str, logs: Path) -> str:
    found = sorted(path for name in ("launcher", "*.log") for path in logs.rglob(name))
    texts = {path.relative_to(logs): path.read_text(errors="replace") for path in found}
    return failure + "".join(f"\n--- {name}\n{text[-SHOWN:]}" for name, text in texts.items() if text)


def _environment(told: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Ranks in step compile the same programs at the same time: one would read a file that another is writing.
    alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return {**environment, **alone, **told}
