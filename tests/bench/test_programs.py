"""The parts of the bench that time small programs, in a tiny form: losses, options, kl, precision."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import __main__ as bench
from benchmarks import measure, programs, records
from lce_jax.types.scalars import DIRECTIONS

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("short_timings")]


def rows_of(path: Path, part: str, *more: str) -> dict[str, dict[str, Any]]:
    assert bench.main([part, "--shape", "24,16,600", "--rounds", "1", "--out", str(path / "cpu.json"), *more]) == 0
    (job,) = (one for one in records.jobs(records.read(path / "cpu.json"), part) if more == tuple(one["arguments"][3:]))
    assert job["shape"] == {"T": 24, "H": 16, "V": 600}
    return {row["name"]: row for row in job["rows"]}


def test_the_divergence_of_two_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "kl")
    peers = [row for name, row in rows.items() if "TRL" in name]
    assert peers
    assert all("peers are timed on CUDA GPUs, this is cpu" in row["left_out"] for row in peers)
    ours = {name: row["apart"] for name, row in rows.items() if "linear_kl" in name}
    for direction in DIRECTIONS:
        assert {name for name in ours if name.startswith(f"{direction}, ")}
    assert max(ours.values()) < 2e-5
    with pytest.raises(SystemExit):
        bench.main(["kl", "--shape", "24,16"])
    assert "'24,16' must be three numbers: tokens, hidden size, vocabulary" in capsys.readouterr().err


def test_the_losses_by_default(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "losses")
    compared = {name: row["apart"] for name, row in rows.items() if "apart" in row}
    assert {name for name in rows if name.startswith("linear_")} == {*compared}
    assert len(compared) == 7
    assert max(compared.values()) < 2e-5


def test_a_few_ids_per_token(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "options")
    compared = {name: row for name, row in rows.items() if "apart" in row}
    assert len(compared) == 2 * 4
    assert all(row["apart"] < 2e-5 for row in compared.values())
    again = rows_of(tmp_path, "options", "--no-stored")
    assert {*rows} - {*again} == {name for name in rows if "stored" in name}
    assert not any("apart" in row for row in again.values())
    assert len(records.read(tmp_path / "cpu.json")["jobs"]) == 2


def test_a_mesh_is_compared_with_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(tmp_path, "mesh")
    compared = {name: row for name, row in rows.items() if "apart" in row}
    assert {name.partition(":")[0] for name in compared} == {"vocabulary", "sequence", "tokens", "both"}
    assert len(compared) == 4 * 4
    assert all(row["apart"] < 2e-5 and row["ratio_to_one"] > 0 for row in compared.values())
    assert bench.main(["mesh", "--shape", "24,16,601", "--rounds", "1", "--out", str(tmp_path / "odd.json")]) == 1
    monkeypatch.setattr("jax.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        bench.main(["mesh"])


def test_kernels_of_other_generations_need_a_gpu(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "pipelines")
    assert {name for name in rows if "left_out" not in rows[name] and name.startswith("xla")} == {
        "xla", "xla, + backward", "xla, full cache, + backward", "xla, two heads", "xla, two heads, + backward",
    }  # fmt: skip
    left_out = [row["left_out"] for name, row in rows.items() if name.startswith(tuple(programs.KERNELS))]
    assert len(left_out) == 15
    assert all("needs an NVIDIA GPU" in why for why in left_out)


def test_a_program_that_fails_while_it_is_timed_has_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails_in_its_second_timing(function: Any, *operands: Any) -> measure.Run:
        compiled, calls = measure.compile_jax(function, *operands), itertools.count(1)

        def launch() -> Any:
            if next(calls) == 3:  # after the comparison and the first timing
                raise RuntimeError("RESOURCE_EXHAUSTED: two results")
            return compiled.launch()

        return compiled._replace(launch=launch)

    drawn, made = programs.PARTS["precision"]

    def failing() -> dict[str, programs.Program]:
        made_programs = made()
        product = dataclasses.replace(made_programs[programs.PRODUCT], compile=fails_in_its_second_timing)
        return made_programs | {programs.PRODUCT: product}

    monkeypatch.setitem(programs.PARTS, "precision", (drawn, failing))
    rows = rows_of(tmp_path, "precision")
    assert rows[programs.PRODUCT]["left_out"] == "RuntimeError: RESOURCE_EXHAUSTED: two results"
    ours = rows["linear_logprobs, highest"]
    assert ours["median_seconds"] > 0
    assert ours["ratio_to_gemm"] is None
    assert "– products" in capsys.readouterr().out


def test_a_program_of_this_package_that_fails_is_a_failure() -> None:
    def run_out_of_memory(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

    right = programs.Program(lambda hidden, weight: hidden @ weight.T)
    operands, fails = (jnp.ones((4, 8)), jnp.ones((16, 8))), programs.Program(run_out_of_memory, "stored")
    assert programs.time_programs(
        {"product": right, "linear_x": right, "stored": fails}, operands, (4, 8, 16), 1
    ).healthy
    assert not programs.time_programs({"product": right, "linear_x": fails}, operands, (4, 8, 16), 1).healthy


def test_float32_by_precision(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "precision")
    for way in ("linear_logprobs", "stored logits"):
        for end in ("", ", + backward"):
            assert "not supported" in rows[f"{way}, TF32_TF32_F32{end}"]["left_out"]  # on a CPU
    assert rows["linear_logprobs, highest, + backward"]["apart"] < 2e-5
    assert rows["linear_logprobs, highest"]["median_seconds"] > 0
    printed = capsys.readouterr().out
    for name in ("linear_logprobs", "stored logits"):
        assert re.search(rf"^{name}, TF32_TF32_F32 +not timed: .*not supported", printed, re.MULTILINE)
