"""The Megatron cases on ranks, which are processes of their own."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.torch.processes import forked, torchrun

WORKER = "tests.torch.megatron_worker"


def run_ranks(
    directory: pathlib.Path, table: str, *, ranks: int, seconds: float, gpus: str | None = None
) -> dict[str, Any]:
    """The results of the cases of ``megatron_cases.<table>``, by name, and any failure under "failure".

    Args:
        directory: a new one.
        table: which cases.
        ranks: how many processes.
        seconds: after which they are ended.
        gpus: "own" shows each rank one GPU, "all" shows it all of them; None: CPU.
    """
    directory.mkdir(parents=True)
    command = ["-m", WORKER, str(directory), table]
    told = {"JAX_PLATFORMS": "cpu" if gpus is None else "cuda,cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if gpus is None:
        failure = forked(ranks, command, directory / "logs", seconds, **told)
    else:
        failure = torchrun(ranks, command, directory / "logs", seconds, own_gpus=gpus == "own", **told)
    results = directory / "results"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome = {line["case"]: line["result"] for line in lines}
    if failure is not None:
        outcome["failure"] = failure
    return outcome
