"""The call that the bridge's GPU tests make, and where it is launched directly."""

from __future__ import annotations

import pytest
import torch

from lce_torch_bridge.tensors import _device
from tests.torch import problem as p


def draw(T: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16) -> p.Problem:
    return p.draw(T, H, V, dtype).to("cuda")


def skip_unless_direct() -> None:
    """Skips a test where nothing is launched directly."""
    reason = _device.launch_refusal(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
