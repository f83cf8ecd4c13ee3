"""Pallas's interpreter of GPU kernels (0.11.2, 0.12.0): its arrays, what it found, and what it lacks.

That is stores that add, and what GPUs without wgmma use: mma.sync, cp.async, and TMA over what threads have read.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core, dispatch
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic.interpret import thread_map, vector_clock
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret, shared_memory

from tests import mosaic_evaluate

with_jax_arrays, to_int = jax_callback.io_callback_impl, shared_memory._to_int
compiled, as_a_program = thread_map._run_jaxpr, interpret_pallas_call.interpret_pallas_call
copy_smem_to_gmem, Store = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask
interpret_jaxpr, CP_ASYNC = jaxpr_interpret.JaxprInterpreter.interpret, "cp.async"


def prepare() -> None:
    """For all tests of a process, so that a kernel that one has compiled serves the others."""
    jax_callback.io_callback_impl = with_numpy_arrays
    shared_memory._to_int = lambda x: int(x) if isinstance(x, np.ndarray) else to_int(x)
    thread_map._run_jaxpr = mosaic_evaluate.run_thread
    interpret_pallas_call.interpret_pallas_call = interpret
    gpu_callbacks.AsyncCopySmemToGmemTask = lambda *args, **kwargs: _begun_here.task(*args, **kwargs)
    gpu_callbacks.AsyncCopyGmemToSmemTask = Load
    gpu_callbacks.copy_smem_to_gmem = begin_store
    gpu_callbacks.GPURaceDetectionState = Races
    shared_memory.GPUSharedMemory = Memory
    jaxpr_interpret.JaxprInterpreter.interpret = interpret_stores
    primitives.mma_p.def_impl(functools.partial(dispatch.apply_primitive, primitives.mma_p))
    mlir.register_lowering(primitives.mma_p, mlir.lower_fun(multiply, multiple_results=False), platform="cpu")


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
_begun_here = threading.local()  # what the copy is that this thread begins


def begin_store(*, reduction_op: str | None, **kwargs: Any) -> Any:
    """Runs ``copy_smem_to_gmem(..., reduction_op="add")`` and copies by cp.async, race detector included."""
    _begun_here.task = {None: Store, "add": AddingStore, CP_ASYNC: Copy}[reduction_op]
    return copy_smem_to_gmem(reduction_op=None, **kwargs)


class AddingStore(Store):  # type: ignore[misc, valid-type]
    def __call__(self, tma_thread_id: int) -> None:
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


def multiply(accumulator: Any, a: Any, b: Any) -> Any:
    """What ``plgpu.mma`` returns."""
    return accumulator + jax.lax.dot(a.astype(accumulator.dtype), b.astype(accumulator.dtype))


def interpret_stores(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """Copies by cp.async become stores with a name of their own: of those too a thread waits for all but the last n."""

    def as_store(eqn: Any) -> Any:
        if eqn.primitive.name == "wait_gmem_to_smem":
            return eqn.replace(primitive=primitives.wait_smem_to_gmem_p, params={**eqn.params, "wait_read_only": True})
        if eqn.primitive.name == "copy_gmem_to_smem" and not eqn.params.get("has_barrier", True):
            assert eqn.params["oob_mode"] is primitives.OOBFillMode.PROMISE_IN_BOUNDS
            kept = "src_transforms_treedef", "dst_transforms_treedef", "has_user_predicate"
            params = {name: eqn.params[name] for name in kept} | {"commit_group": True, "reduction_op": CP_ASYNC}
            return eqn.replace(primitive=primitives.copy_smem_to_gmem_p, params=params)
        return eqn

    return interpret_jaxpr(self, jaxpr.replace(eqns=[as_store(eqn) for eqn in jaxpr.eqns]), token, *args)


class Begun(vector_clock.NpVectorClock):
    """When a thread began a copy by cp.async, whose accesses are over once it has waited for the copy."""

    waited: Any = None

    def ordered(self, later: Any) -> bool:
        return self.waited is not None and self.waited.lt(later)


class Copy(Store):  # type: ignore[misc, valid-type]
    """Lands at once, but for the race detector. Outside its arrays the machine would copy whatever is there."""

    clips_out_of_bounds_destination = False

    def pre_read(self, _: int, memory: Any) -> None:
        for where in (*self.src_access.range, *self.dst_access.range):
            if getattr(where, "start", where) < 0:  # NumPy would count from the end
                raise IndexError(f"Out-of-bounds copy from [{self.src_access}] to [{self.dst_access}]: negative.")
        if memory.detect_races:
            begun = _of(Begun, self.clock.generic_clock)
            of = self.src_allocation_key, self.src_access, self.source_info
            to = self.dst_allocation_key, self.dst_access, self.source_info
            gpu_callbacks.get_races().check_read(self.thread, begun, *of)
            gpu_callbacks.get_races().check_write(self.thread, begun, *to)
            memory.copies[self.thread].append(begun)

    def post_read(self, _: int, memory: Any) -> None:
        """Nothing: both accesses are checked from the start on."""

    post_write = post_read


class Memory(shared_memory.GPUSharedMemory):  # type: ignore[misc]
    """Knows the copies by cp.async of each thread that it has not waited for."""

    def reset_per_cluster_state(self) -> None:
        super().reset_per_cluster_state()
        self.copies: dict[Any, Any] = collections.defaultdict(collections.deque)

    def wait_smem_to_gmem(self, thread: Any, n: int, wait_read_only: bool) -> None:
        super().wait_smem_to_gmem(thread, n, wait_read_only)
        while len(self.copies[thread]) > n:
            self.copies[thread].popleft().waited = self.get_clock(thread).generic_clock

    def kernel_thread_finished(self, thread: Any) -> None:
        super().kernel_thread_finished(thread)
        if self.copies[thread]:
            raise ValueError(f"{thread} ends before {len(self.copies[thread])} of its copies by cp.async do.")


class Read(vector_clock.NpVectorClock):
    """When a thread read: a barrier orders a copy by TMA after it. After a write the copy needs a fence too."""

    def ordered(self, later: Any) -> bool:
        return super().ordered(getattr(later, "without_fence", later))


class Races(gpu_callbacks.GPURaceDetectionState):  # type: ignore[misc]
    def check_read(self, thread: Any, clock: Any, *where: Any, **more: Any) -> None:
        super().check_read(thread, clock if isinstance(clock, Begun) else _of(Read, clock), *where, **more)


class Load(gpu_callbacks.AsyncCopyGmemToSmemTask):  # type: ignore[misc]
    """A copy by TMA, before which JAX's own asks for a fence after reads too; CUTLASS for sm_120 has none either."""

    def post_read(self, tma_thread_id: int, memory: Any) -> None:
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            clock = self.clock.async_smem_clock.copy()
            clock.without_fence = self.clock.generic_clock.copy()
            to = self.dst_allocation_key, self.dst_access, self.source_info
            gpu_callbacks.get_races().check_write(self.thread, clock, *to)


def _of(kind: Any, clock: Any) -> Any:
    made = kind.__new__(kind)
    made.clock = clock.clock.copy()
    return made
