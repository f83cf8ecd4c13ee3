"""First calls that are remembered: what is read, what is not, and that no file makes a call fail."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import explain
from lce_jax.call import _dispatch, _first_call, _remembered
from lce_jax.explain import __main__ as command
from lce_jax.mosaic import _generations
from lce_jax.run import kernels
from tests.call.remember_worker import COUNT, DRIVER
from tests.devices import A100, H200

VARIABLE = _remembered.VARIABLE
HOLDS, FAULT = {"logprobs": 0.0}, {"logprobs": 1.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files of this test, on a machine with a driver."""
    monkeypatch.setattr(_remembered, "find_driver", lambda: DRIVER)
    monkeypatch.setattr(_remembered, "describe_software", dict(sources="1", jax="0.12.0").copy)
    monkeypatch.setattr(_remembered, "WAIT_SECONDS", 0.2)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    begin_process(monkeypatch)
    return tmp_path / "cache"


def begin_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what a process forgets when it ends."""
    monkeypatch.setattr(_generations, "FAULTS", {})
    monkeypatch.setattr(_first_call, "_recalled", {})


def compares(monkeypatch: pytest.MonkeyPatch, errors: Any = HOLDS, device: Any = A100, heads: int = 1) -> bool:
    """Whether a new process's first call compares. It must serve the call, or refuse it, by what is known."""
    begin_process(monkeypatch)
    asked = []
    reason = _first_call.check_once(device, lambda: asked.append(1) or errors, heads)
    assert (reason is None) == (not asked or errors is HOLDS)
    return bool(asked)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_later_processes_read_what_one_has_compared(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert compares(monkeypatch)
    assert not compares(monkeypatch)
    assert not compares(monkeypatch, FAULT)
    (file,) = files(folder)
    record = json.loads(file.read_text())
    assert (record["compared_by"], record["key"]["driver"]) == ("JAX", DRIVER)
    assert [path.suffix for path in sorted(folder.iterdir())] == [".json", ".lock"]  # no temporary file


def test_jax_and_pytorch_share_what_holds(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert kernels.check_once(A100, lambda: HOLDS, compared_by="PyTorch") is None
    assert not compares(monkeypatch)
    assert json.loads(files(folder)[0].read_text())["compared_by"] == "PyTorch"


def test_a_fault_is_not_remembered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def raising() -> dict[str, float]:
        raise RuntimeError("no such instruction")

    assert compares(monkeypatch, FAULT)
    begin_process(monkeypatch)
    assert "no such instruction" in str(_first_call.check_once(A100, raising))
    assert not files(folder)
    assert compares(monkeypatch)


def other_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remembered, "find_driver", lambda: "590.1, CUDA 13.1")


def other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remembered, "describe_software", dict(sources="2", jax="0.12.0").copy)


@pytest.mark.parametrize("change", [other_driver, other_software])
def test_another_version_compares_again(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compares(monkeypatch)
    with monkeypatch.context() as patch:
        change(patch)
        assert compares(patch)
        assert not compares(patch)
    assert not compares(monkeypatch)  # both are remembered


def test_another_card_and_two_heads_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (A100, A100._replace(core_count=42), A100._replace(kind="NVIDIA L40S", compute_capability="8.9")):
        for heads in (1, 2):
            assert compares(monkeypatch, HOLDS, device, heads)
            assert not compares(monkeypatch, HOLDS, device, heads)
    assert not compares(monkeypatch, HOLDS, H200)  # which has run its kernels


@pytest.mark.usefixtures("folder")
def test_an_edited_source_and_another_jax_are_other_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    package = tmp_path / "lce_jax"
    (package / "call").mkdir(parents=True)
    (package / "kernel.py").write_text("a = 1\n")
    monkeypatch.setattr(_remembered, "__file__", str(package / "call" / "_remembered.py"))

    def describe() -> Any:
        _remembered.describe_software.cache_clear()
        return _remembered.describe_software()

    try:
        assert describe() is None  # the file is newer than the import
        monkeypatch.setattr(_remembered, "IMPORTED", time.time() + 60)
        before = describe()
        assert before["jax"] == _remembered.find_version("jax")
        assert describe() == before
        (package / "kernel.py").write_text("a = 2\n")
        assert describe()["sources"] != before["sources"]
        (package / "kernel.py").rename(package / "moved.py")
        assert describe()["sources"] != before["sources"]
        with monkeypatch.context() as patch:
            patch.setattr(_remembered, "find_version", lambda name: f"{name} 2")
            assert describe()["jaxlib"] == "jaxlib 2"
        (package / "moved.py").unlink()
        assert describe() is None
    finally:
        _remembered.describe_software.cache_clear()


def open_library() -> Any:
    """CUDA's library, or NVML's."""

    def tell_driver(number: Any) -> int:
        number._obj.value = 13000
        return 0

    def tell_module(text: Any, _: int) -> int:
        text.value = b"570.1"
        return 0

    names = {"cuDriverGetVersion": tell_driver, "nvmlInit_v2": lambda: 0, "nvmlSystemGetDriverVersion": tell_module}
    return types.SimpleNamespace(**names)


def test_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module = tmp_path / "version"
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    libraries = {"libcuda.so.1": open_library, "libnvidia-ml.so.1": open_library}

    def find(*paths: Path) -> str | None:
        with monkeypatch.context() as patch:
            patch.setattr(_remembered, "MODULE_VERSIONS", paths)
            patch.setattr(_remembered.ctypes, "CDLL", lambda name: libraries.get(name, raise_os_error)())
            return _remembered.find_driver.__wrapped__()

    assert find(tmp_path / "none", module) == "580.95.05, CUDA 13.0"
    assert find() == "570.1, CUDA 13.0"
    del libraries["libnvidia-ml.so.1"]
    assert find() is None
    del libraries["libcuda.so.1"]
    assert find(module) is None


def test_generations_of_sweeps_and_tests_are_not_remembered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    generation = _generations.serving(A100)
    assert generation is not None
    with _generations.using(dataclasses.replace(generation)):
        assert compares(monkeypatch)
        assert compares(monkeypatch)
    assert not files(folder)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def edit_key(path: Path) -> None:
    path.write_text(path.read_text().replace(DRIVER, "590.1, CUDA 13.1"))


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "no text": lambda path: path.write_bytes(b"\xff\x00\xfe"),
    "no object": lambda path: path.write_text("[1]"),
    "no fields": lambda path: path.write_text("{}"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "of other types": lambda path: path.write_text('{"key": [{}], "compared_by": 1, "at": null}'),
    "another key": edit_key,
    "a folder": become_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_none(
    damage: str, monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compares(monkeypatch)
    (file,) = files(folder)
    DAMAGES[damage](file)
    assert "no comparisons" in print_remembered(capsys)
    assert compares(monkeypatch)
    assert compares(monkeypatch) == (damage == "a folder")  # which no file replaces


@pytest.mark.parametrize("value", ["0", "", " 0 "])
def test_the_variable_turns_it_off(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert compares(monkeypatch)
    assert compares(monkeypatch)
    assert not folder.exists()


def test_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(VARIABLE, "~/lce")
    assert _remembered.find_folder() == tmp_path / "home" / "lce"
    monkeypatch.delenv(VARIABLE)
    assert _remembered.find_folder() == tmp_path / "xdg" / "lce_jax"
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert _remembered.find_folder() == tmp_path / "home" / ".cache" / "lce_jax"
    assert compares(monkeypatch)
    assert not compares(monkeypatch)
    assert files(tmp_path / "home" / ".cache" / "lce_jax")


def raise_runtime_error(*_: Any) -> Any:
    raise RuntimeError("Could not determine home directory.")


def raise_os_error(*_: Any, **__: Any) -> Any:
    raise OSError("Read-only file system")


def lose_home(patch: pytest.MonkeyPatch) -> None:
    patch.delenv(VARIABLE)
    patch.delenv("XDG_CACHE_HOME", raising=False)
    patch.setattr(Path, "home", raise_runtime_error)


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "replace", raise_os_error)


def lose_driver(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_remembered, "find_driver", lambda: None)


def lose_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_remembered, "describe_software", lambda: None)


def mount_read_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "mkdir", raise_os_error)
    patch.setattr(_remembered.tempfile, "mkstemp", raise_os_error)


@pytest.mark.parametrize("change", [lose_home, fill_disk, lose_driver, lose_sources, mount_read_only])
def test_what_cannot_be_remembered_is_compared(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    change(monkeypatch)
    assert compares(monkeypatch)
    assert compares(monkeypatch)
    assert not [path for path in folder.glob("*") if path.suffix != ".lock"]


def test_a_home_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root may write everywhere")
    assert compares(monkeypatch)
    assert compares(monkeypatch)
    folder.chmod(0o700)
    assert compares(monkeypatch)
    folder.chmod(0o500)
    assert not compares(monkeypatch)  # which may be read


def test_a_file_in_place_of_the_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.write_text("")
    assert compares(monkeypatch)
    assert compares(monkeypatch)


def refuse_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_remembered.fcntl, "flock", raise_os_error)


def lack_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_remembered, "fcntl", None)


@pytest.mark.parametrize("change", [refuse_locks, lack_locks])
def test_files_that_cannot_be_locked(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert compares(monkeypatch)
    assert not compares(monkeypatch)


def test_a_process_that_hangs_does_not_hold_others(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = _remembered.find_comparison(A100, 1)
    assert comparison is not None
    with comparison.lock():
        assert compares(monkeypatch)
    assert not compares(monkeypatch)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of eight processes at once."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, "-m", "tests.call.remember_worker", str(folder)], check=True, timeout=300)
    return folder


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_eight_processes_compare_once(ranks: Path) -> None:
    assert read_lines(ranks / "holds" / "ended") == ["holds"] * COUNT
    assert len(read_lines(ranks / "holds" / "compared")) == 1
    assert len(files(ranks / "holds")) == 1


def test_each_of_eight_processes_finds_a_fault(ranks: Path) -> None:
    ended = read_lines(ranks / "is off" / "ended")
    assert len(ended) == COUNT
    assert all("is off by logprobs" in line for line in ended)
    assert len(read_lines(ranks / "is off" / "compared")) == COUNT
    assert not files(ranks / "is off")


def test_others_compare_when_the_first_dies(ranks: Path) -> None:
    assert read_lines(ranks / "dies" / "ended") == ["holds"] * (COUNT - 1)
    assert len(read_lines(ranks / "dies" / "compared")) > 1
    assert len(files(ranks / "dies")) == 1


def print_remembered(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command.main(["--remembered"])
    assert not stop.value.code
    return capsys.readouterr().out


def test_the_command_shows_it_and_how_to_forget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "with a space"
    monkeypatch.setenv(VARIABLE, str(folder))
    assert "no comparisons" in print_remembered(capsys)
    for heads in (1, 2):
        compares(monkeypatch, heads=heads)
    with monkeypatch.context() as patch:
        other_driver(patch)
        compares(patch)
    text = print_remembered(capsys)
    assert f"in {folder}: 3 comparisons" in text
    assert text.count(A100.kind) == 3
    assert text.count("two heads") == 1
    assert text.count("; read here") == 2
    assert text.count("; not read here") == 1
    advice = re.search("^To forget: (.*)$", text, re.MULTILINE)
    assert advice is not None
    subprocess.run(["sh", "-c", advice[1]], check=True)
    assert "no comparisons" in print_remembered(capsys)
    assert compares(monkeypatch)
    monkeypatch.setenv(VARIABLE, "0")
    assert f"not remembered: {VARIABLE}" in print_remembered(capsys)


def test_explain_says_who_has_compared(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    call = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16), jnp.arange(8)
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: A100)
    monkeypatch.setattr(_first_call, "list_devices", lambda _: jax.local_devices())
    monkeypatch.setattr(_first_call, "_compare", lambda *_: HOLDS)
    assert explain(*call).notes[-1].endswith("this process compares a small call with xla")
    begin_process(monkeypatch)
    (file,) = files(folder)
    at = json.loads(file.read_text())["at"]
    assert explain(*call).notes[-1].endswith(f"JAX compared a small call on {at} ({file})")
