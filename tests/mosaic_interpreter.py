"""Pallas's interpreter of GPU kernels (0.11.2, 0.12.0): its arrays, what it found, stores that add, which it lacks."""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core
from jax._src.pallas.mosaic.interpret import race_detection_state, thread_map
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    interpret_pallas_call,
    jaxpr_interpret,
    shared_memory,
)

from tests import mosaic_evaluate

with_jax_arrays, to_int = jax_callback.io_callback_impl, shared_memory._to_int
compiled, as_a_program = thread_map._run_jaxpr, interpret_pallas_call.interpret_pallas_call
copy_smem_to_gmem, Store = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask
Load, Interpreter = gpu_callbacks.AsyncCopyGmemToSmemTask, jaxpr_interpret.JaxprInterpreter
copy_by_tma, arithmetic = Interpreter._interpret_copy_gmem_to_smem_p, Interpreter._interpret_arithmetic_primitive


def prepare() -> None:
    """For all tests of a process, so that a kernel that one has compiled serves the others."""
    jax_callback.io_callback_impl = with_numpy_arrays
    shared_memory._to_int = lambda x: int(x) if isinstance(x, np.ndarray) else to_int(x)
    thread_map._run_jaxpr = mosaic_evaluate.run_thread
    interpret_pallas_call.interpret_pallas_call = interpret
    gpu_callbacks.AsyncCopySmemToGmemTask = AddingStore
    gpu_callbacks.copy_smem_to_gmem = begin_store
    gpu_callbacks.AsyncCopyGmemToSmemTask = LoadAfterReads
    primitives.mma_p.def_impl(multiplied)
    Interpreter._interpret_copy_gmem_to_smem_p = begin_copy
    Interpreter._interpret_arithmetic_primitive = end_copies


def afresh() -> None:
    """Drops the state that earlier kernels have left."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last kernel raced."""
    return bool(interpret_pallas_call.get_races().races_found)


def with_numpy_arrays(*args: Any, callback: Any, **more: Any) -> list[np.ndarray]:
    """Calls the interpreter with copies of what XLA has.

    JAX puts each argument on a device first: a quarter of the CPU time of an interpreted kernel.
    """
    function = callback.callback_func
    if not getattr(function, "func", function).__module__.startswith(("jax._src.pallas.", "tests.mosaic_")):
        return with_jax_arrays(*args, callback=callback, **more)
    return [np.asarray(x) for x in callback(*map(np.array, args))]


def interpret(*args: Any, **params: Any) -> Any:
    """In place of ``interpret_pallas_call``, whose loops a program has: of all of it, the program has one callback."""
    if core.get_axis_env().axis_sizes:  # inside shard_map, whose devices meet
        return as_a_program(*args, **params)
    traced, shapes = jax.make_jaxpr(lambda *x: as_a_program(*x, **params), return_shape=True)(*args)

    def run(consts: Any, args: Any) -> Any:
        with _one_kernel:
            return jax.tree.unflatten(jax.tree.structure(shapes), mosaic_evaluate.evaluate(traced.jaxpr, consts, args))

    return jax_callback.io_callback(run, shapes, traced.consts, args)


_one_kernel = threading.Lock()  # XLA may begin two that do not depend on each other; they would share their memory
_begun_here = threading.local()  # whether the copy that this thread begins adds


def begin_store(*, reduction_op: str | None, **kwargs: Any) -> Any:
    """Runs ``copy_smem_to_gmem(..., reduction_op="add")``, race detector included."""
    assert reduction_op in (None, "add")
    _begun_here.adds = reduction_op == "add"
    return copy_smem_to_gmem(reduction_op=None, **kwargs)


def multiplied(accumulator: Any, a: Any, b: Any) -> Any:
    """What `plgpu.mma` computes."""
    return accumulator + jnp.dot(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))


class LoadAfterReads(Load):  # type: ignore[misc, valid-type]
    """A copy by TMA over what threads have read, which a barrier orders: what they have written needs a fence besides.

    JAX's own asks for the fence after reads too. Only what wgmma reads, it knows to be read.
    """

    def post_read(self, tma_thread_id: int, shared_memory: Any) -> None:
        if not shared_memory.detect_races:
            return
        self.clock.inc(tma_thread_id)
        races, key, access = gpu_callbacks.get_races(), self.dst_allocation_key, self.dst_access
        with races.lock:
            written = list(races.writes[key])
        now, fenced = self.clock.generic_clock.copy(), self.clock.async_smem_clock.copy()
        races.check_write(self.thread, now, key, access, self.source_info)
        with races.lock:
            races.writes[key] = [(who, fenced if at is now else at, *of) for who, at, *of in races.writes[key]]
        for _, clock, where, frame in written:
            if not clock.ordered(fenced) and race_detection_state._ranges_overlap(access.range, where):
                raise RuntimeError(f"RACE DETECTED: a copy by TMA over what {frame} wrote without a fence")


def _copies_of(thread: Any, memory: Any) -> Any:
    """The clocks of a thread's copies that it has not waited for."""
    return vars(memory).setdefault("copies", collections.defaultdict(collections.deque))[thread]


def begin_copy(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
    """Runs ``copy_gmem_to_smem`` without a barrier: cp.async, whose end the same thread waits for."""
    if eqn.params["has_barrier"]:
        return copy_by_tma(self, eqn, token, get_invals)
    refs, flat = get_invals()[:2], get_invals()[2:]
    trees = [eqn.params[f"{which}_transforms_treedef"] for which in ("src", "dst")]
    each = flat[: trees[0].num_leaves], flat[trees[0].num_leaves :]
    resolved = [
        jaxpr_interpret.resolve_ref(var.aval, ref, jax.tree.unflatten(tree, leaves))
        for var, ref, tree, leaves in zip(eqn.invars, refs, trees, each, strict=False)
    ]

    @gpu_callbacks.fail_on_exception
    def run(mesh_location: Any, thread: Any, resolved: Any) -> Any:
        keys, accesses = [], []
        for ref, transforms in resolved:
            transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
            keys.append(gpu_callbacks.HostAllocationKey.from_array(ref))
            accesses.append(gpu_callbacks._get_shared_memory().access(keys[-1], transforms))
        memory = gpu_callbacks._get_shared_memory()
        clock = memory.incr_clock(thread) if memory.detect_races else None
        where = mesh_location, thread, keys[0], accesses[0], keys[1], accesses[1], eqn.source_info
        task = Copy(*where)
        task.clock = clock
        memory.execute_async_task(task)
        return np.int32(0)

    jax_callback.io_callback(run, jax.ShapeDtypeStruct((), jnp.int32), self.mesh_location, self.thread, resolved)
    return token, []


class Copy(gpu_callbacks.AsyncCopyTask):  # type: ignore[misc]
    """One copy by cp.async, which must stay inside the array that it reads."""

    clock: Any = None

    def pre_read(self, tma_thread_id: int, shared_memory: Any) -> None:
        del shared_memory
        if self.clock is not None:
            self.clock.inc(tma_thread_id)
            now = self.clock.generic_clock.copy()
            gpu_callbacks.get_races().check_read(
                self.thread, now, self.src_allocation_key, self.src_access, source_info=self.source_info
            )

    def post_read(self, tma_thread_id: int, shared_memory: Any) -> None:
        if self.clock is not None:
            self.clock.inc(tma_thread_id)
            now = self.clock.generic_clock.copy()
            gpu_callbacks.get_races().check_write(
                self.thread, now, self.dst_allocation_key, self.dst_access, source_info=self.source_info
            )
            _copies_of(self.thread, shared_memory).append(self.clock)


def end_copies(self: Any, eqn: Any, get_invals: Any) -> Any:
    """Runs ``wait_gmem_to_smem(n)``: of this thread's copies all but the last n are over."""
    if eqn.primitive is not primitives.wait_gmem_to_smem_p:
        return arithmetic(self, eqn, get_invals)

    @gpu_callbacks.fail_on_exception
    def run(thread: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        begun = _copies_of(thread, memory)
        with memory.lock:
            while len(begun) > eqn.params["n"]:
                memory.clocks[thread].update(begun.popleft())
        return np.int32(0)

    jax_callback.io_callback(run, jax.ShapeDtypeStruct((), jnp.int32), self.thread)
    return []


class AddingStore(Store):  # type: ignore[misc, valid-type]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adds = _begun_here.adds

    def __call__(self, tma_thread_id: int) -> None:
        if not self.adds:
            return super().__call__(tma_thread_id)
        memory = gpu_callbacks._get_shared_memory()

        def read(key: Any, access: Any) -> Any:
            return memory.get_buffer_content(key, access, self.thread, logging_info=self.logging_info)[0]

        self.pre_read(tma_thread_id, memory)
        values = read(self.src_allocation_key, self.src_access)
        self.post_read(tma_thread_id, memory)
        shape = memory.buffer_shape_and_dtype(self.dst_allocation_key).shape
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, values, tuple(shape))
        if inside is not None:
            access, values = inside
            total = read(self.dst_allocation_key, access) + values
            memory.store_buffer_content(
                self.dst_allocation_key, access, total, self.thread, logging_info=self.logging_info
            )
        self.post_write(tma_thread_id, memory)
        return None
