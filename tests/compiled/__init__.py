"""Tests that compile for GPUs and TPUs which the machine need not have: `make test-compile`, `make test-tpu`."""

import importlib.util

import pytest

needs_wheels = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="make test-compile brings the wheels"
)
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="make test-tpu brings the wheel")
