"""Errors against float64 of this package and of its peers, in bfloat16, by the spread of the logits.

    python -m benchmarks accuracy  2,048 tokens, hidden size 4096, vocabulary 32,768 on a GPU; a small shape on a CPU
    python benchmarks/accuracy.py  by dtype, on a CPU, into ``accuracy.json``

The operands are rounded to their dtype first, and the oracle takes the rounded operands. The error of log-probabilities
and entropies is the largest of any token, in nats. The error of a summed loss is divided by the number of tokens. The
error of a gradient is relative by norm.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.candidates import BOTH, Candidate, jax_candidates, materialised, materialised_by_hand  # noqa: E402
from benchmarks.heads import add_shapes, job_arguments  # noqa: E402
from benchmarks.measure import first_line, log  # noqa: E402
from benchmarks.peers import peer_candidates, release  # noqa: E402
from benchmarks.problem import (  # noqa: E402
    GRADIENTS,
    LOGIT_SPREAD,
    Objective,
    Problem,
    Shape,
    cotangents,
    describe_shape,
    random_problem,
    sizes,
    verdict,
)
from benchmarks.records import Job, Measured  # noqa: E402
from lce_jax import linear_logprobs  # noqa: E402
from lce_jax.explain import _arguments  # noqa: E402
from tests import oracle  # noqa: E402

CPU_SHAPE, GPU_SHAPE = (128, 64, 4096), (2048, 4096, 32768)
SPREADS = (1, 3, 8)  # standard deviations of the logits

type Doubles = Mapping[str, np.ndarray]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    add_shapes(command)
    spread = "standard deviation of the logits; repeatable (default: 1, 3 and 8)"
    command.add_argument("--spread", type=_arguments.positive, action="append", help=spread)
    command.add_argument("--no-peers", action="store_true", help="leave out what PyTorch computes")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each shape and spread."""
    more = ["--no-peers"] if options.no_peers else []
    return [
        Job(
            [*job_arguments("accuracy", shape), "--spread", str(spread), *more],
            functools.partial(measure, shape, spread, not options.no_peers),
        )
        for shape in options.shape or [CPU_SHAPE if jax.default_backend() == "cpu" else GPU_SHAPE]
        for spread in options.spread or SPREADS
    ]


def measure(shape: Shape, spread: float, with_peers: bool = True) -> Measured:
    """Prints the errors of each candidate, or the reason why a candidate has none."""
    problem = random_problem(shape, jnp.dtype("bfloat16"), spread)
    candidates = [*jax_candidates(problem, None), *(peer_candidates(problem, is_timed=False) if with_peers else [])]
    candidates = [one for one in candidates if one.direction == BOTH]
    exact: dict[Objective, Doubles] = {}
    rows, healthy = {}, True
    print(f"{describe_shape(shape)}, bfloat16, logits with a standard deviation of {spread}")
    for one in candidates:
        log(f"compiling and checking {one.name}")
        row = _row(one, problem, exact)
        rows[one.name] = row
        errors = ", ".join(f"{name} {error:.1e}" for name, error in row.get("errors", {}).items())
        print(f"{one.label:62s}  {errors or f'left out: {row["left_out"]}'}", flush=True)
        healthy &= not (one.key.startswith("ours") and "left_out" in row)
    release()
    return Measured(rows, {"shape": sizes(shape), "dtype": "bfloat16", "spread": spread}, healthy)


def _row(one: Candidate, problem: Problem, exact: dict[Objective, Doubles]) -> dict[str, Any]:
    """Returns the errors of a candidate against its objective in float64, or the reason why it has none."""
    try:
        run = one.compile()
        results = one.results(run.wait(run.launch()))
    except Exception as failure:
        return {"left_out": first_line(failure)}
    if one.objective not in exact:
        exact[one.objective] = compute_float64(problem, one.objective)
    right = exact[one.objective]
    rounded = {name: jnp.asarray(x, jnp.float32) for name, x in right.items()}
    reason = verdict(results, problem, rounded, one.logits_rounded).reason
    if reason is not None:
        return {"left_out": reason}
    errors = {name: distance(name, x, right[name], len(problem.labels)) for name, x in results.items()}
    return {"key": one.key, "label": one.label, "objective": one.objective, "errors": errors}


def compute_float64(problem: Problem, objective: Objective) -> Doubles:
    """Computes exact results: outputs, their sum, and the gradients of the objective."""
    operands, seeds = problem[:3], cotangents(problem, objective)
    out = oracle.logprobs(*operands)
    dhidden, dweight = oracle.gradients(*operands, (*seeds, jnp.zeros_like(seeds[0])))
    outputs = {name: x for name, x in out._asdict().items() if x is not None}
    return outputs | {"loss": out.logprobs.sum(), "dhidden": dhidden, "dweight": dweight}


def distance(name: str, result: jax.Array, right: np.ndarray, tokens: int) -> float:
    """Returns the error of a result against float64, as in the module's docstring."""
    if name in GRADIENTS:
        return oracle.relative_norm(result, right)
    largest = float(np.max(np.abs(np.asarray(result, np.float64) - right)))
    return largest / tokens if name == "loss" else largest


T, H, V = 256, 256, 32768
DTYPES = ("float32", "bfloat16", "float16")


def ours(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    """Calls this package's implementation that runs on every device."""
    out = linear_logprobs(hidden, weight, labels, implementation="xla")
    return out.logprobs, out.entropy


WAYS = {
    "lce_jax (xla)": ours,
    "logits stored, autodiff": materialised,
    "logits stored, gradient by hand": materialised_by_hand,
}


def errors(way: Any, dtype: str) -> list[float]:
    """Returns the largest absolute errors of the results in nats, and the gradients' errors relative by norm."""
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (T, H)).astype(dtype)
    weight = (LOGIT_SPREAD / H**0.5 * jax.random.normal(keys[1], (V, H))).astype(dtype)
    labels = jax.random.randint(keys[2], (T,), 0, V)
    seeds = [jax.random.normal(key, (T,)) for key in keys[3:]]

    def objective(hidden: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
        out = way(hidden, weight, labels)
        return sum(jnp.sum(seed * x) for seed, x in zip(seeds, out, strict=True)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(hidden, weight)
    exact = oracle.logprobs(hidden, weight, labels)
    exact_gradients = oracle.gradients(hidden, weight, labels, (*seeds, jnp.zeros(T)))
    names = "logprobs", "entropy", *GRADIENTS
    pairs = zip(names, (*out, *gradients), (*exact[:2], *exact_gradients[:2]), strict=True)
    return [float(f"{distance(name, result, right, T):.1e}") for name, result, right in pairs]


def main() -> None:
    """Measures the errors and writes the file."""
    rows = [[f"{dtype}, {name}", *errors(way, dtype)] for dtype in DTYPES for name, way in WAYS.items()]
    run = {
        "command": "python benchmarks/accuracy.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {"device_kind": jax.devices()[0].device_kind, "jax": jax.__version__},
        "shape": {"tokens": T, "hidden_size": H, "vocab_size": V},
        "columns": ["operands", "logprob, nats", "entropy, nats", "dhidden, relative", "dweight, relative"],
        "rows": rows,
    }
    text = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.items())
    (ROOT / "benchmarks" / "accuracy.json").write_text(f"{{{text.replace('], [', '],\n  [')}}}\n")


if __name__ == "__main__":
    main()
