"""Programs whose operands and results have only the rows that count, wherever these lie."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import launch
from lce_jax.launch import _source
from tests import launch_emulator

H200 = launch.Device("gpu", "NVIDIA H200", "9.0", 132)


@pytest.mark.skipif(launch_emulator.COMPILER is None, reason="no C++ compiler")
def test_rows_that_count(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Five of eight rows are there, apart from each other; nothing is read or written after them."""
    monkeypatch.setattr(_source, "THREADS", launch_emulator.THREADS)
    P, count = 8, 5

    def function(n: Any, pairs: Any, columns: Any, whole: Any) -> Any:
        live = jnp.arange(P) < n
        return jnp.where(live, pairs[:, 1] + whole, 0), columns * 2, jnp.where(live, columns[0], 0).sum(), whole + 1

    structs = [((), "int32"), ((P, 2), "int32"), ((2, P), "float32"), ((P,), "int32")]
    rows = launch.Rows(0, {1: 0, 2: 1}, {0: 0, 1: 1})
    program = launch.program(function, [jax.ShapeDtypeStruct(*x) for x in structs], H200, rows=rows)
    pairs, columns = np.arange(6 * count, dtype=np.int32).reshape(count, 3, 2), np.ones((2, 7), np.float32)
    columns[:, :count] = np.random.default_rng(0).normal(size=(2, count))
    whole = np.arange(P, dtype=np.int32)
    results = [np.full(2 * count + 1, -1, np.int32), np.full((2, 9), -1, np.float32)]
    results += [np.full((), -1, np.float32), np.full(P, -1, np.int32)]
    addresses = [x.ctypes.data for x in (pairs, columns, whole, *results)]
    strides = [0, 6, 7, 1, 0, 2, 9, 1]  # of pairs, columns and the first two results, each before the rows and of them
    run, workspace = launch_emulator.loaded(program, tmp_path), np.empty(program.workspace_bytes, np.uint8)
    run(0, workspace.ctypes.data, [count, *strides], [*addresses[3:], 0, *addresses[:3]])
    np.testing.assert_array_equal(results[0][: 2 * count : 2], pairs[:, 0, 1] + whole[:count])
    assert (np.delete(results[0], np.s_[: 2 * count : 2]) == -1).all()
    np.testing.assert_array_equal(results[1][:, :count], columns[:, :count] * 2)
    assert (results[1][:, count:] == -1).all()
    np.testing.assert_allclose(results[2], columns[0, :count].sum(), rtol=1e-6)
    np.testing.assert_array_equal(results[3], whole + 1)
