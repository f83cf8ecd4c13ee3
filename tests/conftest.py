"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

import jax
import pytest

from benchmarks import measure
from lce_jax.call import _dispatch
from lce_jax.mosaic._generations import JAX_OF_THE_KERNELS
from tests.devices import H200

if jax.__version_info__ >= JAX_OF_THE_KERNELS:  # an older JAX has no interpreter of the kernels' language
    from tests import mosaic_interpreter

    mosaic_interpreter.prepare()


@pytest.fixture
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench calls each program a few times, not for a quarter of a second."""
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.005)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and plans calls as on an H200."""
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: H200)
