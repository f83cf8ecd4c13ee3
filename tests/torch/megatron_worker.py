"""What one rank runs: ``torchrun --nproc-per-node 2 -m tests.torch.megatron_worker DIRECTORY TABLE``.

The checks measure; the tests judge. Rank 0 writes one line of JSON per case of the table: the largest of each number
over the ranks, whether each flag holds on all of them, and its own texts. A case that raises ends the run, because the
ranks may then be out of step with each other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.torch import (
    executor,
    megatron_behaviour,
    megatron_cases,
    megatron_checks,
    megatron_losses,
    megatron_models,
)
from tests.torch.megatron_checks import Result


def run(case: megatron_cases.Case) -> Result:
    name = case.check.replace(" ", "_")
    modules = (megatron_checks, megatron_losses, megatron_behaviour)
    check = next(getattr(module, name) for module in modules if hasattr(module, name))
    mine = check(case.tp, dict(case.model), dict(case.options))
    results: list[Result] = [{}] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    return {key: merged([result[key] for result in results]) for key in mine}


def merged(values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    return max(values) if isinstance(values[0], float) else values[0]


def main() -> None:
    directory, table = pathlib.Path(sys.argv[1]), sys.argv[2]
    warnings.filterwarnings("error", module=r"lce_(jax|torch_bridge)")
    rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())  # 0 if each rank sees only its own
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=60))
    megatron_models.prepare()
    # Megatron makes a dozen groups for each size, and each group of gloo's has a thread that polls until the end.
    for case in sorted(getattr(megatron_cases, table), key=lambda case: (case.tp, dict(case.model).get("cp", 1))):
        try:
            with contextlib.nullcontext() if gpu else executor.in_float64():
                result = run(case)
        except Exception:
            print(f"{case}: {traceback.format_exc()}", flush=True)
            os._exit(1)  # not through exit handlers, which may wait for the other ranks
        if rank == 0:
            with open(directory / "results", "a") as file:
                file.write(json.dumps({"case": case.name, "result": result}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
