"""Tests that compile for GPUs which the machine need not have: `make test-compile`."""

import importlib.util

import pytest

needs_wheels = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="make test-compile brings the wheels"
)
