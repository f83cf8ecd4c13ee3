"""The call that the bridge's GPU tests make."""

from __future__ import annotations

import torch

from tests.torch import problem as p


def draw(T: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16) -> p.Problem:
    return p.draw(T, H, V, dtype).to("cuda")
