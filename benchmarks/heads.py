"""Log-probability and entropy of a head: this package, stored logits and other packages."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import jax

from benchmarks import text
from benchmarks.candidates import BOTH, DIRECTIONS, FORWARD, jax_candidates, judge
from benchmarks.measure import rows, show
from benchmarks.peers import peer_candidates, release
from benchmarks.problem import CPU_SHAPES, GPU_SHAPES, Shape, default_dtype, describe_shape, random_problem, sizes
from benchmarks.records import Job, Measured
from lce_jax.call import _dispatch
from lce_jax.explain import _arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    add_shapes(command)
    known = _dispatch.IMPLEMENTATIONS
    command.add_argument("--implementation", choices=known, help="default: the best for this device")
    data = "random logits, or those of a language model with a gradient threshold too (default: random)"
    command.add_argument("--data", choices=("random", "text"), default="random", help=data)
    command.add_argument("--no-peers", action="store_true", help="leave out what PyTorch computes")


def add_shapes(command: argparse.ArgumentParser) -> None:
    """Adds the option for the shapes of heads."""
    shape = "tokens, hidden size, vocabulary; repeatable"
    command.add_argument("--shape", type=_arguments.shape, action="append", metavar="T,H,V", help=shape)


def shapes_here() -> tuple[Shape, ...]:
    """Returns the default shapes for this device."""
    return CPU_SHAPES if jax.default_backend() == "cpu" else GPU_SHAPES


def job_arguments(part: str, shape: Shape) -> list[str]:
    """Returns the arguments that repeat a job."""
    return [part, "--shape", ",".join(map(str, shape))]


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each shape."""
    more = ["--no-peers"] if options.no_peers else []
    more += ["--implementation", options.implementation] if options.implementation else []
    more += ["--data", options.data] if options.data != "random" else []
    return [
        Job([*job_arguments("heads", shape), *more], functools.partial(_measure, shape, options))
        for shape in options.shape or shapes_here()
    ]


def _measure(shape: Shape, options: argparse.Namespace) -> Measured:
    arguments = options.implementation, options.rounds, not options.no_peers, options.data == "text"
    return measure(shape, default_dtype(), *arguments)


def measure(
    shape: Shape,
    dtype: Any,
    implementation: str | None,
    rounds: int,
    with_peers: bool = True,
    is_text: bool = False,
) -> Measured:
    """Times and prints one shape; with ``is_text``, on data like a language model's, and with a threshold too."""
    problem = (text.text_problem if is_text else random_problem)(shape, dtype)
    candidates = jax_candidates(problem, implementation, text.THRESHOLD if is_text else 0.0)
    candidates += peer_candidates(problem) if with_peers else []
    candidates.sort(key=lambda one: DIRECTIONS.index(one.direction))
    measured = rows({one.name: one.compile for one in candidates}, judge(candidates, problem), rounds)
    release()
    timed = {(row["key"], row["direction"]): row for row in measured.values() if "left_out" not in row}
    for (_, way), row in timed.items():
        products = 3 if way == BOTH else 1  # those that the results need; recomputed products are not counted
        row["useful_flops_per_second"] = products * 2 * math.prod(shape) / row["median_seconds"]
    thresholds = [row for (key, _), row in timed.items() if key.startswith("ours threshold")]
    skipped = text.measure_skipped(problem, implementation) if thresholds else {}
    for row in thresholds:
        row |= skipped
    about = {"shape": sizes(shape), "dtype": dtype.name, "data": "text" if is_text else "random"}
    show(measured, f"{describe_shape(shape)}, {dtype.name}, {about['data']}")
    return Measured(measured, about, {("ours", way) for way in (FORWARD, BOTH)} <= {*timed})
