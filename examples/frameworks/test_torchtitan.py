"""torchtitan's trainer has the same losses and parameters with the loss of `lce_torch_bridge.torchtitan`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch.processes import ROOT, ranks, torchrun

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("torchtitan"), reason="needs torchtitan: make test-frameworks"
)
STEPS = 4
NEAR = 5e-6  # by norm: float32 sums in another order, after four steps of AdamW
SPLIT = ("--parallelism.tensor-parallel-degree", "2")
OURS = ("--override.imports", "lce_torch_bridge.torchtitan.without_logits")
INSTALL = ("install",)
CHUNKS = ("--loss.num-chunks", "4")


def run_training(folder: Path, size: int, *options: str) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    """Trains. Returns what each rank prints, and its parts of the parameters after the steps."""
    command = ["-m", "examples.frameworks.torchtitan_worker", str(folder / "parameters"), *options]
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    folder.mkdir()
    outputs = ranks(size, command, folder / "logs", launcher=torchrun, **variables)
    assert all(
        ("torchtitan: the loss comes from lce_torch_bridge" in x) == (OURS[0] in options or INSTALL[0] in options)
        for x in outputs
    )
    results = [json.loads(x.splitlines()[-1]) for x in outputs]
    return results, [torch.load(folder / f"parameters.{rank}") for rank in range(size)]


@pytest.mark.parametrize(("size", "options"), [(1, ()), (2, ()), (2, SPLIT)], ids=["one", "FSDP2", "split head"])
def test_four_steps_equal_those_with_its_own_loss(size: int, options: tuple[str, ...], tmp_path: Path) -> None:
    want, want_parameters = run_training(tmp_path / "theirs", size, *options, *CHUNKS)
    got, got_parameters = run_training(
        tmp_path / "ours", size, *(INSTALL if size == 1 else ()), *options, *(OURS if size > 1 else ())
    )
    for theirs, ours in zip(want, got, strict=True):
        assert (theirs["calls"], ours["calls"]) == (0, STEPS)
        assert len(theirs["losses"]) == STEPS
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["refused"] == "loss is MSELoss.Config: this replaces CrossEntropyLoss alone"
    for theirs, ours in zip(want_parameters, got_parameters, strict=True):
        for name, x in theirs.items():
            assert torch.linalg.norm(ours[name] - x) <= NEAR * torch.linalg.norm(x), name
