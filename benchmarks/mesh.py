"""The head over all devices of this host, compared with the same call on one of them.

The rows split different operands:

    vocabulary  the weight; each device has all tokens
    sequence    the weight, and tokens between calls: hidden is gathered before a call, its gradient scattered after it
    tokens      the batch; each device has the whole weight and as many tokens as the single device
    both        the batch in two halves, and the weight over the devices of each half; needs four devices
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.candidates import UNLIMITED, product
from benchmarks.heads import add_shapes, job_arguments, shapes_here
from benchmarks.measure import Run, compile_jax
from benchmarks.problem import Shape, default_dtype, random_problem
from benchmarks.programs import BACKWARD, PRODUCT, Program, add_gradients, time_programs
from benchmarks.records import Job, Measured
from lce_jax import sharded_linear_cross_entropy, sharded_linear_logprobs

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

ONE = "one device"


class Layout(NamedTuple):
    """How operands are split over the devices."""

    data: int
    tensor: int
    splits_sequence: bool = False
    copies: int = 1  # how often the tokens are repeated


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    add_shapes(command)


def jobs(options: argparse.Namespace, command: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each shape on the command line, or for the first two of the device's shapes."""
    if jax.device_count() < 2:
        command.error("this machine has one device, and this part needs two or more")
    shapes = options.shape or shapes_here()[:2]
    return [Job(job_arguments("mesh", shape), functools.partial(_measure, shape, options.rounds)) for shape in shapes]


def layouts(count: int) -> dict[str, Layout]:
    """Returns the layouts of ``count`` devices by name."""
    result = {
        ONE: Layout(1, 1),
        "vocabulary": Layout(1, count),
        "sequence": Layout(1, count, splits_sequence=True),
        "tokens": Layout(count, 1, copies=count),
    }
    return result | ({"both": Layout(2, count // 2)} if count >= 4 else {})


def _measure(shape: Shape, rounds: int) -> Measured:
    programs = {PRODUCT: Program(product)}
    for name, layout in layouts(jax.device_count()).items():
        for way, function in WAYS.items():
            like = None if name == ONE else f"{ONE}: linear_{way}"
            compiled, results = functools.partial(_compile, layout), functools.partial(_collect_results, layout)
            programs[f"{name}: linear_{way}"] = Program(function, like, compiled, results)
    measured = time_programs(programs, random_problem(shape, default_dtype()), shape, rounds)
    rows = {}
    for name, row in measured.rows.items():
        alone = measured.rows.get(programs[name].like or "", {}).get("median_seconds")
        ratio = {"ratio_to_one": row["median_seconds"] / alone} if alone and "median_seconds" in row else {}
        rows[name] = {**row, **ratio}
        print(*(f"{name:62s}{x:7.3f} of one device" for x in ratio.values()), sep="", end="\n" * bool(ratio))
    return dataclasses.replace(measured, rows=rows)


def _compile(layout: Layout, function: Callable[..., Any], *operands: Array) -> Run:
    """Compiles ``function`` for a mesh with that layout and for operands on it."""
    devices = jax.devices()[: layout.data * layout.tensor]
    mesh = jax.make_mesh(
        (layout.data, layout.tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    rows = PartitionSpec(("data", "tensor") if layout.splits_sequence else "data")

    def place(x: Array, spec: PartitionSpec) -> Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    hidden, weight, *rest = operands
    per_token = [place(jnp.concatenate([x] * layout.copies), rows) for x in (hidden, *rest)]
    axes: dict[str, Any] = {"mesh": mesh, "batch_axes": "data"}
    axes |= {"sequence_axis": "tensor"} if layout.splits_sequence else {}
    return compile_jax(
        functools.partial(function, axes, layout.copies),
        per_token[0],
        place(weight, PartitionSpec("tensor")),
        *per_token[1:],
    )


def _collect_results(layout: Layout, results: Sequence[Array]) -> list[Array]:
    """Moves results to the first device, those of the first copy of each token."""
    local = jax.device_put(list(results), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return [x[: len(x) // layout.copies] if i in PER_TOKEN[len(results)] else x for i, x in enumerate(local)]


# The indices of per-token results, by the number of results: those of `_forward`, of `_loss` and of `_both`.
PER_TOKEN = {2: (0, 1), 3: (1,), 4: (0, 1, 2)}


def _forward(axes: dict[str, Any], _: int, hidden: Array, weight: Array, labels: Array, *__: Array) -> Any:
    out = sharded_linear_logprobs(hidden, weight, labels, cache_bytes=0, **axes)
    return out.logprobs, out.entropy


def _both(cache_bytes: int, axes: dict[str, Any], copies: int, *operands: Array) -> Any:
    hidden, weight, labels, *seeds = operands

    def results(hidden: Array, weight: Array) -> Any:
        out = sharded_linear_logprobs(hidden, weight, labels, cache_bytes=cache_bytes, **axes)
        return out.logprobs, out.entropy

    *out, dhidden, dweight = add_gradients(results, seeds, hidden, weight)
    return *out, dhidden, dweight / copies


def _loss(axes: dict[str, Any], copies: int, hidden: Array, weight: Array, labels: Array, *_: Array) -> Any:
    def loss(hidden: Array, weight: Array) -> Array:
        return sharded_linear_cross_entropy(hidden, weight, labels, **axes)

    value, (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    return value[None], dhidden * copies, dweight


WAYS: dict[str, Callable[..., Any]] = {
    "logprobs": _forward,
    f"logprobs{BACKWARD}": functools.partial(_both, 0),
    f"logprobs, full cache{BACKWARD}": functools.partial(_both, UNLIMITED),
    f"cross_entropy{BACKWARD}": _loss,
}
