"""``python -m benchmarks``: parts that measure on this machine's device, all of which write into one file of it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PARTS = {
    "heads": "log-probability and entropy of a head, beside stored logits and other packages (the default)",
    "losses": "the losses by default: evaluation, gradients, a frozen weight, a checkpoint",
    "options": "what candidates, a floor and linear_logits cost",
    "kl": "divergences of two heads",
    "precision": "float32 operands, by what multiplies them",
    "accuracy": "errors against float64, of this package and of other packages",
    "pipelines": "the kernels of every generation, on a GPU that can run them all",
    "mesh": "the head over all devices of this host",
    "step": "a training step of a transformer, with stored logits and without",
    "session": "those of all these that the file of a GPU lacks, for some minutes",
    "sweep": "the tiles of the Hopper kernels; needs such a GPU",
    "doctor": "whether the kernels are right on this machine",
}
MODULES = dict.fromkeys(
    ("losses", "options", "kl", "precision", "pipelines"), "programs"
)  # of parts whose name is not their module's
# JAX would take three quarters of a GPU's memory at its first use, and leave too little for the peers. But memory that
# is taken piece by piece has no room for the largest array of a step.
MEMORY = {"step": ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 if a row of this package failed or was wrong, else 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    part = given.pop(0) if given and given[0] in PARTS else "heads"
    os.environ.setdefault(*MEMORY.get(part, ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")))
    try:
        command, module = parser(part)
    except ImportError as missing:
        print(f"{missing}: install the extra with pip install --editable '.[bench]'", file=sys.stderr)
        return 2
    options = command.parse_args(given)
    return int(module.run(options)) if part == "session" else _measure(module, command, options)


def _measure(module: ModuleType, command: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The jobs of a part, each written when it is done."""
    from benchmarks import records
    from lce_jax import UnsupportedError

    where = records.device()
    run = records.this_run(options.rounds, where)
    jobs = module.jobs(options, command)
    path: Path = options.out or records.default_path(where["device_kind"])
    try:
        records.read(path, where["device_kind"])
    except ValueError as refusal:
        command.error(f"argument --out: {refusal}")
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    healthy = True
    rows: dict[str, Any] = {}
    for job in jobs:
        try:
            measured = job.measure()
        except UnsupportedError as refusal:
            print(f"{job.key}: {refusal}")
            healthy = False
            continue
        records.merge(path, job.key, measured, run)
        healthy &= measured.healthy
        rows |= measured.rows
    print(f"written: {path}")
    if hasattr(module, "last_line"):
        print(module.last_line(rows))
    return 0 if healthy else 1


def parser(part: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """The command line of a part, and the module that has its jobs."""
    from lce_jax.explain import _arguments

    module = importlib.import_module(f"benchmarks.{MODULES.get(part, part)}")
    out = argparse.ArgumentParser(
        prog=f"python -m benchmarks {part}",
        description=module.__doc__,
        epilog="\n".join(["parts:", *(f"  {name:10s} {what}" for name, what in PARTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--rounds", type=_arguments.positive, default=5, help="timings; the median is shown (default 5)")
    file = "the card's file of JSON, which keeps its other rows (default: bench-out/, named after the card)"
    out.add_argument("--out", type=Path, metavar="FILE", help=file)
    out.set_defaults(part=part)
    module.add_arguments(out)
    return out, module


if __name__ == "__main__":
    sys.exit(main())
