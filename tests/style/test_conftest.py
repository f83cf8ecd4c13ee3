"""The directory of a run's compiled programs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import conftest


def test_killed_runs_leave_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive, lock = conftest.new_directory()
    killed = tmp_path / "lce-jax-programs-killed"
    killed.mkdir()
    (killed / "lock").touch()  # which nobody holds
    (killed / "program").touch()
    next_run, its_lock = conftest.new_directory()
    assert {str(path) for path in tmp_path.iterdir()} == {alive, next_run}
    os.close(lock)
    os.close(its_lock)
