"""Timing and memory: every candidate compiled first, then rounds of one timing of each in random order, medians.

Programs are compared only by timings taken seconds apart in one process: clocks, temperature and other load drift by
several per cent between runs, but affect all candidates of a round alike. Under heavy work a GPU lowers its clock to
what the candidate's power allows (an H200 from 1980 to 1400 MHz, at its limit of 700 W), so a candidate would profit
from a lighter one before it. On a GPU each candidate therefore runs untimed until the clock has settled, and is then
timed for 0.3 s. Two runs of the same candidate then differ by half a per cent, where short timings differ by three.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

SAMPLE_SECONDS = 0.25  # the least timed work per candidate over all rounds, except on a GPU
GPU_SECONDS = 0.3  # of work in one timing on a GPU
GPU_SETTLE_SECONDS = 0.12  # of work before it
MIN_GPU_CALLS = 3  # back to back in one timing, so that a launch overlaps with the work of the call before


class Run(NamedTuple):
    """A compiled candidate: how to start it, how to wait for it, and what its compilation took."""

    launch: Callable[[], Any]  # starts one call and returns its outputs, possibly not yet computed
    wait: Callable[[Any], Any]  # blocks until they are computed, and returns them
    temp_bytes: int  # peak beyond operands and results
    compile_seconds: float


def compile_jax(function: Callable[..., Any], *args: Any) -> Run:
    """``function`` traced and compiled for ``args``; the memory is what XLA allocated for temporaries."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return Run(
        launch=lambda: compiled(*args),
        wait=jax.block_until_ready,
        temp_bytes=memory.temp_size_in_bytes,
        compile_seconds=seconds,
    )


def time_calls(run: Run, calls: int) -> float:
    """Seconds per call of ``calls`` calls back to back, waited for once at the end."""
    start = time.perf_counter()
    for _ in range(calls):
        outputs = run.launch()
    run.wait(outputs)
    return (time.perf_counter() - start) / calls


def calls_within(run: Run, seconds: float) -> int:
    """How many calls take ``seconds``, at least one. Also warms up."""
    time_calls(run, 1)
    once = time_calls(run, 1)
    return math.ceil(seconds / max(once, 1e-6))


def interleave[K: Hashable](
    runs: Mapping[K, Run],
    rounds: int,
    on_gpu: bool = False,
    seed: int = 0,
    on_timing: Callable[[K, int], None] | None = None,
    on_failure: Callable[[K, Exception], None] | None = None,
) -> dict[K, list[float]]:
    """Seconds per call of each run, one sample per round; every round times all of them in a new random order.

    A run that was right may yet fail here: calls back to back hold the results of two. With ``on_failure`` it has no
    samples then, and the others go on; without, its failure ends the timing.
    """
    seconds = GPU_SECONDS if on_gpu else SAMPLE_SECONDS / rounds
    calls: dict[K, int] = {}
    samples: dict[K, list[float]] = {key: [] for key in runs}
    shuffle = random.Random(seed).shuffle

    def count(key: K) -> None:
        calls[key] = max(calls_within(runs[key], seconds), MIN_GPU_CALLS if on_gpu else 1)

    def sample(key: K) -> None:
        if on_gpu:
            time_calls(runs[key], math.ceil(calls[key] * GPU_SETTLE_SECONDS / GPU_SECONDS))
        samples[key].append(time_calls(runs[key], calls[key]))

    def attempt(step: Callable[[K], None], key: K) -> None:
        try:
            step(key)
        except Exception as failure:
            if on_failure is None:
                raise
            on_failure(key, failure)
            del samples[key]

    for key in runs:
        attempt(count, key)
    for done in range(rounds):
        order = list(samples)
        shuffle(order)
        for key in order:
            if on_timing:
                on_timing(key, done)
            attempt(sample, key)
    return samples


def first_line(failure: Exception) -> str:
    """Why a run was left out: mostly out of memory, whose type differs by framework."""
    lines = str(failure).strip().splitlines() or ["no message"]
    return f"{type(failure).__name__}: {lines[0][:200]}"


def median(samples: list[float]) -> float:
    """The middle sample, or the mean of the two in the middle."""
    return statistics.median(samples)


def spread(samples: list[float]) -> float:
    """Half the interquartile range over the median: how far a typical sample lies from it, as a fraction."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(samples)
