"""``python -m lce_jax.bench.kl`` and ``python -m lce_jax.bench.chosen`` in a tiny form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from lce_jax.bench import chosen, kl

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]


def test_the_divergence_of_two_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = ["--shape", "24,16,600", "--teacher-hidden-size", "20", "--rounds", "1", "--out", str(tmp_path / "kl.json")]
    rows = kl.main(told).rows
    assert len(rows) == 13
    assert all(row.apart < 2e-5 for row in rows if "linear_kl" in row.name)
    assert sum("from stored logits" in line for line in capsys.readouterr().out.splitlines()) == 6
    file = json.loads((tmp_path / "kl.json").read_text())
    assert file["command"].startswith("python -m lce_jax.bench.kl --shape 24,16,600")
    assert file["shape"] == {"T": 24, "H": 16, "G": 20, "V": 600}
    assert [row["name"] for row in file["rows"]] == [row.name for row in rows]
    with pytest.raises(SystemExit):
        kl.main(["--shape", "24,16"])
    assert "'24,16' must be three numbers: tokens, hidden size, vocabulary" in capsys.readouterr().err


def test_a_few_ids_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    table = chosen.main(["--shape", "24,16,600", "--rounds", "1", "--k", "3", "64"])
    compared = [row for row in table.rows if row.apart is not None]
    assert len(compared) == 2 * 4 + 2
    assert all(row.apart < 2e-5 for row in compared)
    assert all(row.same_ids == (1.0 if "topk" in row.name else None) for row in compared)
    printed = capsys.readouterr().out
    assert "64 candidates add" in printed
    assert "a floor adds" in printed
    few = chosen.main(["--shape", "24,16,600", "--rounds", "1", "--k", "3", "--no-stored"])
    assert not any("stored" in row.name for row in few.rows)
