"""What each rank of a group draws, holds and runs."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.torch import executor
from tests.torch import problem as p

DEVICE = os.environ.get("DEVICE", "cpu")


def draw(**sizes: Any) -> p.Problem:
    return p.draw(**sizes).to(DEVICE)


def shard(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size())[group.rank()].clone()


def same_on_all_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    everyone = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyone, x.detach().contiguous(), group=group)
    return all(torch.equal(x, other) for other in everyone)


def run_in_float64(functions: dict[str, Any]) -> None:
    """Those that the command line names, over gloo; their calls take float64, in which every error is seen."""
    warnings.filterwarnings("error", module=r"lce_(jax|torch_bridge)")
    dist.init_process_group("gloo")
    with executor.in_float64():
        for name in sys.argv[1:]:
            functions[name]()
            print("done", name, flush=True)
    dist.destroy_process_group()
