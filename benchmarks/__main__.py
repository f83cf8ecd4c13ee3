"""``python -m benchmarks``: measures on this machine's device. All parts write into one file for the device."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PARTS = {
    "heads": "log-probability and entropy of a head, compared with stored logits and other packages (the default)",
    "losses": "the losses without options: evaluation, gradients, a frozen weight, a checkpoint",
    "options": "the cost of candidates, of a floor and of linear_logits",
    "kl": "divergences of two heads",
    "precision": "float32 operands, by the precision of the products",
    "accuracy": "errors against float64, of this package and of other packages",
    "pipelines": "the kernels of every generation, on a GPU that can run them all",
    "mesh": "the head over all devices of this host",
    "step": "a training step of a transformer, with stored logits and without",
    "session": "jobs of these parts that a GPU's file does not have yet, for some minutes",
    "sweep": "the tiles of the Hopper kernels; needs a Hopper GPU",
    "doctor": "checks that the kernels are right on this machine",
}
# The modules of parts that do not have a module of their own name.
MODULES = dict.fromkeys(("losses", "options", "kl", "precision", "pipelines"), "programs")
# By default JAX allocates three quarters of a GPU's memory at its first use, which leaves too little for the peers. A
# training step needs that allocation, because memory allocated piece by piece has no room for the step's largest array.
MEMORY = {"step": ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes. Returns 1 if a row of this package failed or was wrong, else 0."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    part = arguments.pop(0) if arguments and arguments[0] in PARTS else "heads"
    os.environ.setdefault(*MEMORY.get(part, ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")))
    try:
        command, module = parser(part)
    except ImportError as missing:
        print(f"{missing}: install the extra with pip install --editable '.[bench]'", file=sys.stderr)
        return 2
    options = command.parse_args(arguments)
    return int(module.run(options)) if part == "session" else _measure(module, command, options)


def _measure(module: ModuleType, command: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Runs the jobs of a part. Each job's rows are written when it is done."""
    from benchmarks import records
    from lce_jax import UnsupportedError

    device = records.device()
    run = records.describe_run(options.rounds, device)
    jobs = module.jobs(options, command)
    path: Path = options.out or records.default_path(device["device_kind"])
    try:
        records.read(path, device["device_kind"])
    except ValueError as refusal:
        command.error(f"argument --out: {refusal}")
    print(", ".join(f"{name} {value}" for name, value in device.items()), flush=True)
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
    if hasattr(module, "summarize"):
        print(module.summarize(rows))
    return 0 if healthy else 1


def parser(part: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """Returns the parser of a part's command line, and the module that has its jobs."""
    from lce_jax.explain import _arguments

    module = importlib.import_module(f"benchmarks.{MODULES.get(part, part)}")
    out = argparse.ArgumentParser(
        prog=f"python -m benchmarks {part}",
        description=module.__doc__,
        epilog="\n".join(["parts:", *(f"  {name:10s} {purpose}" for name, purpose in PARTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--rounds", type=_arguments.positive, default=5, help="timings; the median is shown (default 5)")
    file = "the card's JSON file, whose other rows stay (default: in bench-out/, named after the card)"
    out.add_argument("--out", type=Path, metavar="FILE", help=file)
    out.set_defaults(part=part)
    module.add_arguments(out)
    return out, module


if __name__ == "__main__":
    sys.exit(main())
