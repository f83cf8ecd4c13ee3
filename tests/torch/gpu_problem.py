"""A problem on the GPU, for the tests of the bridge there."""

from __future__ import annotations

import torch

from tests.torch import problem as p


def draw(T: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16) -> p.Problem:
    return p.draw(T, H, V, dtype).to("cuda")
