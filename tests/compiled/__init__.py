"""Tests that compile for GPUs which the machine need not have: `make test-compile`."""
