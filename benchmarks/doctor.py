"""Whether the kernels are right on this machine's GPU, and what they cost.

Each check is a call with some options, in a process of its own: a kernel that waits for ever ends one check alone. It
says how far outputs and gradients lie from stored logits in float32, whether they have the same bits in every one of
several runs (a race would show), the times of forward and of both passes beside those of ``xla``, and the memory that
they take. The bounds are those of `benchmarks.problem`. Each check is written to the file when it is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import lce_jax
from benchmarks.measure import Run, compile_jax, interleave, median
from benchmarks.problem import BLOCK_BYTES, Problem, bound, error, random_problem
from benchmarks.records import Job, Measured
from benchmarks.shapes import Shape
from lce_jax import UnsupportedError, _devices
from lce_jax._types import RESULTS
from lce_jax.explain._models import ModelHead

if TYPE_CHECKING:
    from lce_jax._shapes import Array

SECONDS = 600  # that a check may take
REPEATS = 20  # runs whose bits are compared
NAMES = (*RESULTS, "candidate_logprobs")
PART = {"gpu": (1003, 1024, 32768), "cpu": (40, 64, 520)}  # tokens, hidden size, vocabulary
HEAD = {"gpu": (4096, 4096, 151936), "cpu": (64, 64, 1024)}


@dataclasses.dataclass(frozen=True)
class Check:
    """A call."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    is_head: bool = False  # of a model's size
    more_columns: int = 0
    per_token: tuple[str, ...] = ()  # options that are arrays


CHECKS = {
    "plain": Check(),
    "a model's head": Check(is_head=True),
    "float16": Check(dtype="float16"),
    "columns that are no whole atom": Check(more_columns=3),
    "padding": Check({"vocab_size": -100}),
    "softcap, scale, stats": Check({"logit_softcap": 10.0, "logit_scale": 0.5, "stats": True}),
    "temperatures, rows left out": Check(per_token=("temperature", "where")),
    "[H, V]": Check({"weight_layout": "hv"}),
    "a full cache": Check({"cache_bytes": 1 << 40}),
    "part of a cache": Check({"cache_bytes": -2}),
    "candidates": Check(per_token=("candidates",)),
    "a threshold": Check({"gradient_threshold": 2.0**-30}),  # every tile is live, and in the lists
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    names = f"some of {', '.join(map(repr, CHECKS))} (default: all)"
    command.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=names)


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each check."""
    names = options.only or list(CHECKS)
    return [Job(["doctor", "--only", name], functools.partial(_measure, name, options.rounds)) for name in names]


def _measure(name: str, rounds: int) -> Measured:
    found = {"check": name, **_answer(name, rounds, SECONDS)}
    print(line(found), flush=True)
    return Measured({name: found}, healthy="failed" not in found)


def _answer(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """What a check's own process says."""
    command = [sys.executable, "-m", "benchmarks.doctor", name, str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {seconds:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit status {done.returncode}: {done.stderr[-4000:]}"}
    return json.loads(lines[-1])


def line(found: Mapping[str, Any]) -> str:
    """A check in words."""
    if "failed" in found:
        return f"{found['check']}: FAILED: {found['failed'].strip().splitlines()[-1]}"
    times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in found["seconds"].items())
    worst = max(found["errors"][name] / found["bounds"][name] for name in found["errors"])
    return f"{found['check']}: {found['implementation']}, errors up to {worst:.2f} of their bounds, same bits; {times}"


def examine(name: str, rounds: int) -> dict[str, Any]:
    """All that is found out of a check, here."""
    check = CHECKS[name]
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    device = _devices.of(jax.devices()[0])
    about = {"device": device._asdict(), "jax": jax.__version__, "lce_jax": lce_jax.__version__}
    tokens, hidden_size, columns = (HEAD if check.is_head else PART)[platform]
    shape = Shape(tokens, ModelHead(hidden_size, columns + check.more_columns))
    problem = random_problem(shape, jnp.dtype(check.dtype))
    if check.options.get("weight_layout") == "hv":
        problem = problem._replace(weight=problem.weight.T)
    return about | {"shape": [tokens, hidden_size, columns + check.more_columns]} | _compare(check, problem, rounds)


def _compare(check: Check, problem: Problem, rounds: int) -> dict[str, Any]:
    options = options_of(check, problem)
    chosen, refused = _chosen(problem, options)
    ways = {"forward": Objective(False, options, chosen), "both": Objective(True, options, chosen)}
    runs = {way: compile_jax(objective, *problem.arrays) for way, objective in ways.items()}
    results = {way: run.wait(run.launch()) for way, run in runs.items()}
    right = _right(problem, options)
    largest = float(jnp.maximum(jnp.max(right["max_logit"]), -jnp.min(right["min_logit"])))
    found = results["forward"] | results["both"]
    errors = {name: error(name, x, right[name]) for name, x in found.items()}
    bounds = {name: bound(name, x, problem, False, largest) for name, x in found.items()}
    answer: dict[str, Any] = {"implementation": chosen, "refused": refused, "errors": errors, "bounds": bounds}
    wrong = [name for name in errors if not errors[name] <= bounds[name]]  # also where it is NaN
    if wrong:
        answer["failed"] = f"wrong: {', '.join(f'{x} by {errors[x]:.2g}, bound {bounds[x]:.2g}' for x in wrong)}"
    unequal = [way for way, run in runs.items() if not _same_bits(run, results[way])]
    if unequal:
        answer["failed"] = f"{answer.get('failed', '')} other bits in another run: {', '.join(unequal)}".strip()
    plan = lce_jax.explain(*problem.arrays[:3], implementation=chosen, **options)
    answer["bytes"] = {way: run.temp_bytes for way, run in runs.items()}
    answer["planned_bytes"] = {"forward": plan.forward_bytes, "backward": plan.backward_bytes, "kept": plan.kept_bytes}
    return answer | {"seconds": _seconds(problem, options, chosen, runs, rounds)}


def _chosen(problem: Problem, options: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The kernels where they serve the call, whether by name alone or not; else ``xla``, and why."""
    try:
        lce_jax.explain(*problem.arrays[:3], implementation="mosaic_gpu", **options)
    except UnsupportedError as refusal:
        return "xla", {"mosaic_gpu": str(refusal)}
    return "mosaic_gpu", {}


def options_of(check: Check, problem: Problem) -> dict[str, Any]:
    """The options, with sizes that follow from the shape, and arrays."""
    tokens, columns = problem.shape.tokens, problem.shape.head.vocab_size
    options = dict(check.options)
    if "vocab_size" in options:
        options["vocab_size"] += columns
    if options.get("cache_bytes", 0) < 0:  # a part of all
        options["cache_bytes"] = tokens * columns * problem.hidden.dtype.itemsize // -options["cache_bytes"]
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = {
        "temperature": jax.random.uniform(keys[0], (tokens,), minval=0.5, maxval=2.0),
        "where": jax.random.bernoulli(keys[1], 0.7, (tokens,)),
        "candidates": jax.random.randint(keys[2], (tokens, 5), -1, columns, jnp.int32),
    }
    return options | {name: arrays[name] for name in check.per_token}


class Objective:
    """The outputs; or both gradients of a weighted sum of them."""

    def __init__(self, both: bool, options: Mapping[str, Any], implementation: str) -> None:
        self.both, self.options, self.implementation = both, options, implementation

    def __call__(self, hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Array]:
        """By name."""

        def outputs(hidden: Array, weight: Array) -> Any:
            return lce_jax.linear_logprobs(hidden, weight, labels, implementation=self.implementation, **self.options)

        def loss(hidden: Array, weight: Array) -> Array:
            out = outputs(hidden, weight)
            more = 0.0 if out.candidate_logprobs is None else jnp.sum(a[:, None] * _finite(out.candidate_logprobs))
            return jnp.sum(a * out.logprobs + b * jnp.asarray(out.entropy)) + more

        if self.both:
            return dict(zip(("dhidden", "dweight"), jax.grad(loss, (0, 1))(hidden, weight), strict=True))
        out = outputs(hidden, weight)
        return {name: _finite(getattr(out, name)) for name in NAMES if getattr(out, name) is not None}


def _finite(x: Array) -> Array:
    """-inf, of a candidate that is none, as 0."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _right(problem: Problem, options: Mapping[str, Any]) -> dict[str, Array]:
    """From stored logits in float32, a block of tokens at a time so that they fit."""
    weight, rows = problem.weight.astype(jnp.float32), max(1, BLOCK_BYTES // (4 * problem.shape.head.vocab_size))
    exact = {name: value for name, value in options.items() if name not in ("cache_bytes", "gradient_threshold")}
    exact |= {"stats": True}
    parts = []
    for start in range(0, problem.shape.tokens, rows):
        there = slice(start, start + rows)
        given = {name: x[there] if isinstance(x, jax.Array) else x for name, x in exact.items()}
        tokens = (x[there] for x in (problem.labels, problem.logprob_weight, problem.entropy_weight))
        operands = problem.hidden[there].astype(jnp.float32), weight, *tokens
        ways = [jax.jit(Objective(both, given, "reference"))(*operands) for both in (False, True)]
        parts.append(ways[0] | ways[1])
    joined = {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0] if name != "dweight"}
    return joined | {"dweight": sum((part["dweight"] for part in parts[1:]), parts[0]["dweight"])}


def _same_bits(run: Run, first: dict[str, Array]) -> bool:
    again = (run.wait(run.launch()) for _ in range(REPEATS))
    return all(bool(jnp.array_equal(x, first[name])) for one in again for name, x in one.items())


def _seconds(
    problem: Problem, options: Mapping[str, Any], chosen: str, runs: Mapping[str, Run], rounds: int
) -> dict[str, float]:
    """Of both passes, beside those of ``xla``."""
    timed = dict(runs)
    if chosen != "xla":
        beside = {way: Objective(way == "both", options, "xla") for way in runs}
        timed |= {f"{way}, xla": compile_jax(objective, *problem.arrays) for way, objective in beside.items()}
    samples = interleave(timed, rounds, jax.default_backend() == "gpu")
    return {way: median(each) for way, each in samples.items()}


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1], int(sys.argv[2]))))
