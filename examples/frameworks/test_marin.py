"""Marin's Levanter trains with ``examples/marin_head.py`` as with its own loss: make test-frameworks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.site
pytest.importorskip("levanter", reason="needs marin-levanter: make test-frameworks")
ROOT = Path(__file__).parents[2]


def test_five_steps_equal_those_with_its_own_loss() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    done = subprocess.run(
        [sys.executable, "-m", "examples.frameworks.marin_worker"],
        capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for run in json.loads(done.stdout.splitlines()[-1]):
        assert run["calls"] == 1  # the step is traced once
        assert run["got"] == pytest.approx(run["want"], rel=1e-6)
        assert run["got"][-1] < run["got"][0]
