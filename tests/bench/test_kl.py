"""The parts of the bench that time small programs, in a tiny form: kl, options, precision."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from benchmarks import __main__ as bench
from benchmarks import measure, precision, programs, records

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]


def rows_of(path: Path, part: str, *more: str) -> dict[str, dict[str, Any]]:
    assert bench.main([part, "--shape", "24,16,600", "--rounds", "1", "--out", str(path / "cpu.json"), *more]) == 0
    (job,) = records.jobs(records.read(path / "cpu.json"), part)
    return {row["name"]: row for row in job["rows"]}


def test_the_divergence_of_two_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "kl", "--teacher-hidden-size", "20")
    assert len(rows) == 19
    peers = [row for name, row in rows.items() if "TRL" in name]
    assert len(peers) == 3
    assert all(row["left_out"] == "peers are timed on CUDA GPUs, this is cpu" for row in peers)
    assert all(row["apart"] < 2e-5 for name, row in rows.items() if "linear_kl" in name)
    assert sum("from stored logits" in line for line in capsys.readouterr().out.splitlines()) == 9
    file = records.read(tmp_path / "cpu.json")
    (key,) = file["jobs"]
    assert key == "kl --shape 24,16,600 --teacher-hidden-size 20"
    assert file["jobs"][key]["shape"] == {"T": 24, "H": 16, "G": 20, "V": 600}
    with pytest.raises(SystemExit):
        bench.main(["kl", "--shape", "24,16"])
    assert "'24,16' must be three numbers: tokens, hidden size, vocabulary" in capsys.readouterr().err


def test_a_few_ids_per_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "options", "--k", "3", "64")
    compared = {name: row for name, row in rows.items() if "apart" in row}
    assert len(compared) == 2 * 4 + 2
    assert all(row["apart"] < 2e-5 for row in compared.values())
    assert all(row.get("same_ids") == (1.0 if "topk" in name else None) for name, row in compared.items())
    printed = capsys.readouterr().out
    assert "64 candidates add" in printed
    assert "a floor adds" in printed
    again = rows_of(tmp_path, "options", "--k", "5", "--no-stored")
    assert set(again) == {*rows, "linear_topk, k 5"}  # what was not asked for is kept


def test_a_program_that_fails_while_it_is_timed_has_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails_in_its_second_timing(function: Any, *operands: Any) -> measure.Run:
        compiled, calls = measure.compile_jax(function, *operands), itertools.count(1)

        def launch() -> Any:
            if next(calls) == 3:  # after the one that compares, and the first timing
                raise RuntimeError("RESOURCE_EXHAUSTED: two results")
            return compiled.launch()

        return compiled._replace(launch=launch)

    made = precision._programs

    def failing() -> dict[str, programs.Program]:
        found = made()
        return found | {
            programs.PRODUCT: dataclasses.replace(found[programs.PRODUCT], compile=fails_in_its_second_timing)
        }

    monkeypatch.setattr(precision, "_programs", failing)
    rows = rows_of(tmp_path, "precision")
    assert rows[programs.PRODUCT]["left_out"] == "RuntimeError: RESOURCE_EXHAUSTED: two results"
    ours = rows["linear_logprobs, highest"]
    assert ours["median_seconds"] > 0
    assert ours["ratio_to_gemm"] is None
    assert "– products" in capsys.readouterr().out


def test_float32_by_what_multiplies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "precision")
    for way in ("linear_logprobs", "stored logits"):
        for end in ("", ", + backward"):
            assert "not supported" in rows[f"{way}, TF32_TF32_F32{end}"]["left_out"]  # on a CPU
    assert rows["linear_logprobs, highest, + backward"]["apart"] < 2e-5
    assert rows["linear_logprobs, highest"]["median_seconds"] > 0
    assert "not timed: stored logits, TF32_TF32_F32" in capsys.readouterr().out
