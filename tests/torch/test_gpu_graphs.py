"""Two GPUs, the vocabulary split over them: CUDA graphs that hold NCCL's collectives, and the time of a call."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.torch.gpu_problem import skip_unless_direct
from tests.torch.processes import ranks

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("check", ["replays", "megatron", "time"])
def test_on_two_ranks(check: str, tmp_path: Path) -> None:
    skip_unless_direct()
    if check == "megatron" and not importlib.util.find_spec("megatron.core"):
        pytest.skip("needs megatron-core")
    for said in ranks(2, ["-m", "tests.torch.graphs_worker", check], tmp_path / "logs", 240, JAX_PLATFORMS="cpu"):
        print(said)
        assert f"done {check}" in said
