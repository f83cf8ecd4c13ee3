"""A vocabulary that is split over ranks, which take turns in one process."""

from __future__ import annotations

import pytest
import torch

from lce_torch_bridge.tensors import _tensor_parallel


class Ranks:
    """What each rank sent in the last round is what all receive in the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.rank, self.size = 0, size
        self.gathered: dict[tuple[int, int], torch.Tensor] = {}  # by rank and by the number of dimensions
        self.summed: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(_tensor_parallel, "size_and_rank", lambda name: (size, self.rank) if name else (1, 0))
        monkeypatch.setattr(_tensor_parallel, "check", lambda *_: None)
        monkeypatch.setattr(_tensor_parallel, "gather", self._gather)
        monkeypatch.setattr(_tensor_parallel, "all_reduce", self._all_reduce)

    def _gather(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.gathered.setdefault((self.rank, x.ndim), x)
        return torch.stack([self.gathered.get((rank, x.ndim), x) for rank in range(self.size)])

    def _all_reduce(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.summed[self.rank] = x.clone()
        return sum(self.summed.values(), torch.zeros_like(x))
