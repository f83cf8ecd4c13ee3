"""``--sweep``: the tiles of the Hopper kernels, timed on one shape; what to enter in the tuned table.

Tuning never happens in a call: winners become data in ``lce_jax/mosaic/_config.py``, by device kind and hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich import box
from rich.table import Table

from lce_jax import UnsupportedError, explain
from lce_jax._types import Case
from lce_jax.bench.candidates import Candidate, jax_candidates
from lce_jax.bench.measure import Run, interleave, median
from lce_jax.bench.problem import Problem, random_problem
from lce_jax.bench.run import admit
from lce_jax.bench.shapes import KERNELS, Shape
from lce_jax.mosaic import NAME, _config
from lce_jax.mosaic._config import Tiles

SNAKES = (4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Swept:
    """What a sweep found for one kernel: seconds of the whole direction by tiles, fastest first; and what was out."""

    kernel: str
    case: Case
    seconds: dict[Tiles, float]
    left_out: dict[str, str]

    @property
    def entry(self) -> str:
        """The line for the tuned table."""
        best = next(iter(self.seconds))
        return f'("{self.case.device_kind}", "{self.kernel}"): (({self.case.hidden_size}, {best}),)'


def sweep(kernels: Sequence[str], shape: Shape, dtype: Any, rounds: int, report: Callable[[str], None]) -> list[Swept]:
    """The kernels in turn: depth, stages and order first, then the snake of the best.

    Raises:
        UnsupportedError: the kernels cannot serve the shape here.
    """
    problem = random_problem(shape, dtype)
    case = explain(*problem.arrays[:3], logit_softcap=shape.head.logit_softcap, implementation=NAME).case
    found = []
    for kernel in kernels:
        first = _time(kernel, depths(case, kernel), problem, case, rounds, report)
        if not first.seconds:
            raise UnsupportedError(f"no tiles of the {kernel} kernel gave right results: {first.left_out}")
        best = next(iter(first.seconds))
        again = [dataclasses.replace(best, snake=snake) for snake in SNAKES]
        second = _time(kernel, again, problem, case, rounds, report)
        # Only timings of one interleaved run are compared: the second run holds the first one's best too.
        found.append(dataclasses.replace(second, left_out=first.left_out | second.left_out))
    return found


def depths(case: Case, kernel: str) -> list[Tiles]:
    """Every depth, number of stages, cluster, order, steps in flight, turns and slots that fit shared memory."""
    staged = _config.stages_output(case, kernel)
    choices = itertools.product((64, 128), range(2, 9), (1, 2), (0, 1), (0, 1), ((1, 2), (2, 1)))
    made = (
        Tiles(tile_k=k, stages=n, cluster=c, minor=m, in_flight=f, turns=turns, slots=slots)
        for k, n, c, m, f, (turns, slots) in choices
    )
    return [one for one in made if one.smem_bytes(case.dtype.itemsize, staged) <= _config.SMEM_LIMIT]


@contextlib.contextmanager
def tuned(case: Case, kernel: str, tiles: Tiles) -> Iterator[None]:
    """Within it, calls on this device kind use ``tiles``. They are read while tracing, so traces must be fresh."""
    key = (case.device_kind, kernel)
    before = _config.TUNED.get(key)
    _config.TUNED[key] = ((0, tiles),)
    jax.clear_caches()
    try:
        yield
    finally:
        if before is None:
            del _config.TUNED[key]
        else:
            _config.TUNED[key] = before
        jax.clear_caches()


def table(swept: Swept) -> Table:
    """All tiles of one kernel, fastest first."""
    out = Table(title=f"{swept.kernel} kernel", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    fields = [field.name for field in dataclasses.fields(Tiles)]
    for name in (*fields, f"{KERNELS[swept.kernel]} ms", "÷ best"):
        out.add_column(name, justify="right")
    best = min(swept.seconds.values())
    for tiles, seconds in swept.seconds.items():
        values = (str(getattr(tiles, name)) for name in fields)
        out.add_row(*values, f"{seconds * 1e3:.3f}", f"{seconds / best:.3f}")
    return out


def _time(
    kernel: str, choices: Sequence[Tiles], problem: Problem, case: Case, rounds: int, report: Callable[[str], None]
) -> Swept:
    rows = {_candidate(kernel, tiles, problem, case): tiles for tiles in choices}
    runs, _, left_out = admit(list(rows), problem, report)
    samples = interleave(
        runs, rounds, on_gpu=True, on_timing=lambda one, done: report(f"round {done + 1} of {rounds}, {one.label}")
    )
    seconds = {rows[one]: median(taken) for one, taken in samples.items()}
    return Swept(kernel, case, dict(sorted(seconds.items(), key=lambda item: item[1])), left_out)


def _candidate(kernel: str, tiles: Tiles, problem: Problem, case: Case) -> Candidate:
    ours = next(one for one in jax_candidates(problem, NAME) if (one.key, one.direction) == ("ours", KERNELS[kernel]))

    def compile() -> Run:
        with tuned(case, kernel, tiles):
            return ours.compile()

    return dataclasses.replace(ours, key=f"{kernel} {tiles}", label=f"{kernel} {tiles}", compile=compile)
