"""The call that the bridge's GPU tests make, and where it is launched directly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lce_torch_bridge.tensors import _device
from tests.torch import problem as p


def draw(T: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16) -> p.Problem:
    return p.draw(T, H, V, dtype).to("cuda")


def capture_graph(step: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Returns a graph of ``step``, which runs twice before, and the tensors that its replays write to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def skip_unless_direct() -> None:
    """Skips a test where nothing is launched directly."""
    reason = _device.launch_refusal(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
