"""The Megatron cases on ranks, which are processes of their own."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

from tests.torch.processes import together

WORKER = "tests.torch.megatron_worker"


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
    commands = [[sys.executable, "-m", WORKER, str(directory), str(rank), str(ranks), table] for rank in range(ranks)]
    failure = together(commands, [_environment(rank, gpus) for rank in range(ranks)], logs, seconds)
    results = directory / "results"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome = {line["case"]: line["result"] for line in lines}
    if failure is not None:
        outcome["failure"] = failure
    return outcome


def _environment(rank: int, gpus: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    environment["JAX_PLATFORMS"] = "cpu" if gpus is None else "cuda,cpu"
    if gpus == "own":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    return environment
