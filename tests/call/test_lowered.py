"""Lowered kernels that are remembered: what is read, what is lowered again, and that no file makes a call fail."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from lce_jax.call import _lowered, _remembered
from lce_jax.mosaic import _compiler, _generations
from lce_jax.mosaic._compiler import Kernel
from lce_jax.mosaic.sm90 import HOPPER
from lce_jax.run.kernels import scale
from lce_jax.types._types import Device
from tests.devices import A100, H200


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(_remembered.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(_remembered, "describe_software", dict(sources="1", jax="0.12.0").copy)
    return tmp_path / "cache"


def trace(size: int = 1 << 16, dtype: Any = jnp.bfloat16) -> Kernel:
    """Traces the kernel that multiplies dweight by the loss's cotangent."""
    arrays = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
    leaves, tree = jax.tree.flatten((*arrays, jnp.dtype(dtype), False))
    return _compiler.traced(scale, tree, tuple(leaves))


def lowers(kernel: Kernel, device: Device = H200) -> bool:
    """Whether a new process lowers ``kernel``. The module must be the right one in any case."""
    expected = _compiler.module(kernel, device)
    with mock.patch.object(_compiler, "module", return_value=expected) as lower:
        assert _lowered.recall_or_lower(_lowered.find_lowered_kernels(), kernel, device) == expected
    return lower.called


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_a_later_process_reads_what_one_has_lowered(folder: Path) -> None:
    kernel = trace()
    assert lowers(kernel)
    assert not lowers(kernel)
    assert len(files(folder)) == 1
    assert f"kernels remembered there: {len(files(folder))}" in "\n".join(_lowered.report())


def test_what_changes_a_module_has_a_file_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        "shape": lambda: lowers(trace(1 << 17)),
        "dtype": lambda: lowers(trace(dtype=jnp.float16)),
        "GPU": lambda: lowers(trace(), A100),
        "software": lambda: monkeypatch.setattr(_remembered, "describe_software", dict(sources="2").copy),
        "environment": lambda: monkeypatch.setenv("MOSAIC_GPU_LINE_INFO", "1"),
    }
    assert lowers(trace())
    for count, (name, change) in enumerate(changed.items(), start=2):
        assert change() or lowers(trace()), name
        assert len(files(folder)) == count, name
    with jax.debug_nans(True):
        assert lowers(trace())


def test_a_damaged_file_counts_as_none(folder: Path) -> None:
    kernel = trace()
    assert lowers(kernel)
    (file,) = files(folder)
    content = file.read_bytes()
    flipped = bytes([*content[:-9], content[-9] ^ 1, *content[-8:]])
    for damaged in (b"", b"text", content[: len(content) // 2], flipped):
        file.write_bytes(damaged)
        assert lowers(kernel)  # and writes it again
        assert not lowers(kernel)
    trace_of_another = trace(1 << 17)
    assert lowers(trace_of_another)
    other = next(path for path in files(folder) if path != file)
    other.write_bytes(file.read_bytes())  # whole, but another kernel's
    assert lowers(trace_of_another)


def test_a_folder_that_cannot_be_written_makes_no_call_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(_remembered, "describe_software", dict(sources="1").copy)
    for folder in (str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        monkeypatch.setenv(_remembered.VARIABLE, folder)
        assert lowers(trace())
    monkeypatch.setenv(_remembered.VARIABLE, "0")
    assert lowers(trace())
    assert not list(_lowered.report())


def test_sources_that_changed_after_their_import_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = _remembered.describe_software.__wrapped__
    assert describe() is not None
    monkeypatch.setattr(_remembered, "IMPORTED", 0.0)
    assert describe() is None


def test_a_kernel_whose_operands_have_no_complete_text_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = trace()
    _, tree, leaves = kernel.launch
    for operand, known in ((object(), False), (jnp.zeros(3), False), (HOPPER, True)):
        other = dataclasses.replace(kernel, launch=(scale, tree, (*leaves, operand)))
        assert (_lowered.describe_kernel(other, H200) is not None) == known
    monkeypatch.setattr(_generations, "RELEASED", ())  # so that HOPPER is one that a test made
    assert _lowered.describe_kernel(other, H200) is None


def test_files_that_nobody_reads_are_removed(folder: Path) -> None:
    kernel, unread = trace(), trace(1 << 17)
    assert lowers(kernel)
    assert lowers(unread)
    long_ago = time.time() - 100 * 24 * 3600
    for path in files(folder):
        os.utime(path, (long_ago, long_ago))
    assert not lowers(kernel)
    _lowered.remove_unread.cache_clear()  # a new process
    assert not lowers(kernel)
    assert lowers(unread)
