"""``python -m lce_jax.bench.step`` on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

pytest.importorskip("rich")
pytest.importorskip("optax")

from lce_jax.bench import step

pytestmark = pytest.mark.site


def test_both_heads_train_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    rows = step.main(["--batch", "2", "--length", "32", "--rounds", "1", "--out", str(out)])
    assert [(row.objective, row.head) for row in rows] == [(x, y) for x, ys in step.OBJECTIVES.items() for y in ys]
    for stored, ours in zip(rows[::2], rows[1::2], strict=True):
        assert stored.loss is not None
        assert ours.loss == pytest.approx(stored.loss, rel=1e-5)
        assert stored.tokens == ours.tokens == 64
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert all("tokens/s" in line for line in printed)
    file = json.loads(out.read_text())
    assert file["sizes"]["vocab_size"] == 512
    assert len(file["rows"]) == 4


def test_what_does_not_fit_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(step, "draw", no_memory)
    (row,) = step.main(["--batch", "2", "--length", "32", "--objective", "cross entropy"])[:1]
    assert row.seconds is None
    assert "out of memory" in str(row)
