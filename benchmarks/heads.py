"""Log-probability and entropy of a head: this package beside stored logits and beside its peers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import programs, records, report, shapes
from benchmarks.records import Job, Measured
from benchmarks.run import Measurement, measure
from lce_jax import UnsupportedError, _dispatch, explain
from lce_jax.explain import _arguments
from lce_jax.explain._models import MODELS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    add_shapes(command)
    command.add_argument(
        "--implementation", choices=_dispatch.IMPLEMENTATIONS, help="default: the best for this device"
    )
    command.add_argument(
        "--devices", type=_arguments.positive, default=1, help="also time the vocabulary split over this many"
    )
    data = "random logits, or such as a language model has, and then a gradient threshold too (default: random)"
    command.add_argument("--data", choices=("random", "text"), default="random", help=data)
    known = (*shapes.ROWS, *shapes.PEERS)
    rows = f"only these beside this package's own and the bare product: some of {', '.join(known)} (default: all)"
    command.add_argument("--rows", nargs="+", choices=known, metavar="ROW", help=rows)
    command.add_argument("--no-peers", action="store_true", help="leave out what PyTorch computes")


def add_shapes(command: argparse.ArgumentParser) -> None:
    """Which heads, and in which dtype."""
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    models = f"a model's head: {', '.join(MODELS)}; repeatable"
    command.add_argument("--model", choices=MODELS, metavar="NAME", help=models, **repeatable)
    shape = "tokens, hidden size, vocabulary; repeatable"
    command.add_argument("--shape", type=_arguments.shape, metavar="T,H,V", help=shape, **repeatable)
    command.add_argument(
        "--tokens", type=_arguments.positives, default=(), metavar="T,T,...", help="time every head at each of these"
    )
    command.add_argument("--dtype", choices=programs.DTYPES, help="default: float32 on CPU, bfloat16 elsewhere")


def jobs(options: argparse.Namespace, command: argparse.ArgumentParser) -> list[Job]:
    """One for each shape."""
    dtype, chosen = programs.dtype_of(options), chosen_shapes(options)
    if options.devices > jax.device_count():
        command.error(f"argument --devices: {options.devices}, and this machine has {jax.device_count()}")
    if options.implementation is not None:
        _refuse(command, options.implementation, chosen, dtype)
    before: list[Measurement] = []
    return [
        Job(
            [*arguments_of(shape, dtype), *_more_arguments(options)],
            functools.partial(_measure, shape, dtype, options, before),
            partial=options.rows is not None,
        )
        for shape in chosen
    ]


def chosen_shapes(options: argparse.Namespace) -> list[shapes.Shape]:
    """Those asked for, or the device's."""
    return shapes.select(jax.default_backend(), options.model, options.shape, options.tokens)


def arguments_of(shape: shapes.Shape, dtype: Any, part: str = "heads") -> list[str]:
    """What says the shape on a command line."""
    head = shape.head
    sizes = ["--shape", f"{shape.tokens},{head.hidden_size},{head.vocab_size}"]
    words = [part, *(["--model", head.model, "--tokens", str(shape.tokens)] if head.model else sizes)]
    return [*words, *programs.dtype_arguments(dtype)]


def _more_arguments(options: argparse.Namespace) -> list[str]:
    words = ["--no-peers"] if options.no_peers else []
    words += ["--implementation", options.implementation] if options.implementation else []
    words += ["--data", options.data] if options.data != "random" else []
    return words + (["--devices", str(options.devices)] if options.devices > 1 else [])


def _measure(shape: shapes.Shape, dtype: Any, options: argparse.Namespace, before: list[Measurement]) -> Measured:
    """One shape, timed and printed."""
    out = report.console()
    with out.status(str(shape)) as status:
        measured = measure(
            shape, dtype, options.implementation, options.rounds, status.update if out.is_terminal else log,
            with_peers=not options.no_peers, devices=options.devices,
            text=options.data == "text", wanted=options.rows,
        )  # fmt: skip
    out.print(report.table(measured))
    for line in (*report.left_out(measured, before), *report.held_bounds(measured, records.device())):
        out.print(line, highlight=False, soft_wrap=True)
    before.append(measured)
    ours = ("ours", "ours split") if options.devices > 1 else ("ours",)
    healthy = all(measured.row(key, way) for key in ours for way in (shapes.FORWARD, shapes.BOTH))
    about = {"shape": dataclasses.asdict(shape), "dtype": measured.dtype, "data": measured.data}
    return Measured(report.as_rows(measured), about, healthy)


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


def log(message: str) -> None:
    """Progress for a log, on standard error: a terminal has a line that changes in place."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
