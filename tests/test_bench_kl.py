"""``python -m lce_jax.bench.kl`` in a tiny form."""

from __future__ import annotations

import pytest

from lce_jax.bench import kl


def test_the_divergence_of_two_heads(capsys: pytest.CaptureFixture[str]) -> None:
    rows = kl.main(["--shape", "24,16,600", "--teacher-hidden-size", "20", "--rounds", "1"])
    assert len(rows) == 9
    assert all(row.apart < 1e-5 for row in rows if "linear_kl" in row.name)
    assert sum("from stored logits" in line for line in capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(SystemExit):
        kl.main(["--shape", "24,16"])
    assert "'24,16' is not three positive numbers T,H,V" in capsys.readouterr().err
