"""The Trainer of Hugging Face without logits: its own losses, on one process and under DDP."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.torch.processes import ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="needs transformers and accelerate: make test-frameworks",
)


@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_are_those_of_logits(size: int, tmp_path: Path) -> None:
    for said in ranks(size, ["-m", "examples.frameworks.hugging_face_worker"], tmp_path / "logs", JAX_PLATFORMS="cpu"):
        found = json.loads(next(line for line in said.splitlines() if line.startswith('{"got"')))
        assert found["ranks"] == size
        assert found["got"] == pytest.approx(found["want"], rel=1e-6)
        assert found["got"][-1] < found["got"][0]
