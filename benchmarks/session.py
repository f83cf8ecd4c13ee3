"""All parts, for some minutes: what the file lacks, then what another version of the code measured, the oldest first.

Each job is a command of this bench in a process of its own, which writes its rows when it is done. So a session may end
at any moment, and the next one goes on from there: a short visit to a card is enough to bring its file forward.
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

JOB_SECONDS = 400  # that a job may take: one that waits for ever ends alone
SIZES = [f"--shape {t},{h},{v}" for t, h, v in GPU_SHAPES]
PLAN = [  # for a GPU, the most wanted first
    f"heads {SIZES[0]}",  # beside the peers
    *(f"heads {each} --no-peers" for each in SIZES),
    *(f"losses {each}" for each in SIZES[:2]),
    *(f"{part} {SIZES[0]}" for part in ("options", "kl", "precision")),
    "heads --shape 8192,4096,151936 --data text",  # beside them too: Apple's CCE leaves out small probabilities
    f"heads {SIZES[0]} --no-peers --implementation xla",
    *(
        f"step --model qwen3-1.7b --length 4096 --batch {batch} --objective {objective}"
        for objective in ("'cross entropy'", "'PPO + entropy'")
        for batch in (4, 8, 16, 32)
    ),
    "heads --shape 205280,4096,76032 --no-peers",
]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    command.add_argument("--minutes", type=_arguments.positive, default=10, help="of the session (default 10)")
    command.add_argument("--list", action="store_true", help="print what would run, and run nothing")


def due(file: File, planned: Sequence[str], code: str) -> list[str]:
    """What the file lacks, in the plan's order, then what another version of the code measured, the oldest first."""

    def age(key: str) -> str:
        runs = [file["runs"][row["run"]] for row in file["jobs"].get(key, {}).get("rows", {}).values()]
        if runs and all(run["code"] == code for run in runs):
            return "done"
        return min((run["date"] for run in runs), default="")

    ages = {key: age(key) for key in planned}
    return sorted((key for key in planned if ages[key] != "done"), key=lambda key: ages[key])


def run(options: argparse.Namespace) -> int:
    """Runs what is due until the minutes are over; returns 1 if a job failed."""
    end = time.monotonic() + 60 * options.minutes
    kind = _device_kind()
    path: Path = options.out or records.default_path(kind)
    waiting = due(records.read(path, kind), PLAN, records.code())
    if options.list:
        print("\n".join(waiting) or f"{path} has all, as this code measures it")
        return 0
    failed = 0
    for done, key in enumerate(waiting):
        left = end - time.monotonic()
        if left <= 0:
            print(f"the minutes are over: {len(waiting) - done} of {len(waiting)} jobs wait for the next session")
            break
        print(f"{left / 60:.1f} minutes left: {key}", flush=True)
        reason = _run(key, path, options.rounds, min(left, JOB_SECONDS))
        if reason is not None and time.monotonic() < end:  # else it was the session that ended
            failed += 1
            print(f"{key}: {reason}", flush=True)
    print(f"written: {path}")
    return 1 if failed else 0


def _run(key: str, path: Path, rounds: int, seconds: float) -> str | None:
    """One job in a process of its own; why it did not end well, or None."""
    given = [*shlex.split(key), "--rounds", str(rounds), "--out", str(path)]
    try:
        ended = subprocess.run([sys.executable, "-m", "benchmarks", *given], timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    return None if ended.returncode == 0 else f"exit status {ended.returncode}"


def _device_kind() -> str:
    """Asked in a process that ends: this one leaves the device's memory to the jobs."""
    asked = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
