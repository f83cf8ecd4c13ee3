"""``lce-jax bench``: this package against stored logits and against its peers, on this machine's device."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lce_jax import UnsupportedError, _dispatch, explain
from lce_jax.bench import shapes
from lce_jax.explain import _arguments
from lce_jax.explain._models import MODELS

DTYPES = ("bfloat16", "float16", "float32")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="lce-jax bench",
        description="Log-probability and entropy of a head: this package against stored logits and against its peers.",
    )
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    models = f"a model's head: {', '.join(MODELS)}; repeatable"
    out.add_argument("--model", choices=MODELS, metavar="NAME", help=models, **repeatable)
    out.add_argument(
        "--shape",
        type=_arguments.shape,
        metavar="T,H,V",
        help="tokens, hidden size, vocabulary; repeatable",
        **repeatable,
    )
    out.add_argument(
        "--tokens", type=_arguments.positives, default=(), metavar="T,T,...", help="time every head at each of these"
    )
    out.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 elsewhere")
    out.add_argument("--implementation", choices=_dispatch.IMPLEMENTATIONS, help="default: the best for this device")
    out.add_argument(
        "--rounds", type=_arguments.positive, default=7, help="timings of each row; the median is shown (default 7)"
    )
    out.add_argument(
        "--devices", type=_arguments.positive, default=1, help="also time the vocabulary split over this many"
    )
    data = "random logits, or such as a language model has, and then a gradient threshold too (default: random)"
    out.add_argument("--data", choices=("random", "text"), default="random", help=data)
    known = (*shapes.ROWS, *shapes.PEERS)
    rows = f"only these beside this package's own and the bare product: some of {', '.join(known)} (default: all)"
    out.add_argument("--rows", nargs="+", choices=known, metavar="ROW", help=rows)
    out.add_argument("--no-peers", action="store_true", help="leave out what PyTorch computes")
    sweep = (
        f"time the tiles of the Hopper kernels instead, all or some of {', '.join(shapes.KERNELS)}; needs such a GPU"
    )
    out.add_argument("--sweep", nargs="*", choices=shapes.KERNELS, metavar="KERNEL", help=sweep)
    doctor = "check the kernels on this machine instead: parity, bits, times, memory; one file, doctor.json"
    out.add_argument("--doctor", action="store_true", help=doctor)
    out.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of bench.json and bench.png")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 if a row of this package failed or was wrong, else 0."""
    command = parser()
    options = command.parse_args(arguments)
    if options.sweep is not None and options.devices > 1:
        command.error("--sweep times one device: leave out --devices")
    # JAX would take three quarters of a GPU's memory at its first use and leave too little for the peers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.doctor:
        from lce_jax.bench import doctor

        return doctor.main(list(doctor.CHECKS), options.out / "doctor.json", options.rounds)
    return _measure(command, options, sys.argv[1:] if arguments is None else arguments)


def _measure(command: argparse.ArgumentParser, options: argparse.Namespace, arguments: list[str]) -> int:
    """All shapes, timed."""
    try:
        from lce_jax.bench import plot, report
    except ImportError as missing:
        print(f"{missing}: install the extra with pip install 'lce-jax[bench]'", file=sys.stderr)
        return 2
    from lce_jax.bench.run import measure

    run = report.provenance(arguments, options.rounds)
    where, platform, out = run["device"], jax.default_backend(), report.console()
    dtype = jnp.dtype(options.dtype or ("float32" if platform == "cpu" else "bfloat16"))
    chosen = shapes.select(platform, options.model, options.shape, options.tokens)
    if options.devices > jax.device_count():
        command.error(f"argument --devices: {options.devices}, and this machine has {jax.device_count()}")
    if options.implementation is not None:
        _refuse(command, options.implementation, chosen, dtype)
    out.print(", ".join(f"{name} {value}" for name, value in where.items()))
    if options.sweep is not None:
        return _sweep(options.sweep or list(shapes.KERNELS), chosen, dtype, options.rounds, out)
    options.out.mkdir(parents=True, exist_ok=True)
    measurements = []
    for shape in chosen:
        with out.status(str(shape)) as status:
            measured = measure(
                shape, dtype, options.implementation, options.rounds, status.update if out.is_terminal else _log,
                with_peers=not options.no_peers, devices=options.devices,
                text=options.data == "text", wanted=options.rows,
            )  # fmt: skip
        measurements.append(measured)
        out.print(report.table(measured))
        for line in report.left_out(measured, measurements[:-1]):
            out.print(line, highlight=False, soft_wrap=True)
        report.write_json(options.out / "bench.json", measurements, run)
    plot.draw(options.out / "bench.png", measurements, where)
    for one in measurements:
        for line in report.held_bounds(one, where):
            out.print(f"{one.shape}: {line}", highlight=False, soft_wrap=True)
    out.print(f"written: {options.out / 'bench.json'}, {options.out / 'bench.png'}", highlight=False, soft_wrap=True)
    ours = ("ours", "ours split") if options.devices > 1 else ("ours",)
    rows = [one.row(key, way) for one in measurements for key in ours for way in (shapes.FORWARD, shapes.BOTH)]
    return 0 if all(rows) else 1


def _refuse(command: argparse.ArgumentParser, name: str, chosen: Sequence[shapes.Shape], dtype: Any) -> None:
    """Ends the command if an implementation cannot serve all shapes."""
    for shape in chosen:
        head, struct = shape.head, jax.ShapeDtypeStruct
        sizes = struct((shape.tokens, head.hidden_size), dtype), struct((head.vocab_size, head.hidden_size), dtype)
        labels = struct((shape.tokens,), jnp.int32)
        try:
            explain(*sizes, labels, logit_softcap=head.logit_softcap, implementation=name)
        except UnsupportedError as refusal:
            command.error(f"argument --implementation: {shape}: {refusal}")


def _sweep(kernels: Sequence[str], chosen: Sequence[shapes.Shape], dtype: Any, rounds: int, out: Any) -> int:
    """Prints the tiles of each kernel by time, and the tuning entry of the fastest."""
    from lce_jax.bench import sweep

    for shape in chosen:
        out.print(f"{shape}, {dtype.name}", style="bold")
        try:
            with out.status("") as status:
                found = sweep.sweep(kernels, shape, dtype, rounds, status.update if out.is_terminal else _log)
        except UnsupportedError as refusal:
            out.print(f"cannot sweep: {refusal}", highlight=False, soft_wrap=True)
            return 1
        for one in found:
            out.print(sweep.table(one))
            out.print(one.entry, highlight=False, soft_wrap=True)
            for name, reason in one.left_out.items():
                out.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    return 0


def _log(message: str) -> None:
    """Progress for a log, on standard error: a terminal has a line that changes in place."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
