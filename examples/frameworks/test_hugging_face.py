"""The Trainer of Hugging Face has the same losses without logits, in one process and under DDP."""

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
def test_the_losses_equal_those_from_logits(size: int, tmp_path: Path) -> None:
    worker = ["-m", "examples.frameworks.hugging_face_worker"]
    for output in ranks(size, worker, tmp_path / "logs", JAX_PLATFORMS="cpu"):
        results = json.loads(next(line for line in output.splitlines() if line.startswith('{"got"')))
        assert results["ranks"] == size
        assert results["got"] == pytest.approx(results["want"], rel=1e-6)
        assert results["got"][-1] < results["got"][0]
