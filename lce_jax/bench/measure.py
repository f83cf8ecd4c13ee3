"""Timing and memory: every candidate compiled first, then rounds of one timing of each in random order, medians.

Two programs are compared only through timings taken seconds apart in one process: clocks, temperature and neighbours
drift by several per cent between runs, and hit all candidates of a round alike. A GPU lowers its clock within
milliseconds of heavy work (an H200 from 1980 to 1400 MHz, at its limit of 700 W), so a candidate would profit from a
light one before it: on a GPU the bare product runs for as long before every timing, as a training step would.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

SAMPLE_SECONDS = 0.25  # of timed work per candidate over all rounds, at least
MIN_GPU_CALLS = 3  # back to back in one timing: the launch of one hides behind the work of the one before


class Run(NamedTuple):
    """A compiled candidate: how to start it, how to wait for it, and what was learnt from compiling it."""

    launch: Callable[[], Any]  # starts one call and returns its outputs, possibly not yet computed
    wait: Callable[[Any], Any]  # blocks until they are, and returns them
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


def calls_per_timing(run: Run, rounds: int, at_least: int = 1) -> int:
    """How many calls a timing needs for all rounds together to hold `SAMPLE_SECONDS` of work. Warms up on the way."""
    time_calls(run, 1)
    once = time_calls(run, 1)
    return max(at_least, math.ceil(SAMPLE_SECONDS / rounds / max(once, 1e-6)))


def interleave[K: Hashable](
    runs: Mapping[K, Run],
    rounds: int,
    at_least: int = 1,
    seed: int = 0,
    on_timing: Callable[[K, int], None] | None = None,
    before: K | None = None,
) -> dict[K, list[float]]:
    """Seconds per call of each run, one sample a round; every round times all of them in an order of its own.

    ``before`` is the one that runs before each timing, untimed.
    """
    calls = {key: calls_per_timing(run, rounds, at_least) for key, run in runs.items()}
    samples: dict[K, list[float]] = {key: [] for key in runs}
    shuffle = random.Random(seed).shuffle
    for done in range(rounds):
        order = list(runs)
        shuffle(order)
        for key in order:
            if on_timing:
                on_timing(key, done)
            if before is not None:
                time_calls(runs[before], calls[before])
            samples[key].append(time_calls(runs[key], calls[key]))
    return samples


def median(samples: list[float]) -> float:
    """The middle sample, or the mean of the two in the middle."""
    return statistics.median(samples)


def spread(samples: list[float]) -> float:
    """Half the interquartile range over the median: how far a typical sample lies from it, as a fraction."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(samples)
