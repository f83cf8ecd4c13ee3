"""The interpreter finds the same as JAX has it and as the tests have it: results, races, and what nobody wrote."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lce_jax.mosaic._pallas import interpreting, kernel, pl, plgpu
from tests import mosaic_evaluate
from tests.mosaic_interpreter import (
    afresh,
    as_a_program,
    compiled,
    interpret,
    interpret_pallas_call,
    jax_callback,
    thread_map,
    with_jax_arrays,
    with_numpy_arrays,
)

SHAPE = (128, 16)


def body(waits: bool, x: Any, out: Any, tile: Any, loaded: Any, doubled: Any) -> None:
    """One thread doubles the first half of a tile, the other one returns the tile, after that or at any time."""
    thread = lax.axis_index("thread")

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


@pytest.mark.parametrize("arrays", [with_numpy_arrays, with_jax_arrays], ids=["NumPy", "JAX"])
@pytest.mark.parametrize("threads", [mosaic_evaluate.run_thread, compiled], ids=["evaluated", "compiled"])
@pytest.mark.parametrize("whole", [interpret, as_a_program], ids=["in one callback", "in a program"])
def test_the_same_is_found(arrays: Any, threads: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (jax_callback.io_callback_impl, thread_map._run_jaxpr) == (with_numpy_arrays, mosaic_evaluate.run_thread)
    monkeypatch.setattr(jax_callback, "io_callback_impl", arrays)
    monkeypatch.setattr(thread_map, "_run_jaxpr", threads)
    monkeypatch.setattr(interpret_pallas_call, "interpret_pallas_call", whole)
    afresh()
    out = run(waits=True)
    assert np.array_equal(out[:64].ravel(), 2.0 * np.arange(64 * SHAPE[1]))
    assert np.isnan(out[64:]).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED\s+(write|read) of .*body") as raised:
        run(waits=False)
    assert "test_interpreter" in str(raised.value).split("RACE DETECTED")[1]
    afresh()


def test_every_operation_is_as_xla_has_it() -> None:
    """Those of one integer are NumPy's: quotients go towards zero, sums wrap."""

    def operations(x: Any, y: Any, z: Any) -> Any:
        quotients = lax.div(x, y), lax.rem(x, y), x // y, x % y
        wrapped = x * jnp.int32(2**30), -x, x - jnp.int32(-(2**31)), jnp.maximum(x, y), jnp.minimum(x, y)
        logic = ~(x < y) & (x != y) | (x >= 3) ^ (x == -7), ~x & y | x, lax.select_n(x > 0, x, y), x <= y, x > y
        chosen = (
            lax.cond(x.sum() > 0, lambda: x, lambda: y),
            lax.switch(y[0] % 5, [lambda: x, lambda: y, lambda: x + y]),
        )
        steps = lax.scan(lambda c, row: (c + row, c * row), x, z, reverse=True)
        looped = lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1] * 0.5 + x[0]), (jnp.int32(0), 3.0))
        of = jax.jit(lambda z: z[1:, ::2].reshape(-1, 1) + z.astype(jnp.float32).sum())(z)
        return (
            quotients,
            wrapped,
            logic,
            chosen,
            steps,
            looped,
            of,
            jnp.broadcast_to(y[:, None], (4, 3)),
            x.astype(bool),
        )

    operands = jnp.array([7, -7, 5, -(2**31)]), jnp.array([-2, 3, 5, 7]), jnp.arange(12).reshape(3, 4)
    traced = jax.make_jaxpr(operations)(*operands)
    found = mosaic_evaluate.evaluate(traced.jaxpr, traced.consts, [np.asarray(x) for x in operands])
    for got, want in zip(found, jax.tree.leaves(jax.jit(operations)(*operands)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)
