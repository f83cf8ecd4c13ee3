"""One shape from operands to rows: compile and check each candidate, time the right ones, record why others are out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.candidates import Candidate, jax_candidates
from benchmarks.measure import Run, first_line, interleave, median, spread
from benchmarks.peers import peer_candidates, release
from benchmarks.problem import Objective, Problem, Reference, random_problem, reference, refusal
from benchmarks.shapes import BOTH, DIRECTIONS, ROWS, TOPK, Shape
from benchmarks.text import THRESHOLD, text_problem
from benchmarks.text import left_out as left_out_of_gradients
from benchmarks.topk import topk_candidates


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one candidate."""

    key: str
    label: str
    direction: str
    objective: str
    seconds: list[float]  # per call, one sample per round
    temp_bytes: int
    compile_seconds: float
    errors: dict[str, float]  # of each result, as `problem.error` defines it
    skipped: float | None = None  # share of the tiles that a threshold leaves out of the gradients; None: no threshold
    dropped_mass: float | None = None  # the probability in them, mean over the tokens

    @property
    def median(self) -> float:
        """Seconds per call."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range of the samples, as a fraction of the median."""
        return spread(self.seconds)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All rows of one shape, in the table's order, and the candidates left out with the reasons."""

    shape: Shape
    dtype: str
    rows: list[Row]
    left_out: dict[str, str]
    data: str = "random"

    def row(self, key: str, direction: str) -> Row | None:
        """The row of a candidate, if it was timed."""
        return next((row for row in self.rows if (row.key, row.direction) == (key, direction)), None)

    def ratio(self, row: Row, key: str, direction: str) -> float | None:
        """The time of ``row`` over that of another row; None if the other was not timed."""
        other = self.row(key, direction)
        return None if other is None else row.median / other.median

    def useful_flops(self, row: Row) -> int:
        """Operations of the products that the results need: one forward, three with gradients. Recompute is extra."""
        return self.shape.product_flops * (3 if row.direction == BOTH else 1)


def _silent(message: str) -> None:
    del message


def measure(
    shape: Shape,
    dtype: Any,
    implementation: str | None,
    rounds: int,
    report: Callable[[str], None] = _silent,
    with_peers: bool = True,
    devices: int = 1,
    text: bool = False,
    wanted: Sequence[str] | None = None,
) -> Measurement:
    """Everything about one shape; with ``text``, on data like a language model's, and with a threshold too.

    ``wanted`` are the rows, of `shapes.ROWS` and `shapes.PEERS`, to time beside "ours" and the bare product; None: all.
    """
    report(f"{shape}: drawing operands")
    problem = text_problem(shape, dtype) if text else random_problem(shape, dtype)
    peers, left_out = peer_candidates(problem, wanted) if with_peers else ([], {})
    ours = jax_candidates(problem, implementation, devices, THRESHOLD if text else 0.0)
    candidates = [one for one in ours + topk_candidates(problem) + peers if _is_wanted(one, wanted)]
    runs, errors, refused = admit(candidates, problem, report)

    def leave_out(one: Candidate, failure: Exception) -> None:
        refused[one.name] = first_line(failure)

    seconds = interleave(
        runs,
        rounds,
        on_gpu=jax.default_backend() == "gpu",
        on_timing=lambda one, done: report(f"{shape}: round {done + 1} of {rounds}, {one.name}"),
        on_failure=leave_out,
    )
    thresholds = [one for one in runs if one.key.startswith("ours threshold")]
    left_out_by_it = left_out_of_gradients(problem, THRESHOLD, implementation) if thresholds else ()
    rows = [
        Row(
            one.key,
            one.label,
            one.direction,
            one.objective,
            seconds[one],
            runs[one].temp_bytes,
            runs[one].compile_seconds,
            errors[one],
            *(left_out_by_it if one in thresholds else ()),
        )
        for one in seconds
    ]
    release()
    return Measurement(shape, jax.numpy.dtype(dtype).name, rows, left_out | refused, "text" if text else "random")


def _is_wanted(one: Candidate, wanted: Sequence[str] | None) -> bool:
    """Rows of the top k are chosen together, others by their key."""
    name = TOPK if one.direction == TOPK else one.key
    return wanted is None or name in wanted or name not in ROWS


def admit(
    candidates: Sequence[Candidate], problem: Problem, report: Callable[[str], None] = _silent
) -> tuple[dict[Candidate, Run], dict[Candidate, dict[str, float]], dict[str, str]]:
    """Compiles and runs each candidate once: those whose results are right, their errors, and why the others are out.

    A candidate that runs out of memory or fails to compile is left out with that reason, and the rest goes on.
    """
    of_topk = {one.objective for one in candidates if one.direction == TOPK}
    references: dict[Objective, Reference] = {}
    runs: dict[Candidate, Run] = {}
    errors: dict[Candidate, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for one in sorted(candidates, key=lambda one: DIRECTIONS.index(one.direction)):
        report(f"{problem.shape}: compiling and checking {one.name}")
        if one.objective not in references:
            references[one.objective] = reference(problem, one.objective, topk=one.objective in of_topk)
        try:
            run = one.compile()
            results = one.results(run.wait(run.launch()))
        except Exception as failure:
            refused[one.name] = first_line(failure)
            continue
        reason, found = refusal(results, problem, references[one.objective], one.logits_rounded, one.gradient_slack)
        if reason is None:
            runs[one], errors[one] = run, found
        else:
            refused[one.name] = reason
    return runs, errors, refused
