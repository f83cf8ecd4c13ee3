"""Timing and memory. All programs are compiled first. Each round then times each program once, in random order.

Results are medians over the rounds. Only timings taken seconds apart in one process are compared, because clocks,
temperature and other load drift by several per cent between runs, but affect all programs of a round alike. Under heavy
work a GPU lowers its clock to what the program's power allows (an H200 from 1980 to 1400 MHz, at its limit of 700 W).
So a program would profit if a lighter program ran before it. On a GPU each program therefore runs untimed until the
clock has settled, and is then timed for 0.3 s. Two runs of the same program then differ by half a per cent; short
timings differ by three per cent.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from lce_jax.types.scalars import format_bytes

SAMPLE_SECONDS = 0.25  # the least timed work per program over all rounds, except on a GPU
GPU_SECONDS = 0.3  # the timed work of one timing on a GPU
GPU_SETTLE_SECONDS = 0.12  # the untimed work before it
MIN_GPU_CALLS = 3  # calls back to back in one timing, so that a launch overlaps with the work of the previous call

type Fields = Mapping[str, Any]  # the fields of a row


class Run(NamedTuple):
    """A compiled program: how to start it, how to wait for it, its memory, and the time of its compilation."""

    launch: Callable[[], Any]  # starts one call and returns its outputs, possibly not yet computed
    wait: Callable[[Any], Any]  # blocks until they are computed, and returns them
    temp_bytes: int  # peak beyond operands and results
    compile_seconds: float


def compile_jax(function: Callable[..., Any], *args: Any) -> Run:
    """Compiles ``function`` for ``args``. The memory of the result is what XLA allocates for temporaries."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return Run(lambda: compiled(*args), jax.block_until_ready, memory.temp_size_in_bytes, seconds)


def time_calls(run: Run, calls: int) -> float:
    """Returns the seconds per call of ``calls`` calls back to back, with one wait at the end."""
    start = time.perf_counter()
    for _ in range(calls):
        outputs = run.launch()
    run.wait(outputs)
    return (time.perf_counter() - start) / calls


def calls_within(run: Run, seconds: float) -> int:
    """Returns how many calls take ``seconds``, at least one. It also warms up the program."""
    time_calls(run, 1)
    once = time_calls(run, 1)
    return math.ceil(seconds / max(once, 1e-6))


def interleave(runs: Mapping[str, Run], rounds: int, left_out: dict[str, str]) -> dict[str, list[float]]:
    """Times all runs in rounds. Returns one sample per round for each run, in seconds per call.

    Every round times the runs in a new random order. A run may fail here although a single call did not, because calls
    back to back hold the results of two calls. Such a run gets a reason in ``left_out`` and no samples. The others go
    on.
    """
    on_gpu = jax.default_backend() == "gpu"
    seconds = GPU_SECONDS if on_gpu else SAMPLE_SECONDS / rounds
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0).shuffle

    def count(name: str) -> None:
        calls[name] = max(calls_within(runs[name], seconds), MIN_GPU_CALLS if on_gpu else 1)

    def sample(name: str) -> None:
        if on_gpu:
            time_calls(runs[name], math.ceil(calls[name] * GPU_SETTLE_SECONDS / GPU_SECONDS))
        samples[name].append(time_calls(runs[name], calls[name]))

    for step in (count, *[sample] * rounds):
        order = list(samples)
        shuffle(order)
        for name in order:
            try:
                step(name)
            except Exception as failure:
                left_out[name] = first_line(failure)
                del samples[name]
    return samples


def rows(
    programs: Mapping[str, Callable[[], Run]], judge: Callable[[str, Any], tuple[str | None, Fields]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Compiles, checks and times programs. Returns a row for each; the first program is the bare product.

    ``judge`` takes the name and the results of a program. It returns the reason why the results are wrong, or None, and
    more fields for the row. A program that does not compile, is wrong or runs out of memory has the reason in its row.
    The others go on.
    """
    runs: dict[str, Run] = {}
    more: dict[str, Fields] = {}
    left_out: dict[str, str] = {}
    for name, compiled in programs.items():
        log(f"compiling and checking {name}")
        try:
            run = compiled()
            reason, more[name] = judge(name, run.wait(run.launch()))
        except Exception as failure:
            reason = first_line(failure)
        if reason is None:
            runs[name] = run
        else:
            left_out[name] = reason
    samples = interleave(runs, rounds, left_out)
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    unit = medians.get(next(iter(programs)))
    return {
        name: {
            "seconds": samples[name],
            "median_seconds": medians[name],
            "ratio_to_gemm": medians[name] / unit if unit else None,
            "temp_bytes": runs[name].temp_bytes,
            "compile_seconds": runs[name].compile_seconds,
            **more[name],
        }
        if name in medians
        else {"left_out": left_out[name]}
        for name in programs
    }


def show(rows: Mapping[str, Fields], about: str) -> None:
    """Prints all rows under their common fields. A row without a time shows the reason."""
    print(about)
    for name, row in rows.items():
        if "left_out" in row:
            print(f"{name:62s}  not timed: {row['left_out']}")
            continue
        ratio = "     –" if row["ratio_to_gemm"] is None else f"{row['ratio_to_gemm']:6.2f}"
        more = {key: row.get(key) for key in ("apart", "skipped", "dropped_mass")} | row.get("errors", {})
        text = ", ".join(f"{key} {value:.1e}" for key, value in more.items() if value is not None)
        times = f"{row['median_seconds'] * 1e3:9.2f} ms {ratio} products {format_bytes(row['temp_bytes']):>9s}"
        print(f"{name:62s}{times}  {text}".rstrip())


def first_line(failure: Exception) -> str:
    """Returns why a program was left out: mostly out of memory, an error whose type differs by framework."""
    lines = str(failure).strip().splitlines() or ["no message"]
    return f"{type(failure).__name__}: {lines[0][:200]}"


def log(message: str) -> None:
    """Prints progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
