"""The interpreter finds the same with NumPy's arrays as with JAX's: results, what nobody wrote, and races."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax.mosaic._pallas import interpreting, kernel, pl, plgpu
from tests.mosaic_interpreter import afresh, jax_callback, with_jax_arrays, with_numpy_arrays

SHAPE = (128, 16)


def body(waits: bool, x: Any, out: Any, tile: Any, loaded: Any, doubled: Any) -> None:
    """One thread doubles the first half of a tile, the other one returns the tile, after that or at any time."""
    thread = jax.lax.axis_index("thread")

    @pl.when(thread == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(x, tile.at[:64], loaded)
        plgpu.barrier_wait(loaded)
        tile[:64] = tile[:64] * 2
        plgpu.barrier_arrive(doubled)

    @pl.when(thread == 1)
    def _() -> None:
        if waits:
            plgpu.barrier_wait(doubled)
        out[...] = tile[...]


def run(waits: bool) -> np.ndarray:
    scratch = {"tile": plgpu.SMEM(SHAPE, jnp.float32), "loaded": plgpu.Barrier(), "doubled": plgpu.Barrier()}
    x = jnp.arange(64.0 * SHAPE[1]).reshape(64, SHAPE[1])
    with interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        of = kernel(
            functools.partial(body, waits), out_type=[jax.ShapeDtypeStruct(SHAPE, jnp.float32)], scratch_types=scratch,
            num_threads=2, thread_name="thread", compiler_params=plgpu.CompilerParams(), kernel_name="planted",
        )  # fmt: skip
        return np.asarray(jax.jit(lambda x: of(x))(x)[0])


@pytest.mark.parametrize("arrays", [with_numpy_arrays, with_jax_arrays])
def test_the_same_is_found(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_callback.io_callback_impl is with_numpy_arrays  # in all tests
    monkeypatch.setattr(jax_callback, "io_callback_impl", arrays)
    afresh()
    out = run(waits=True)
    assert np.array_equal(out[:64].ravel(), 2.0 * np.arange(64 * SHAPE[1]))
    assert np.isnan(out[64:]).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED\s+(write|read) of .*body") as raised:
        run(waits=False)
    assert "test_interpreter" in str(raised.value).split("RACE DETECTED")[1]
    afresh()
