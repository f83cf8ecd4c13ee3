"""Fixtures of the bench's tests."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from benchmarks import peers, problem

TINY = (24, 32, 520)


@pytest.fixture(scope="package")
def tiny() -> problem.Problem:
    """A problem of few tokens in float32."""
    return problem.random_problem(TINY, jnp.dtype("float32"))


@pytest.fixture
def torch_on_cpu(monkeypatch: pytest.MonkeyPatch):
    """PyTorch, whose rows are timed on the CPU too."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "_torch", lambda: torch)
    return torch
