"""The bench's doctor on a CPU: what it reports of programs that are right, wrong, unsteady, or never end."""

from __future__ import annotations

import argparse
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

import lce_jax
from benchmarks import __main__ as bench
from benchmarks import doctor, programs, records
from lce_jax.call import _remembered
from lce_jax.mosaic import _pallas, mma
from lce_jax.types._types import Device
from tests.devices import A100, H200


def test_it_says_what_first_calls_have_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_remembered.VARIABLE, str(tmp_path))
    monkeypatch.setattr(_remembered, "find_driver", lambda: "580.95.05, CUDA 13.0")
    monkeypatch.setattr(doctor, "current_device", lambda: A100)
    comparison = _remembered.find_comparison(A100, 1)
    assert comparison is not None
    comparison.write("JAX")
    options = argparse.Namespace(only=None, rounds=1)
    doctor.jobs(options, argparse.ArgumentParser())
    assert f"{A100.kind}, one head: compared by JAX on" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "current_device", lambda: H200)
    doctor.jobs(options, argparse.ArgumentParser())
    assert str(tmp_path) not in capsys.readouterr().out  # the kernels have run on this card


@pytest.mark.site
def test_one_command_writes_into_one_file_and_ends_with_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    out = tmp_path / "cpu.json"
    assert bench.main(["doctor", "--only", "[H, V]", "--rounds", "1", "--out", str(out)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(
        "verdict: cpu works: 1 of 1 checks are right, 1 by xla. Nothing to do: a kernel needs an NVIDIA"
    )
    (right,) = (job["rows"][0] for job in records.jobs(records.read(out), "doctor"))
    assert (right["implementation"], right["run"]["device"]["platform"]) == ("xla", "cpu")
    assert "this is cpu" in right["refused"]["mosaic_gpu"]
    assert set(right["seconds"]) == set(right["bytes"]) == {"forward", "both"}
    assert set(right["errors"]) == {"logprobs", "entropy", "lse", "dhidden", "dweight"}
    assert "same bits; forward" in doctor.line(right)


def test_what_an_owner_of_a_card_is_told() -> None:
    assert doctor.describe_kernels(Device("cpu")) == "cpu has no kernels: xla runs"
    assert doctor.describe_kernels(H200) == "NVIDIA H200: the kernels for compute capability 9.0"
    words = doctor.describe_kernels(A100)
    assert words.startswith(f"{A100.kind}: the kernels for compute capability 8.0, whose source ran on an H100 and")
    assert "send the written file" in words


RIGHT, WRONG = {"implementation": "mosaic_gpu"}, {"implementation": "mosaic_gpu", "failed": "wrong result"}
BY_XLA, LATE = {"implementation": "xla"}, {"failed": "no answer within 600 s"}
B200 = Device("gpu", "NVIDIA B200", "10.0", 148)


@pytest.mark.parametrize(
    ("device", "rows", "words"),
    [
        (
            H200,
            {"plain": RIGHT, "[H, V]": RIGHT},
            "NVIDIA H200 works: 2 of 2 checks are right, 2 by mosaic_gpu. Nothing",
        ),
        (H200, {"plain": RIGHT, "[H, V]": BY_XLA}, "1 by mosaic_gpu, 1 by xla. Nothing to do."),
        (B200, {"plain": BY_XLA}, "1 by xla. Nothing to do: a kernel needs compute capability"),
        (
            H200,
            {"plain": RIGHT, "[H, V]": WRONG},
            "1 of 2 checks FAILED: '[H, V]'. Pass implementation=\"xla\" to every call",
        ),
        (H200, {"plain": LATE}, "1 of 1 checks FAILED: 'plain'. Pass implementation=\"xla\" to every call"),
        (
            Device("cpu"),
            {"plain": BY_XLA | {"failed": "wrong result"}},
            "Do not train on this machine, and send the written file",
        ),
    ],
)
def test_the_verdict_says_what_runs_and_what_to_do(device: Device, rows: dict[str, Any], words: str) -> None:
    assert words in doctor.summary(rows, device)


def test_the_verdict_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX does not see the GPU, or it is older than the kernels need."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    unseen = doctor.summary({"plain": BY_XLA}, Device("cpu"))
    assert "JAX does not see a GPU: in the checkout, pip install" in unseen
    monkeypatch.setattr(jax, "__version__", "0.10.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 0))
    old = doctor.summary({"plain": BY_XLA}, H200)
    assert "The kernels need JAX 0.11.2 or newer, this is 0.10.0: in the checkout, pip install" in old
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for verdict in (unseen, old):
        (extra,) = re.findall(r"pip install --editable '\.\[(\w+)\]'", verdict)
        assert any("0.11.2" in package for package in extras[extra])


@pytest.mark.parametrize(("device", "lowered"), [(H200, (8, 9)), (Device("gpu", "NVIDIA A10", "8.6", 72), None)])
def test_kernels_are_lowered_for_a_card_of_their_own(
    device: Device, lowered: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of another generation lowers them for the first capability of theirs."""
    monkeypatch.setattr(programs, "current_device", lambda: device)
    with programs.use_kernels(mma.SM89):
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
