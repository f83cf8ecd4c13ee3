"""Models in PyTorch's own wrappers on four processes, each data-parallel rank with tokens of its own."""

from __future__ import annotations

from pathlib import Path

from tests.torch.processes import ranks

CHECKS = ("fsdp", "other_reductions", "tensor_parallel", "placements", "ddp")


def test_four_ranks(tmp_path: Path) -> None:
    for said in ranks(4, ["-m", "tests.torch.wrapped_worker", *CHECKS], tmp_path / "logs"):
        assert [line for line in said.splitlines() if line.startswith("done")] == [f"done {name}" for name in CHECKS]
