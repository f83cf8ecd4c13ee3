"""What each rank of a group draws and holds."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

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
