"""Runs jobs of all parts for some minutes: first missing jobs, then the oldest jobs of another version of the code.

Each job is a command of this bench in its own process, which writes its rows when it is done. So a session may end at
any moment, and the next session continues there. A short time on a card is enough to add to its file.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import records
from benchmarks.problem import GPU_SHAPES
from benchmarks.records import File
from lce_jax.explain import _arguments

JOB_SECONDS = 400  # the most that a job may take, so that one that never ends stops only itself
SIZES = [f"--shape {t},{h},{v}" for t, h, v in GPU_SHAPES]
PLAN = [  # the jobs for a GPU, the most important first
    f"heads {SIZES[0]}",  # with the peers
    *(f"heads {each} --no-peers" for each in SIZES),
    *(f"losses {each}" for each in SIZES[:2]),
    *(f"{part} {SIZES[0]}" for part in ("options", "kl", "precision")),
    "heads --shape 8192,4096,151936 --data text",  # with the peers, because Apple's CCE leaves out small probabilities
    f"heads {SIZES[0]} --no-peers --implementation xla",
    *(
        f"step --model qwen3-1.7b --length 4096 --batch {batch} --objective {objective}"
        for objective in ("'cross entropy'", "'PPO + entropy'")
        for batch in (4, 8, 16, 32)
    ),
    "heads --shape 205280,4096,76032 --no-peers",
]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of a session."""
    command.add_argument("--minutes", type=_arguments.positive, default=10, help="of the session (default 10)")
    command.add_argument("--list", action="store_true", help="print the jobs that would run, and run none")


def list_due_jobs(file: File, planned: Sequence[str], code: str) -> list[str]:
    """Returns the jobs that the file does not have, in the plan's order, then those of other code, the oldest first."""

    def age(key: str) -> str:
        runs = [file["runs"][row["run"]] for row in file["jobs"].get(key, {}).get("rows", {}).values()]
        if runs and all(run["code"] == code for run in runs):
            return "done"
        return min((run["date"] for run in runs), default="")

    ages = {key: age(key) for key in planned}
    return sorted((key for key in planned if ages[key] != "done"), key=lambda key: ages[key])


def run(options: argparse.Namespace) -> int:
    """Runs due jobs until the minutes are over. Returns 1 if a job failed, else 0."""
    end = time.monotonic() + 60 * options.minutes
    kind = _device_kind()
    path: Path = options.out or records.default_path(kind)
    due = list_due_jobs(records.read(path, kind), PLAN, records.code())
    if options.list:
        print("\n".join(due) or f"{path} has all jobs, measured with this code")
        return 0
    failed = 0
    for done, key in enumerate(due):
        left = end - time.monotonic()
        if left <= 0:
            print(f"the minutes are over: {len(due) - done} of {len(due)} jobs remain for the next session")
            break
        print(f"{left / 60:.1f} minutes left: {key}", flush=True)
        reason = _run(key, path, options.rounds, min(left, JOB_SECONDS))
        if reason is not None and time.monotonic() < end:  # else the job ended because the session did
            failed += 1
            print(f"{key}: {reason}", flush=True)
    print(f"written: {path}")
    return 1 if failed else 0


def _run(key: str, path: Path, rounds: int, seconds: float) -> str | None:
    """Runs a job in its own process. Returns the reason if it failed, or None."""
    arguments = [*shlex.split(key), "--rounds", str(rounds), "--out", str(path)]
    try:
        ended = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    return None if ended.returncode == 0 else f"exit status {ended.returncode}"


def _device_kind() -> str:
    """Returns the kind of the device. Another process asks JAX, so that the jobs get all of the device's memory."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
