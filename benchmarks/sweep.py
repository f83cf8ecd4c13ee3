"""The tunings of the Hopper kernels, timed on one shape; what to enter in the tuned table.

Tuning never happens in a call: winners become data in ``lce_jax/mosaic/sm90/_tuning.py``, by device and hidden size.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich import box
from rich.table import Table

from benchmarks import heads, programs, report
from benchmarks.candidates import Candidate, jax_candidates
from benchmarks.measure import Run, first_line, interleave, median
from benchmarks.problem import Problem, random_problem
from benchmarks.records import Job, Measured
from benchmarks.run import admit
from benchmarks.shapes import KERNELS, Shape
from lce_jax import UnsupportedError, explain
from lce_jax._types import Case
from lce_jax.mosaic import NAME, _generations, sm90
from lce_jax.mosaic.common._tiles import SMEM_LIMIT
from lce_jax.mosaic.sm90._tuning import Tuning, stages_output

STEPS: tuple[dict[str, Sequence[int]], ...] = (
    {"tile_k": (64, 128), "stages": range(2, 9), "turns": (1, 2), "slots": (1, 2)},
    {"cluster": (1, 2), "minor": (0, 1), "in_flight": (0, 1)},
    {"snake": (4, 8, 16, 32)},
)


@dataclasses.dataclass(frozen=True)
class Swept:
    """What a sweep found for one kernel: seconds of the whole direction by tuning, fastest first; and what was out."""

    kernel: str
    case: Case
    seconds: dict[Tuning, float]
    left_out: dict[str, str]

    @property
    def entry(self) -> str:
        """The line for the tuned table."""
        best = next(iter(self.seconds))
        return f'("{self.case.device.kind}", "{self.kernel}"): (({self.case.hidden_size}, {best}),)'


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    heads.add_shapes(command)
    command.add_argument("--kernel", choices=KERNELS, action="append", help="repeatable (default: all)")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each kernel and shape."""
    dtype = programs.dtype_of(options)
    return [
        Job(
            [*heads.arguments_of(shape, dtype, "sweep"), "--kernel", kernel],
            functools.partial(_measure, kernel, shape, dtype, options.rounds),
        )
        for shape in heads.chosen_shapes(options)
        for kernel in options.kernel or KERNELS
    ]


def _measure(kernel: str, shape: Shape, dtype: Any, rounds: int) -> Measured:
    out = report.console()
    out.print(f"{shape}, {dtype.name}", style="bold")
    try:
        with out.status("") as status:
            (found,) = sweep([kernel], shape, dtype, rounds, status.update if out.is_terminal else heads.log)
    except UnsupportedError as refusal:
        out.print(f"cannot sweep: {refusal}", highlight=False, soft_wrap=True)
        return Measured({kernel: {"left_out": str(refusal)}}, healthy=False)
    out.print(table(found))
    out.print(found.entry, highlight=False, soft_wrap=True)
    for name, reason in found.left_out.items():
        out.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    about = {"shape": dataclasses.asdict(shape), "dtype": dtype.name}
    return Measured({kernel: {"entry": found.entry, "median_seconds": min(found.seconds.values())}}, about)


def sweep(kernels: Sequence[str], shape: Shape, dtype: Any, rounds: int, report: Callable[[str], None]) -> list[Swept]:
    """Sweeps the kernels in turn. Each starts from its own tuning; each step varies a few fields of the best so far.

    Only timings of one interleaved run are compared, so a step times the best of the step before it again.

    Raises:
        UnsupportedError: the kernels cannot serve the shape here.
    """
    problem = random_problem(shape, dtype)
    case = explain(*problem.arrays[:3], logit_softcap=shape.head.logit_softcap, implementation=NAME).case
    found = []
    for kernel in kernels:
        best = sm90.KERNELS.tunings.of(case, kernel)
        left_out: dict[str, str] = {}
        for step in STEPS:
            swept = _time(kernel, around(case, kernel, best, step), problem, case, rounds, report)
            left_out |= swept.left_out
            if not swept.seconds:
                raise UnsupportedError(f"no tuning of the {kernel} kernel gave right results: {left_out}")
            best = next(iter(swept.seconds))
        found.append(dataclasses.replace(swept, left_out=left_out))
    return found


def around(case: Case, kernel: str, tuning: Tuning, fields: dict[str, Sequence[int]]) -> list[Tuning]:
    """``tuning`` with every choice of the fields that is valid and fits shared memory."""
    made = []
    for values in itertools.product(*fields.values()):
        with contextlib.suppress(ValueError):  # raised by choices that exclude each other
            made.append(dataclasses.replace(tuning, **dict(zip(fields, values, strict=True))))
    staged = stages_output(case, kernel)
    return [one for one in made if one.smem_bytes(case.dtype.itemsize, staged) <= SMEM_LIMIT]


@contextlib.contextmanager
def tuned(case: Case, kernel: str, tuning: Tuning) -> Iterator[None]:
    """Within it, calls on this device kind use ``tuning``. It is read while tracing, so traces must be fresh."""
    tunings = sm90.KERNELS.tunings
    table = {**tunings.tuned, (case.device.kind, kernel): ((0, tuning),)}
    kernels = dataclasses.replace(sm90.KERNELS, tunings=dataclasses.replace(tunings, tuned=table))
    jax.clear_caches()
    try:
        with _generations.using(kernels):
            yield
    finally:
        jax.clear_caches()


def table(swept: Swept) -> Table:
    """All tunings of one kernel, fastest first."""
    out = Table(title=f"{swept.kernel} kernel", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    fields = [field.name for field in dataclasses.fields(Tuning)]
    for name in (*fields, f"{KERNELS[swept.kernel]} ms", "÷ best"):
        out.add_column(name, justify="right")
    best = min(swept.seconds.values())
    for tuning, seconds in swept.seconds.items():
        values = (str(getattr(tuning, name)) for name in fields)
        out.add_row(*values, f"{seconds * 1e3:.3f}", f"{seconds / best:.3f}")
    return out


def _time(
    kernel: str, choices: Sequence[Tuning], problem: Problem, case: Case, rounds: int, report: Callable[[str], None]
) -> Swept:
    rows = {_candidate(kernel, tuning, problem, case): tuning for tuning in choices}
    runs, _, left_out = admit(list(rows), problem, report)

    def leave_out(one: Candidate, failure: Exception) -> None:
        left_out[one.name] = first_line(failure)

    def on_timing(one: Candidate, done: int) -> None:
        report(f"round {done + 1} of {rounds}, {one.label}")

    samples = interleave(runs, rounds, on_gpu=True, on_timing=on_timing, on_failure=leave_out)
    seconds = {rows[one]: median(taken) for one, taken in samples.items()}
    return Swept(kernel, case, dict(sorted(seconds.items(), key=lambda item: item[1])), left_out)


def _candidate(kernel: str, tuning: Tuning, problem: Problem, case: Case) -> Candidate:
    ours = next(one for one in jax_candidates(problem, NAME) if (one.key, one.direction) == ("ours", KERNELS[kernel]))

    def compile() -> Run:
        with tuned(case, kernel, tuning):
            return ours.compile()

    return dataclasses.replace(ours, key=f"{kernel} {tuning}", label=f"{kernel} {tuning}", compile=compile)
