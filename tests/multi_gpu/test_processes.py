"""The same with the Hopper kernels: a process with two GPUs, and two with one each."""

from __future__ import annotations

import pathlib

import jax
import pytest

from tests.mesh.test_processes import check_two_equal_one

pytestmark = pytest.mark.multi_gpu


def test_two_processes_equal_one(tmp_path: pathlib.Path) -> None:
    if len(jax.devices()) < 2 or getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        pytest.skip("needs two Hopper GPUs")
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
    check_two_equal_one(
        tmp_path,
        {**shared, "CUDA_VISIBLE_DEVICES": "0,1"},
        [{**shared, "CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)],
    )
