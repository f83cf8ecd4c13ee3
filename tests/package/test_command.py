"""``lce-jax``: it finds its commands, and says what is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import lce_jax
from lce_jax import __main__ as command


def test_a_command_is_run_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["explain", "--hidden", "64", "--vocab", "1000", "--tokens", "32", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("H 64, V 1,000; bfloat16 on cpu, implementation xla")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "the following arguments are required: COMMAND"),
        (["train"], 2, "invalid choice: 'train'"),
        (["explain", "--tokens", "8k"], 2, "lce-jax explain: error: argument --tokens: '8k' is no whole number"),
        (["--version"], 0, f"lce-jax {lce_jax.__version__}"),
        (["--help"], 0, "lce-jax COMMAND --help has the options of each"),
        (["bench", "--help"], 0, "usage: lce-jax bench"),
    ],
)
def test_what_it_says(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == status
    assert message in "".join(capsys.readouterr())


def test_a_pipe_that_closes_is_no_error() -> None:
    told = ["explain", "--hidden", "64", "--vocab", "1000", "--tokens", "32", "--device", "cpu"]
    command = subprocess.Popen(
        [sys.executable, "-m", "lce_jax", *told], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.wait(120) == 1
    assert command.stderr is not None
    with command.stderr as said:
        assert "Error" not in said.read()


TINY = {"bench": ("--shape", "16,32,520", "--rounds", "1"), "demo": ("--steps", "1")}


@pytest.mark.parametrize(("name", "missing"), [("bench", "rich"), ("demo", "optax")])
def test_a_missing_extra_is_named(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"lce_jax.{name}."
    for module in [module for module in sys.modules if module.startswith((own, missing))]:
        monkeypatch.delitem(sys.modules, module)
        package, _, attribute = module.rpartition(".")
        if package == f"lce_jax.{name}":
            monkeypatch.delattr(importlib.import_module(package), attribute, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    try:
        status: object = command.main([name, *TINY[name]])
    except SystemExit as stop:
        status = stop.code
    said = f"{status} {capsys.readouterr().err}"
    assert missing in said
    assert f"pip install 'lce-jax[{name}]'" in said
