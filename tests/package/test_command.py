"""``lce-jax`` and the commands of a checkout name what is missing."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
        (["train"], 2, "unknown command train; known: explain\n"),
        (["explan"], 2, "unknown command explan (did you mean explain?); known: explain\n"),
        (["benhc"], 2, "unknown command benhc; known: explain\n"),  # which is not installed with the package
        (["explain", "--tokens", "8k"], 2, "lce-jax explain: error: argument --tokens: '8k' is not a whole number"),
        (["--version"], 0, f"lce-jax {lce_jax.__version__}"),
        (["--help"], 0, "lce-jax COMMAND --help has the options of each"),
        (["bench"], 2, "in a checkout of the repository, run make bench or python -m benchmarks"),
        (["doctor"], 2, "in a checkout of the repository, run python -m benchmarks doctor"),
        (["demo", "--steps", "5"], 2, "in a checkout of the repository, run make demo or python -m examples.demo"),
    ],
)
def test_what_it_prints(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == status
    assert message in "".join(capsys.readouterr())


def test_a_pipe_that_closes_is_no_error() -> None:
    arguments = ["explain", "--hidden", "64", "--vocab", "1000", "--tokens", "32", "--device", "cpu"]
    command = subprocess.Popen(
        [sys.executable, "-m", "lce_jax", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.wait(120) == 1
    assert command.stderr is not None
    with command.stderr as errors:
        assert "Error" not in errors.read()


@pytest.mark.parametrize("name", [name for name, commands in command.CHECKOUT_COMMANDS.items() if len(commands) > 1])
def test_the_commands_of_a_checkout_are_what_make_runs(name: str) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    made, module = command.CHECKOUT_COMMANDS[name]
    assert made == f"make {name}"
    module = module.removeprefix("python -m ")
    line = rf"{name}: \$\(VENV\)/\.ready\S*\n\t\$\(RUN\) -m {re.escape(module)} \$\({name.upper()}_ARGS\)"
    assert re.search(rf"^{line}$", makefile, re.MULTILINE)


def commands_of(target: str, venv: Path, *, python: str = sys.executable) -> str:
    """Returns what make would run for a target whose environment does not exist yet."""
    make = ["make", "--dry-run", f"VENV={venv}", f"PYTHON={python}", target]
    return subprocess.run(make, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_demo_installs_what_it_needs_and_the_tests_add_to_it(tmp_path: Path) -> None:
    installed = re.compile(r"--editable '\.\[([a-z]+)")
    assert installed.findall(commands_of("demo", tmp_path)) == ["demo"]
    assert installed.findall(commands_of("test", tmp_path)) == ["demo", "test"]
    assert installed.findall(commands_of("docs", tmp_path)) == ["demo", "test", "docs"]
    assert commands_of("test", tmp_path).count("-m venv") == 1
    for stamp in (".ready-demo", ".ready"):
        (tmp_path / stamp).touch()
    assert installed.findall(commands_of("demo", tmp_path)) == installed.findall(commands_of("test", tmp_path)) == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_older_python_is_refused_by_name(target: str, tmp_path: Path) -> None:
    old = tmp_path / "python3.11"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.11.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    make = ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", target]
    done = subprocess.run(make, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        f"lce-jax needs Python 3.12 or newer; '{old}' is Python 3.11.2. Name another one: make PYTHON=" in done.stderr
    )
    assert not (tmp_path / "venv").exists()


TINY = {"bench": ("step", "--batch", "1"), "demo": ("--steps", "1")}


@pytest.mark.parametrize(("name", "missing"), [("bench", "optax"), ("demo", "rich")])
def test_a_missing_extra_is_named(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = command.CHECKOUT_COMMANDS[name][-1].split()[-1]
    for module in [module for module in sys.modules if module.startswith((f"{folder}.", missing))]:
        monkeypatch.delitem(sys.modules, module)
        package, _, attribute = module.rpartition(".")
        if package == folder:
            monkeypatch.delattr(importlib.import_module(package), attribute, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    try:
        status: object = importlib.import_module(f"{folder}.__main__").main(list(TINY[name]))
    except SystemExit as stop:
        status = stop.code
    printed = f"{status} {capsys.readouterr().err}"
    assert missing in printed
    assert f"pip install --editable '.[{name}]'" in printed
