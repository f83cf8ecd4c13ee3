"""The tunings of the Hopper kernels, timed on one shape; what to enter in the tuned table.

Tuning never happens in a call: winners become data in ``lce_jax/mosaic/sm90/_tuning.py``, by device and hidden size.
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
from benchmarks.heads import add_shapes, shapes_here, words
from benchmarks.measure import Run, rows, show
from benchmarks.problem import Problem, Shape, default_dtype, random_problem, sizes
from benchmarks.records import Job, Measured
from lce_jax import UnsupportedError, explain
from lce_jax.mosaic import NAME, _generations, sm90
from lce_jax.mosaic.common._tiles import Tuning, stages_output
from lce_jax.types._types import Call

# The Hopper kernels, and the direction whose time decides the tiles of each.
KERNELS = {"forward": FORWARD, "dlogits": BOTH, "dhidden": BOTH, "dweight": BOTH}
STEPS: tuple[Mapping[str, Sequence[int]], ...] = (
    {"tile_k": (64, 128), "stages": range(2, 9), "turns": (1, 2), "slots": (1, 2)},
    {"cluster": (1, 2), "minor": (0, 1), "in_flight": (0, 1)},
    {"snake": (4, 8, 16, 32)},
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    add_shapes(command)
    command.add_argument("--kernel", choices=KERNELS, action="append", help="repeatable (default: all)")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each kernel and shape."""
    return [
        Job([*words("sweep", shape), "--kernel", kernel], functools.partial(_measure, kernel, shape, options.rounds))
        for shape in options.shape or shapes_here()
        for kernel in options.kernel or KERNELS
    ]


def _measure(kernel: str, shape: Shape, rounds: int) -> Measured:
    problem = random_problem(shape, default_dtype())
    case = explain(*problem[:3], implementation=NAME).call
    seconds = sweep(kernel, case, functools.partial(_time, kernel, problem, case, rounds))
    best = next(iter(seconds))
    entry = f'("{case.device.kind}", "{kernel}"): (({case.hidden_size}, {best}),)'
    print(entry)
    row = {"entry": entry, "median_seconds": seconds[best]}
    return Measured({kernel: row}, {"shape": sizes(shape), "dtype": problem.hidden.dtype.name})


def sweep(kernel: str, case: Call, time: Callable[[Sequence[Tuning]], dict[Tuning, float]]) -> dict[Tuning, float]:
    """Seconds of the whole direction by tuning, of the last step, the fastest first.

    It starts from the kernel's own tuning; each step varies a few fields of the best so far. Only timings of one
    interleaved run are compared, so a step times the best of the step before it again.
    """
    best, seconds = sm90.HOPPER.tunings.of(case, kernel), {}
    for step in STEPS:
        seconds = time(around(case, kernel, best, step))
        if not seconds:
            raise UnsupportedError(f"no tuning of the {kernel} kernel gave right results")
        best = next(iter(seconds))
    return seconds


def around(case: Call, kernel: str, tuning: Tuning, fields: Mapping[str, Sequence[int]]) -> list[Tuning]:
    """``tuning`` with every choice of the fields that is valid and fits shared memory."""
    made = []
    for values in itertools.product(*fields.values()):
        with contextlib.suppress(ValueError):  # raised by choices that exclude each other
            made.append(dataclasses.replace(tuning, **dict(zip(fields, values, strict=True))))
    staged = stages_output(case, kernel)
    return [one for one in made if one.smem_bytes(case.dtype.itemsize, staged) <= sm90.HOPPER.smem_limit]


@contextlib.contextmanager
def tuned(case: Call, kernel: str, tuning: Tuning) -> Iterator[None]:
    """Within it, calls on this device kind use ``tuning``. It is read while tracing, so traces must be fresh."""
    tunings = sm90.HOPPER.tunings
    table = {**tunings.tuned, (case.device.kind, kernel): ((0, tuning),)}
    generation = dataclasses.replace(sm90.HOPPER, tunings=dataclasses.replace(tunings, tuned=table))
    jax.clear_caches()
    try:
        with _generations.using(generation):
            yield
    finally:
        jax.clear_caches()


def _time(kernel: str, problem: Problem, case: Call, rounds: int, choices: Sequence[Tuning]) -> dict[Tuning, float]:
    """Seconds of the direction by tuning, the fastest first. All are printed; of one that fails or is wrong, why."""
    ours = next(one for one in jax_candidates(problem, NAME) if (one.key, one.direction) == ("ours", KERNELS[kernel]))

    def candidate(tuning: Tuning) -> Candidate:
        def compile() -> Run:
            with tuned(case, kernel, tuning):
                return ours.compile()

        return dataclasses.replace(ours, label=str(tuning), compile=compile)

    made = {candidate(tuning): tuning for tuning in choices}
    found = rows({one.name: one.compile for one in made}, judge(made, problem), rounds)
    found = dict(sorted(found.items(), key=lambda item: item[1].get("median_seconds", math.inf)))
    show(found, f"{kernel} kernel, {KERNELS[kernel]}")
    by_name = {one.name: tuning for one, tuning in made.items()}
    return {by_name[name]: row["median_seconds"] for name, row in found.items() if "left_out" not in row}
