"""AReaL's FSDP engine with `lce_torch_bridge.areal` takes the same steps as with AReaL's own head."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.torch.processes import ranks, torchrun

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("areal"), reason="needs areal: make test-frameworks")
LINE = "areal: log-probabilities of the head come from lce_torch_bridge"


@pytest.mark.parametrize(("backend", "size"), [("fsdp:d1", 1), ("fsdp:d2", 2), ("fsdp:d1c2", 2), ("fsdp:d1t2", 2)])
def test_its_engine_takes_the_same_steps_as_with_its_own_head(backend: str, size: int, tmp_path: Path) -> None:
    """One rank, two ranks with different rows, two that share a sequence (Ulysses), and two that share the head."""
    command = ["-m", "examples.frameworks.areal_worker", backend]
    for output in ranks(size, command, tmp_path / "logs", launcher=torchrun):
        assert LINE in output
        results = json.loads(output.splitlines()[-1])
        assert (results["served"] > 0) == (backend != "fsdp:d1t2")  # there AReaL computes from split logits itself
        assert results["stored"] == 0
        (got, want), (norms, want_norms) = results["losses"], results["norms"]
        for ours, theirs in zip(got, want, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)  # the loss of SFT, the smallest and the largest logit
        assert norms == pytest.approx(want_norms, rel=1e-6)  # of the gradients of a policy's loss
        assert got[-1][0] < got[0][0]
        assert results["logprobs"] <= 1e-6  # after six steps
        assert results["parameters"] <= 5e-6  # by norm, of float32 sums in another order
