"""Checks that the kernels are right on this machine's GPU, and measures their time and memory.

Each check is a call with some options, in its own process, so that a kernel that never ends stops only one check. A
check reports

- the errors of outputs and gradients against stored logits in float32, with the bounds of `benchmarks.problem`,
- whether the bits are the same in each of several runs, which would show a race,
- the times of the forward and of both passes, also of ``xla``, and their memory.

Each check is written to the file when it is done. On a first call, kernels that have run only on another card are
usually compared with ``xla``; here they run without that comparison, so that errors are seen. The last line says
whether to rely on this machine, what runs there, and what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import lce_jax
from benchmarks.measure import Run, compile_jax, interleave
from benchmarks.problem import GRADIENTS, Problem, random_problem, reference, verdict, weighted
from benchmarks.programs import use_kernels
from benchmarks.records import Job, Measured
from lce_jax import UnsupportedError
from lce_jax.call import _remembered
from lce_jax.call._dispatch import current_device
from lce_jax.mosaic import _generations
from lce_jax.types._types import Device

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

SECONDS = 600  # the most that a check may take
REPEATS = 20  # runs whose bits are compared
NAMES = ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared", "candidate_logprobs")
PART = {"gpu": (1003, 1024, 32768), "cpu": (40, 64, 520)}  # tokens, hidden size, vocabulary
HEAD = {"gpu": (4096, 4096, 151936), "cpu": (64, 64, 1024)}


@dataclasses.dataclass(frozen=True)
class Check:
    """One call to check."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    is_head: bool = False  # whether the shape is that of a model's head
    is_transposed: bool = False  # whether the weight is [H, V]
    more_columns: int = 0
    per_token: tuple[str, ...] = ()  # options that are arrays with one entry per token


CHECKS = {
    "plain": Check(),
    "a model's head": Check(is_head=True),
    "float16": Check(dtype="float16"),
    "columns that are no whole atom": Check(more_columns=3),
    "padding": Check({"vocab_size": -100}),
    "softcap, scale, stats": Check({"logit_softcap": 10.0, "logit_scale": 0.5, "stats": True}),
    "temperatures, rows left out": Check(per_token=("temperature", "where")),
    "[H, V]": Check(is_transposed=True),
    "a full cache": Check({"cache_bytes": 1 << 40}),
    "part of a cache": Check({"cache_bytes": -2}),
    "candidates": Check(per_token=("candidates",)),
    "a threshold": Check({"gradient_threshold": 2.0**-30}),  # every tile is active, and in the lists
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    names = f"some of {', '.join(map(repr, CHECKS))} (default: all)"
    command.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=names)


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each check."""
    device = current_device()
    print(describe_kernels(device), flush=True)
    if (generation := _generations.serving(device)) is not None and generation.ran_on is not None:
        print(*_remembered.report(), sep="\n", flush=True)
    names = options.only or list(CHECKS)
    return [Job(["doctor", "--only", name], functools.partial(_measure, name, options.rounds)) for name in names]


def describe_kernels(device: Device) -> str:
    """Returns which kernels run on a device, whether they ran before, and which file to send."""
    generation = _generations.serving(device)
    if generation is None:
        return f"{device.kind or device.platform} has no kernels: xla runs"
    name = f"the kernels for compute capability {' and '.join(generation.compute_capabilities)}"
    if generation.ran_on is None:
        return f"{device.kind}: {name}"
    advice = "send the written file and the printed lines, right or wrong: nobody has run them on such a card"
    return f"{device.kind}: {name}, whose source ran on {generation.ran_on}; {advice}"


def summarize(rows: Mapping[str, Any]) -> str:
    """Returns the last line of the command."""
    return summary(rows, current_device())


def _measure(name: str, rounds: int) -> Measured:
    row = {"check": name, **_run_check(name, rounds)}
    print(line(row), flush=True)
    return Measured({name: row}, healthy="failed" not in row)


def _run_check(name: str, rounds: int) -> dict[str, Any]:
    """Runs a check in its own process, and returns its results."""
    command = [sys.executable, "-m", "benchmarks.doctor", name, str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {SECONDS:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit status {done.returncode}: {done.stderr[-4000:]}"}
    return json.loads(lines[-1])


def summary(rows: Mapping[str, Mapping[str, Any]], device: Device) -> str:
    """Returns the verdict after all checks: whether to rely on the device, what runs there, and what to do."""
    failed = {name: row for name, row in rows.items() if "failed" in row}
    where = f"verdict: {device.kind or device.platform}"
    if failed:
        only_xla = all(row.get("implementation") == "xla" for row in failed.values())
        advice = "Do not train on this machine" if only_xla else 'Pass implementation="xla" to every call'
        names = f"{len(failed)} of {len(rows)} checks FAILED: {', '.join(map(repr, failed))}"
        return f"{where}: {names}. {advice}, and send the written file."
    implementations = [row["implementation"] for row in rows.values()]
    shares = ", ".join(f"{implementations.count(name)} by {name}" for name in dict.fromkeys(implementations))
    return f"{where} works: {len(rows)} of {len(rows)} checks are right, {shares}. {_advise(device)}"


def _advise(device: Device) -> str:
    """Returns what to install so that kernels run, on a machine that could run them."""
    install = "in the checkout, pip install --editable '.[cuda13]'"
    reason = _generations.device_refusal(device)
    if reason is None:
        return "Nothing to do."
    if device.platform == "cpu" and shutil.which("nvidia-smi"):
        return f"This machine has nvidia-smi, but JAX does not see a GPU: {install}."
    if jax.__version_info__ < _generations.JAX_OF_THE_KERNELS and device.platform == "gpu":
        return f"The kernels {reason.replace('needs', 'need', 1)}: {install}."
    return f"Nothing to do: a kernel {reason}."


def line(row: Mapping[str, Any]) -> str:
    """Returns the results of a check in words."""
    if "failed" in row:
        return f"{row['check']}: FAILED: {row['failed'].strip().splitlines()[-1]}"
    times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in row["seconds"].items())
    worst = max(row["errors"][name] / row["bounds"][name] for name in row["errors"])
    return f"{row['check']}: {row['implementation']}, errors up to {worst:.2f} of their bounds, same bits; {times}"


def examine(name: str, rounds: int) -> dict[str, Any]:
    """Runs a check in this process, and returns its results."""
    check, generation = CHECKS[name], _generations.serving(current_device())
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    tokens, hidden_size, columns = (HEAD if check.is_head else PART)[platform]
    shape = tokens, hidden_size, columns + check.more_columns
    problem = random_problem(shape, jnp.dtype(check.dtype))
    with use_kernels(generation) if generation else contextlib.nullcontext():
        return {"shape": list(shape)} | _compare(check, problem, rounds)


def _compare(check: Check, problem: Problem, rounds: int) -> dict[str, Any]:
    options = make_options(check, problem)
    exact = {name: x for name, x in options.items() if name not in ("cache_bytes", "gradient_threshold", "stats")}
    right = reference(problem, *problem[3:], **exact)
    if check.is_transposed:
        problem, options = problem._replace(weight=problem.weight.T), options | {"weight_layout": "hv"}
        right["dweight"] = right["dweight"].T
    chosen, refused = _choose(problem, options)
    runs = {way: compile_jax(program, *problem) for way, program in programs(chosen, options).items()}
    results = {way: run.wait(run.launch()) for way, run in runs.items()}
    judged = verdict(results["forward"] | results["both"], problem, right)
    unequal = [way for way, run in runs.items() if not _same_bits(run, results[way])]
    plan = lce_jax.explain(*problem[:3], implementation=chosen, **options)
    if chosen != "xla":
        runs |= {f"{way}, xla": compile_jax(one, *problem) for way, one in programs("xla", options).items()}
    failed: dict[str, str] = {}
    seconds = {way: statistics.median(samples) for way, samples in interleave(runs, rounds, failed).items()}
    reasons = [judged.reason] if judged.reason else []
    reasons += [f"other bits in another run: {', '.join(unequal)}"] if unequal else []
    reasons += failed.values()
    return ({"failed": "; ".join(reasons)} if reasons else {}) | {
        "implementation": chosen,
        "refused": refused,
        "errors": judged.errors,
        "bounds": judged.bounds,
        "bytes": {way: run.temp_bytes for way, run in runs.items()},
        "planned_bytes": {"forward": plan.forward_bytes, "backward": plan.backward_bytes, "kept": plan.kept_bytes},
        "seconds": seconds,
    }


def _choose(problem: Problem, options: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the kernels if they can serve the call; else ``xla``, with the reason."""
    try:
        lce_jax.explain(*problem[:3], implementation="mosaic_gpu", **options)
    except UnsupportedError as refusal:
        return "xla", {"mosaic_gpu": str(refusal)}
    return "mosaic_gpu", {}


def make_options(check: Check, problem: Problem) -> dict[str, Any]:
    """Returns the options of a check, with sizes that depend on the shape, and with arrays."""
    tokens, columns = len(problem.labels), len(problem.weight)
    options = dict(check.options)
    if "vocab_size" in options:
        options["vocab_size"] += columns
    if options.get("cache_bytes", 0) < 0:  # a part of all tiles
        options["cache_bytes"] = tokens * columns * problem.hidden.dtype.itemsize // -options["cache_bytes"]
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = {
        "temperature": jax.random.uniform(keys[0], (tokens,), minval=0.5, maxval=2.0),
        "where": jax.random.bernoulli(keys[1], 0.7, (tokens,)),
        "candidates": jax.random.randint(keys[2], (tokens, 5), -1, columns, jnp.int32),
    }
    return options | {name: arrays[name] for name in check.per_token}


def programs(implementation: str, options: Mapping[str, Any]) -> dict[str, Callable[..., dict[str, Array]]]:
    """Returns two functions: one of the outputs by name, and one of the gradients of their weighted sum."""

    def forward(hidden: Array, weight: Array, labels: Array, *_: Array) -> dict[str, Array]:
        out = lce_jax.linear_logprobs(hidden, weight, labels, implementation=implementation, **options)
        return {name: getattr(out, name) for name in NAMES if getattr(out, name) is not None}

    def both(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Array]:
        def loss(hidden: Array, weight: Array) -> Array:
            return weighted(forward(hidden, weight, labels), a, b)

        return dict(zip(GRADIENTS, jax.grad(loss, (0, 1))(hidden, weight), strict=True))

    return {"forward": forward, "both": both}


def _same_bits(run: Run, first: dict[str, Array]) -> bool:
    repeats = (run.wait(run.launch()) for _ in range(REPEATS))
    return all(bool(jnp.array_equal(x, first[name])) for one in repeats for name, x in one.items())


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1], int(sys.argv[2]))))
