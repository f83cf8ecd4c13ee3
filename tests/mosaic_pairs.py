"""Lets Pallas' interpreter (JAX 0.12.0) run pairs of blocks that multiply together, which it lacks.

What it models, from JAX's guide to Blackwell: a copy with ``leader_tracked=PARTITIONED(dim)`` brings each block its
half of the window and counts at the first block's barrier only; a collective product, issued by the first block,
multiplies each block's rows by both blocks' columns, writes both accumulators and arrives at both blocks' barriers, as
does a collective commit. Not modelled: the order in which the two halves land, bytes in place of arrivals.

``python -m tests.mosaic_pairs NAME`` checks a call of tests/mosaic_calls.py so, in a process that may hang alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

from lce_jax.mosaic import _generations, sm100
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.sm100._tuning import PAIRS, Tunings
from tests.devices import B200
from tests.mosaic_calls import CALLS, budget_of, check
from tests.mosaic_interpreter import prepare


def _of_block(key: Any, block: int) -> Any:
    return dataclasses.replace(key, block_id=block)


def _key(array: Any) -> Any:
    return gpu_callbacks.HostAllocationKey.from_array(array)


def _copy_half(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    src_allocation_key_as_array: Any,
    src_transforms: Any,
    dst_allocation_key_as_array: Any,
    dst_transforms: Any,
    barrier_allocation_key_as_array: Any,
    axis: int,
    source_info: Any = None,
) -> Any:
    memory = gpu_callbacks._get_shared_memory()

    def access(key: Any, transforms: Any) -> Any:
        return memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))

    clock = memory.incr_clock(thread) if memory.detect_races else None
    src, dst = _key(src_allocation_key_as_array), _key(dst_allocation_key_as_array)
    leader = _of_block(_key(barrier_allocation_key_as_array), 0)
    while True:  # a GPU's blocks meet before the kernel begins; here the first block may not have its barriers yet
        with memory.lock:
            if leader in memory.mem:
                break
        time.sleep(0.001)
    barrier = memory.get_barrier(leader)
    with barrier.cv:
        if not getattr(barrier, "of_a_pair", False):
            barrier.of_a_pair, barrier.num_arrivals = True, 2 * barrier.num_arrivals
    whole = access(src, src_transforms)
    window = list(whole.range)
    half = (window[axis].stop - window[axis].start) // 2
    start = window[axis].start + thread.block_id * half
    window[axis] = slice(start, start + half, 1)
    memory.execute_async_task(
        gpu_callbacks.AsyncCopyGmemToSmemTask(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=src,
            src_access=dataclasses.replace(whole, range=tuple(window)),
            dst_allocation_key=dst,
            dst_access=access(dst, dst_transforms),
            barrier_allocation_key=leader,
            source_info=source_info,
            clock=clock,
        )
    )
    return token


class _Mma(gpu_callbacks.TcGen05Mma):  # type: ignore[misc, valid-type]
    def __call__(self, pipeline_clock: Any, tma_thread_id: int) -> Any:
        if self.collective_axis is None:
            return super().__call__(pipeline_clock, tma_thread_id)
        assert self.thread.block_id == 0, "only the first block of a pair issues"
        memory = gpu_callbacks._get_shared_memory()
        info = gpu_callbacks.memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)

        def read(key: Any, access: Any) -> Any:
            return memory.get_buffer_content(key, access, self.thread, logging_info=info)[0]

        clock = self._clock(memory, pipeline_clock, tma_thread_id)
        b = np.concatenate([read(_of_block(self.b_key, block), self.b_access) for block in range(2)], axis=1)
        for block in range(2):
            accumulator = _of_block(self.acc_key, block)
            product = np.matmul(read(_of_block(self.a_key, block), self.a_access), b, dtype=np.float32)
            if self.accumulate:
                before, *_ = memory.get_buffer_content(accumulator, self.acc_access, None, logging_info=info)
                product = product + before
            memory.store_buffer_content(
                accumulator, self.acc_access, product, self.thread, increment_clock=False, logging_info=info
            )
            if clock is not None:
                gpu_callbacks.get_races().check_write(
                    self.thread, clock.generic_clock, accumulator, self.acc_access, source_info=self.source_info
                )
        for block in range(2):
            if self.barrier_key:
                barrier = memory.get_barrier(_of_block(self.barrier_key, block))
                barrier.arrive(thread=self.thread, clock=clock, logging_info=info)
        return clock.copy() if clock is not None else None

    def _clock(self, memory: Any, pipeline_clock: Any, tma_thread_id: int) -> Any:
        """The clock of the reads of both blocks' operands, which are checked."""
        if not memory.detect_races:
            return None
        clock = memory.get_clock(self.thread)
        if pipeline_clock is not None:
            clock.update(pipeline_clock)
        clock.inc(tma_thread_id)
        for block in range(2):
            for key, access in ((self.a_key, self.a_access), (self.b_key, self.b_access)):
                gpu_callbacks.get_races().check_read(
                    self.thread, clock.async_smem_clock, _of_block(key, block), access, source_info=self.source_info
                )
        return clock


@contextlib.contextmanager
def interpreting_pairs() -> Iterator[None]:
    """Around the trace of a kernel."""
    interpreter = jaxpr_interpret.JaxprInterpreter
    copy, trace_copy = gpu_callbacks.copy_gmem_to_smem, interpreter._interpret_copy_gmem_to_smem_p
    commit = gpu_callbacks.tcgen05_commit_arrive

    def trace(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        part = eqn.params["leader_tracked"]
        half = functools.partial(gpu_callbacks.fail_on_exception(_copy_half), axis=getattr(part, "axis", None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_callbacks, "copy_gmem_to_smem", copy if part is None else half)
            return trace_copy(self, eqn, token, get_invals)

    def commit_both(*, token: Any, barrier_key_as_array: Any, collective_axis: Any = None, **kwargs: Any) -> Any:
        key = _key(barrier_key_as_array)
        for block in (key.block_id,) if collective_axis is None else (0, 1):
            token = commit(token=token, barrier_key_as_array=_of_block(key, block).as_np_array, **kwargs)
        return token

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpret_copy_gmem_to_smem_p", trace)
        patch.setattr(gpu_callbacks, "TcGen05Mma", _Mma)
        patch.setattr(gpu_callbacks, "tcgen05_commit_arrive", commit_both)
        yield


def main(name: str) -> None:
    """Raises where a call in pairs is wrong."""
    (call,) = (one for one in CALLS if one.name == name)
    tunings = Tunings(otherwise=dataclasses.replace(PAIRS, stages=2))
    prepare()
    kernels = sm100.Kernels(budget=budget_of(call, sm100.KERNELS.budget, sm100.KERNELS.tiling), tunings=tunings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_generations.using(kernels))
        stack.enter_context(interpreting(plgpu.InterpretGPUParams(detect_races=True)))
        stack.enter_context(interpreting_pairs())
        check(call, B200, stack.enter_context(pytest.MonkeyPatch.context()))


if __name__ == "__main__":
    main(sys.argv[1])
