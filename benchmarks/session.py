"""All parts, for some minutes: what the file lacks, then what another version of the code measured, the oldest first.

Each job is a command of this bench in a process of its own, which writes its rows when it is done. So a session may end
at any moment, and the next one goes on from there: a short visit to a card is enough to bring its file forward.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import records, shapes
from benchmarks.records import File, Measured
from lce_jax.explain import _arguments

JOB_SECONDS = 400  # that a job may take: one that waits for ever ends alone


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    command.add_argument("--minutes", type=_arguments.positive, default=10, help="of the session (default 10)")
    shape = "in place of the device's shapes; repeatable"
    command.add_argument("--shape", type=_arguments.shape, action="append", default=[], metavar="T,H,V", help=shape)
    command.add_argument("--list", action="store_true", help="print what would run, and run nothing")


def plan(platform: str, chosen: Sequence[tuple[int, int, int]] = ()) -> list[str]:
    """The commands of a platform, the most wanted first."""
    on_gpu = platform == "gpu"
    sizes = [f"--shape {t},{h},{v}" for t, h, v in chosen or (shapes.GPU_SHAPES if on_gpu else shapes.CPU_SHAPES)]
    one, text = sizes[0], sizes[0] if chosen else "--shape 8192,4096,151936"
    small = [*(f"heads {each} --no-peers" for each in sizes), f"options {one}", f"kl {one}", f"precision {one}"]
    if not on_gpu:
        return [*small, *_steps("tiny", 128, (2,))]
    return [
        f"heads {one}",  # beside the peers
        *small,
        f"heads {text} --data text",  # beside them too: Apple's CCE leaves out small probabilities
        f"heads {one} --no-peers --implementation xla",
        *_steps("qwen3-1.7b", 4096, (4, 8, 16, 32)),
        *([] if chosen else ["heads --shape 205280,4096,76032 --no-peers"]),
    ]


def _steps(model: str, length: int, batches: Sequence[int]) -> list[str]:
    sizes = f"step --model {model} --length {length}"
    objectives = ("'cross entropy'", "'PPO + entropy'")
    return [f"{sizes} --batch {batch} --objective {each}" for each in objectives for batch in batches]


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
    device = _device()
    path: Path = options.out or records.default_path(device["device_kind"])
    file = records.read(path, device["device_kind"])
    waiting = due(file, plan(device["platform"], options.shape), records.code())
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
            found = Measured({"the command": {"left_out": reason}})
            records.merge(path, key, found, records.this_run(options.rounds, device), partial=True)
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


def _device() -> dict[str, str]:
    """Asked in a process that ends: this one leaves the device's memory to the jobs."""
    asked = "import json; from benchmarks import records; print(json.dumps(records.device()))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(said)
    return found
