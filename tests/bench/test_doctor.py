"""The doctor of `benchmarks`, on the CPU: what it says of programs that are right, wrong, unsteady or never done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import lce_jax
from benchmarks import __main__ as bench
from benchmarks import doctor, programs, records
from lce_jax._types import Device
from lce_jax.mosaic import _pallas, mma
from tests.devices import A100, H200


@pytest.mark.site
def test_one_command_writes_into_one_file(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    assert bench.main(["doctor", "--only", "[H, V]", "--rounds", "1", "--out", str(out)]) == 0
    (right,) = (job["rows"][0] for job in records.jobs(records.read(out), "doctor"))
    assert (right["implementation"], right["run"]["device"]["platform"]) == ("xla", "cpu")
    assert "this is cpu" in right["refused"]["mosaic_gpu"]
    assert set(right["seconds"]) == set(right["bytes"]) == {"forward", "both"}
    assert set(right["errors"]) == {"logprobs", "entropy", "lse", "dhidden", "dweight"}
    assert "same bits; forward" in doctor.line(right)


def test_what_an_owner_of_a_card_is_told() -> None:
    assert doctor.served_by(Device("cpu")) == "cpu has no kernels: xla runs"
    assert doctor.served_by(H200) == "NVIDIA H200: the kernels for compute capability 9.0"
    told = doctor.served_by(A100)
    assert told.startswith(f"{A100.kind}: the kernels for compute capability 8.0, whose source ran on an H100 and")
    assert "send the file that is written" in told


@pytest.mark.parametrize(("device", "lowered"), [(H200, (8, 9)), (Device("gpu", "NVIDIA A10", "8.6", 72), None)])
def test_kernels_are_lowered_for_a_card_of_their_own(
    device: Device, lowered: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, where another runs them, for the generation's first."""
    monkeypatch.setattr(programs, "current_device", lambda: device)
    with programs.with_kernels_of(mma.SM89):
        assert _pallas._lowered_for.get() == lowered


@pytest.mark.slow
@pytest.mark.parametrize("name", doctor.CHECKS)
def test_plain_jax_passes_every_check(name: str) -> None:
    assert "failed" not in doctor.examine(name, 1)


@pytest.mark.slow
def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lce_jax.linear_logprobs

    def wrong(*operands: Any, **options: Any) -> Any:
        out = right(*operands, **options)
        return out._replace(lse=out.lse + 1e-3)

    monkeypatch.setattr(lce_jax, "linear_logprobs", wrong)
    assert doctor.examine("plain", 1)["failed"].startswith("wrong result: lse is off by 0.0001")


@pytest.mark.slow
def test_other_bits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = itertools.count()
    compile_jax = doctor.compile_jax

    def unsteady(function: Any, *operands: Any) -> Any:
        run = compile_jax(function, *operands)
        return run._replace(wait=lambda out: {name: x + 1e-7 * (next(runs) > 5) for name, x in run.wait(out).items()})

    monkeypatch.setattr(doctor, "compile_jax", unsteady)
    assert doctor.examine("plain", 1)["failed"] == "other bits in another run: forward, both"


@pytest.mark.slow
def test_what_never_answers_or_ends_badly_fails_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = doctor._measure("no such check", 1)
    assert not none.healthy
    assert "KeyError: 'no such check'" in none.rows["no such check"]["failed"]
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    late = doctor._measure("plain", 1)
    assert not late.healthy
    assert late.rows == {"plain": {"check": "plain", "failed": "no answer within 0.01 s"}}
    assert "plain: FAILED: no answer within 0.01 s" in capsys.readouterr().out
