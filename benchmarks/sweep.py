"""Times tunings of the Hopper kernels on one shape, and prints the entry for the tuned table.

No call tunes itself. The best tunings become data in ``lce_jax/mosaic/sm90/_tuning.py``, by device and hidden size.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from benchmarks.candidates import BOTH, FORWARD, Candidate, jax_candidates, judge
from benchmarks.heads import add_shapes, job_arguments, shapes_here
from benchmarks.measure import Run, rows, show
from benchmarks.problem import Problem, Shape, default_dtype, random_problem, sizes
from benchmarks.records import Job, Measured
from lce_jax import UnsupportedError, explain
from lce_jax.mosaic import NAME, _generations, sm90
from lce_jax.mosaic.common._tiles import Tuning, stages_output
from lce_jax.types._types import Call

# The Hopper kernels, each with the direction whose time decides its tiles.
KERNELS = {"forward": FORWARD, "dlogits": BOTH, "dhidden": BOTH, "dweight": BOTH}
STEPS: tuple[Mapping[str, Sequence[int]], ...] = (
    {"tile_k": (64, 128), "stages": range(2, 9), "turns": (1, 2), "slots": (1, 2)},
    {"cluster": (1, 2), "minor": (0, 1), "in_flight": (0, 1)},
    {"snake": (4, 8, 16, 32)},
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    add_shapes(command)
    command.add_argument("--kernel", choices=KERNELS, action="append", help="repeatable (default: all)")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each kernel and shape."""
    return [
        Job(
            [*job_arguments("sweep", shape), "--kernel", kernel],
            functools.partial(_measure, kernel, shape, options.rounds),
        )
        for shape in options.shape or shapes_here()
        for kernel in options.kernel or KERNELS
    ]


def _measure(kernel: str, shape: Shape, rounds: int) -> Measured:
    problem = random_problem(shape, default_dtype())
    call = explain(*problem[:3], implementation=NAME).call
    seconds = sweep(kernel, call, functools.partial(_time, kernel, problem, call, rounds))
    best = next(iter(seconds))
    entry = f'("{call.device.kind}", "{kernel}"): (({call.hidden_size}, {best}),)'
    print(entry)
    row = {"entry": entry, "median_seconds": seconds[best]}
    return Measured({kernel: row}, {"shape": sizes(shape), "dtype": problem.hidden.dtype.name})


def sweep(kernel: str, call: Call, time: Callable[[Sequence[Tuning]], dict[Tuning, float]]) -> dict[Tuning, float]:
    """Searches for the best tuning in steps. Returns the last step's seconds of the whole direction, the fastest first.

    It starts from the kernel's own tuning, and each step varies a few fields of the best tuning so far. Only timings of
    one interleaved run are compared, so each step times the best tuning of the previous step again.
    """
    best, seconds = sm90.HOPPER.tunings.of(call, kernel), {}
    for step in STEPS:
        seconds = time(vary_fields(call, kernel, best, step))
        if not seconds:
            raise UnsupportedError(f"no tuning of the {kernel} kernel gave right results")
        best = next(iter(seconds))
    return seconds


def vary_fields(call: Call, kernel: str, tuning: Tuning, fields: Mapping[str, Sequence[int]]) -> list[Tuning]:
    """Returns ``tuning`` with every choice of ``fields`` that is valid and fits in shared memory."""
    tunings = []
    for values in itertools.product(*fields.values()):
        with contextlib.suppress(ValueError):  # raised by choices that exclude each other
            tunings.append(dataclasses.replace(tuning, **dict(zip(fields, values, strict=True))))
    staged = stages_output(call, kernel)
    return [one for one in tunings if one.smem_bytes(call.dtype.itemsize, staged) <= sm90.HOPPER.smem_limit]


@contextlib.contextmanager
def use_tuning(call: Call, kernel: str, tuning: Tuning) -> Iterator[None]:
    """Makes calls on this kind of device use ``tuning``. Tracing reads it, so cached traces are cleared."""
    tunings = sm90.HOPPER.tunings
    table = {**tunings.tuned, (call.device.kind, kernel): ((0, tuning),)}
    generation = dataclasses.replace(sm90.HOPPER, tunings=dataclasses.replace(tunings, tuned=table))
    jax.clear_caches()
    try:
        with _generations.using(generation):
            yield
    finally:
        jax.clear_caches()


def _time(kernel: str, problem: Problem, call: Call, rounds: int, choices: Sequence[Tuning]) -> dict[Tuning, float]:
    """Times and prints all tunings. Returns the seconds of the direction by tuning, the fastest first.

    A tuning that fails or is wrong is printed with the reason, and is not returned.
    """
    ours = next(one for one in jax_candidates(problem, NAME) if (one.key, one.direction) == ("ours", KERNELS[kernel]))

    def candidate(tuning: Tuning) -> Candidate:
        def compile() -> Run:
            with use_tuning(call, kernel, tuning):
                return ours.compile()

        return dataclasses.replace(ours, label=str(tuning), compile=compile)

    candidates = {candidate(tuning): tuning for tuning in choices}
    measured = rows({one.name: one.compile for one in candidates}, judge(candidates, problem), rounds)
    measured = dict(sorted(measured.items(), key=lambda item: item[1].get("median_seconds", math.inf)))
    show(measured, f"{kernel} kernel, {KERNELS[kernel]}")
    tunings = {one.name: tuning for one, tuning in candidates.items()}
    return {tunings[name]: row["median_seconds"] for name, row in measured.items() if "left_out" not in row}
