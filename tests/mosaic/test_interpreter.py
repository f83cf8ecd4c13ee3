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
    races_found,
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


STEPS, STAGES, DEPTH = 6, 4, 16
# Sums of whole numbers are exact in any order.
LHS, RHS = (np.random.default_rng(n).integers(-8, 8, (n, STEPS * DEPTH)).astype(jnp.bfloat16) for n in (128, 32))


def product(body: Any, fault: str, **barriers: Any) -> np.ndarray:
    """LHS by RHS: each of two threads multiplies 64 rows by mma.sync."""
    ring = {"lhs": plgpu.SMEM((STAGES, 128, DEPTH), jnp.bfloat16), "rhs": plgpu.SMEM((STAGES, 32, DEPTH), jnp.bfloat16)}
    with interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        of = kernel(
            functools.partial(body, fault), out_type=[jax.ShapeDtypeStruct((128, 32), jnp.float32)],
            scratch_types=ring | barriers, num_threads=2, thread_name="thread",
            compiler_params=plgpu.CompilerParams(), kernel_name="planted",
        )  # fmt: skip
        return np.asarray(jax.jit(lambda x, w: of(x, w))(LHS, RHS)[0])


def by_cp_async(fault: str, x: Any, w: Any, out: Any, lhs: Any, rhs: Any, copied: Any) -> None:
    """Each thread copies its rows and half of the columns, waits for both copies of a step, then for the other."""
    thread = lax.axis_index("thread")
    rows, columns = (pl.ds(pl.multiple_of(n * thread, n), n) for n in (64, 16))
    ahead = STAGES if fault == "copies too early" else STAGES - 1
    outside = {"after the end": 0.5, "before the start": -2}.get(fault, 0)

    def start(step: int) -> None:
        for source, ring, own in ((x, lhs, rows), (w, rhs, columns)):
            place = pl.ds(own.start + int(outside * own.size), own.size), pl.ds(step * DEPTH, DEPTH)
            to = ring.at[step % STAGES, own]
            plgpu.copy_gmem_to_smem(source.at[place], to, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    for step in range(ahead):
        start(step)
    accumulator = jnp.zeros((64, 32), jnp.float32)
    for step in range(STEPS):
        later = 2 * (min(step + ahead, STEPS) - step - 1)
        if fault != "no wait":
            plgpu.wait_gmem_to_smem(later + (fault == "one copy too few"))
        if fault != "no barrier":
            plgpu.barrier_arrive(copied)
            plgpu.barrier_wait(copied)
        if step + ahead < STEPS:
            start(step + ahead)
        accumulator = plgpu.mma(accumulator, lhs[step % STAGES, rows], rhs.at[step % STAGES].T[...])
    if fault == "in flight at the end":
        start(0)
    out[rows] = accumulator


def by_tma(fault: str, x: Any, w: Any, out: Any, lhs: Any, rhs: Any, copied: Any, read: Any) -> None:
    """One thread copies. A barrier is enough after what both have read, what they have written needs a fence too."""
    thread = lax.axis_index("thread")
    rows = pl.ds(pl.multiple_of(64 * thread, 64), 64)

    def start(step: int) -> None:
        stage, depth = step % STAGES, pl.ds(step * DEPTH, DEPTH)
        if step >= STAGES and fault != "copies too early":
            plgpu.barrier_wait(read.at[stage])
        plgpu.copy_gmem_to_smem(x.at[:, depth], lhs.at[stage], copied.at[stage])
        plgpu.copy_gmem_to_smem(w.at[:, depth], rhs.at[stage], copied.at[stage])

    for step in range(STAGES - 1):
        pl.when(thread == 0)(functools.partial(start, step))
    accumulator = jnp.zeros((64, 32), jnp.float32)
    for step in range(STEPS):
        stage = step % STAGES
        if fault != "no wait":
            plgpu.barrier_wait(copied.at[stage])
        accumulator = plgpu.mma(accumulator, lhs[stage, rows], rhs.at[stage].T[...])
        if "writes" in fault:
            lhs[stage, rows] = jnp.zeros((64, DEPTH), jnp.bfloat16)
        if fault == "writes, with a fence":
            plgpu.commit_smem()
        plgpu.barrier_arrive(read.at[stage])
        if step + STAGES - 1 < STEPS:
            pl.when(thread == 0)(functools.partial(start, step + STAGES - 1))
    out[rows] = accumulator


RINGS = {
    "cp.async": functools.partial(product, by_cp_async, copied=plgpu.Barrier(num_arrivals=2)),
    "TMA": functools.partial(
        product, by_tma, **{name: plgpu.Barrier(num_arrivals=2, num_barriers=STAGES) for name in ("copied", "read")}
    ),
}


@pytest.mark.parametrize("threads", [mosaic_evaluate.run_thread, compiled], ids=["evaluated", "compiled"])
@pytest.mark.parametrize(("ring", "fault"), [("cp.async", ""), ("TMA", ""), ("TMA", "writes, with a fence")])
def test_rings_for_mma_sync(ring: str, fault: str, threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_map, "_run_jaxpr", threads)
    afresh()
    np.testing.assert_array_equal(RINGS[ring](fault), LHS.astype(np.float32) @ RHS.astype(np.float32).T)
    assert not races_found()


@pytest.mark.parametrize(
    ("ring", "fault", "found"),
    [
        *(("cp.async", fault, "RACE") for fault in ("no wait", "one copy too few", "no barrier", "copies too early")),
        ("cp.async", "after the end", "Out-of-bounds copy"),
        ("cp.async", "before the start", "Out-of-bounds copy .* negative"),
        ("cp.async", "in flight at the end", "ends before 2 of its copies"),
        *(("TMA", fault, "RACE") for fault in ("no wait", "copies too early", "writes, without a fence")),
    ],
)
def test_faults_in_rings_are_found(ring: str, fault: str, found: str) -> None:
    afresh()
    with pytest.raises(jax.errors.JaxRuntimeError, match=found):
        RINGS[ring](fault)
    afresh()


def test_the_newest_of_many_copies_is_in_flight() -> None:
    """JAX's own has five clocks for all copies."""

    def newest(x: Any, out: Any, tiles: Any) -> None:
        for i in range(6):
            plgpu.copy_gmem_to_smem(x.at[i], tiles.at[i], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        plgpu.wait_gmem_to_smem(5)
        out[...] = tiles[5]

    afresh()
    x, raises = jnp.ones((6, *SHAPE)), pytest.raises(jax.errors.JaxRuntimeError, match="RACE")
    with interpreting(plgpu.InterpretGPUParams(detect_races=True)), raises:
        kernel(
            newest, out_type=[jax.ShapeDtypeStruct(SHAPE, x.dtype)], scratch_types=[plgpu.SMEM(x.shape, x.dtype)],
            num_threads=1, thread_name="thread", compiler_params=plgpu.CompilerParams(), kernel_name="planted",
        )(x)  # fmt: skip
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
