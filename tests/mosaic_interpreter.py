"""Pallas's interpreter of GPU kernels (0.11.2, 0.12.0): its arrays, what it found, stores that add, which it lacks."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, shared_memory

from tests import mosaic_evaluate

with_jax_arrays, to_int = jax_callback.io_callback_impl, shared_memory._to_int
compiled, as_a_program = thread_map._run_jaxpr, interpret_pallas_call.interpret_pallas_call
copy_smem_to_gmem, Store = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask


def prepare() -> None:
    """For all tests of a process, so that a kernel that one has compiled serves the others."""
    jax_callback.io_callback_impl = with_numpy_arrays
    shared_memory._to_int = lambda x: int(x) if isinstance(x, np.ndarray) else to_int(x)
    thread_map._run_jaxpr = mosaic_evaluate.run_thread
    interpret_pallas_call.interpret_pallas_call = interpret
    gpu_callbacks.AsyncCopySmemToGmemTask = AddingStore
    gpu_callbacks.copy_smem_to_gmem = begin_store


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
