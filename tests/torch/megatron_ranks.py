"""Ranks as processes of their own: started, watched, and never left behind."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
WORKER = "tests.torch.megatron_worker"
SHOWN = 12_000  # characters of a rank's output in the message of a failure


def run_ranks(
    directory: pathlib.Path, table: str, *, ranks: int, seconds: float, gpus: str | None = None
) -> dict[str, Any]:
    """The results of the cases of ``megatron_cases.<table>``, by name; under "failure", what went wrong, if it did.

    Args:
        directory: a new one.
        table: which cases.
        ranks: how many processes.
        seconds: after which they are ended.
        gpus: "own" shows each rank one GPU, "all" shows it all of them; None: CPU.
    """
    directory.mkdir(parents=True)
    logs = [directory / f"rank {rank}" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", WORKER, str(directory), str(rank), str(ranks), table]
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=_environment(rank, gpus), stdout=file, stderr=subprocess.STDOUT
                )
            processes.append(process)
        failure = _wait(processes, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = directory / "results"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome = {line["case"]: line["result"] for line in lines}
    if failure is not None:
        outputs = (f"\n--- {log.name}\n{log.read_text(errors='replace')[-SHOWN:]}" for log in logs)
        outcome["failure"] = failure + "".join(outputs)
    return outcome


def _environment(rank: int, gpus: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    environment["JAX_PLATFORMS"] = "cpu" if gpus is None else "cuda,cpu"
    if gpus == "own":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    return environment


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Until all have ended, or one has failed, or time is up: what went wrong, if anything did."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(2)  # for the others to say what they have to
            return f"rank {failed[0]} ended with code {codes[failed[0]]}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)
    return "the ranks were not done in time"
