"""The head over all devices of this host, by what is split, beside the same call on one of them.

vocabulary    each device has a part of the weight, and all tokens
sequence      the same, and a part of the tokens between the calls: gathered before, reduce-scattered after
tokens        each device has the whole weight and as many tokens as the one: the batch grows with the devices
both          two halves of the tokens, the vocabulary over the others; from four devices on
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
from benchmarks.heads import add_shapes, shapes_here, words
from benchmarks.measure import Run, compile_jax
from benchmarks.problem import Shape, default_dtype, random_problem
from benchmarks.programs import BACKWARD, PRODUCT, Program, timed, with_gradients
from benchmarks.records import Job, Measured
from lce_jax import sharded_linear_cross_entropy, sharded_linear_logprobs

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

ONE = "one device"


class Layout(NamedTuple):
    """How operands lie on the devices."""

    data: int
    tensor: int
    splits_sequence: bool = False
    copies: int = 1  # of the tokens


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    add_shapes(command)


def jobs(options: argparse.Namespace, command: argparse.ArgumentParser) -> list[Job]:
    """One for each shape that is asked for; else for the device's first two."""
    if jax.device_count() < 2:
        command.error("this machine has one device")
    shapes = options.shape or shapes_here()[:2]
    return [Job(words("mesh", shape), functools.partial(_measure, shape, options.rounds)) for shape in shapes]


def layouts(count: int) -> dict[str, Layout]:
    """Those of so many devices."""
    found = {
        ONE: Layout(1, 1),
        "vocabulary": Layout(1, count),
        "sequence": Layout(1, count, splits_sequence=True),
        "tokens": Layout(count, 1, copies=count),
    }
    return found | ({"both": Layout(2, count // 2)} if count >= 4 else {})


def _measure(shape: Shape, rounds: int) -> Measured:
    found = {PRODUCT: Program(product)}
    for name, layout in layouts(jax.device_count()).items():
        for way, function in WAYS.items():
            like = None if name == ONE else f"{ONE}: linear_{way}"
            compiled, results = functools.partial(_compiled, layout), functools.partial(_as_of_one, layout)
            found[f"{name}: linear_{way}"] = Program(function, like, compiled, results)
    measured = timed(found, random_problem(shape, default_dtype()), shape, rounds)
    rows = {}
    for name, row in measured.rows.items():
        alone = measured.rows.get(found[name].like or "", {}).get("median_seconds")
        ratio = {"ratio_to_one": row["median_seconds"] / alone} if alone and "median_seconds" in row else {}
        rows[name] = {**row, **ratio}
        print(*(f"{name:62s}{x:7.3f} of one device" for x in ratio.values()), sep="", end="\n" * bool(ratio))
    return dataclasses.replace(measured, rows=rows)


def _compiled(layout: Layout, function: Callable[..., Any], *operands: Array) -> Run:
    """``function`` of a mesh's axes, and operands that lie on it."""
    devices = jax.devices()[: layout.data * layout.tensor]
    mesh = jax.make_mesh(
        (layout.data, layout.tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    rows = PartitionSpec(("data", "tensor") if layout.splits_sequence else "data")

    def place(x: Array, spec: PartitionSpec) -> Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    hidden, weight, *rest = operands
    per_token = [place(jnp.concatenate([x] * layout.copies), rows) for x in (hidden, *rest)]
    where: dict[str, Any] = {"mesh": mesh, "batch_axes": "data"}
    where |= {"sequence_axis": "tensor"} if layout.splits_sequence else {}
    told = functools.partial(function, where, layout.copies)
    return compile_jax(told, per_token[0], place(weight, PartitionSpec("tensor")), *per_token[1:])


def _as_of_one(layout: Layout, found: Sequence[Array]) -> list[Array]:
    """The results on the first device: of the first copy of each token."""
    first = jax.device_put(list(found), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return [x[: len(x) // layout.copies] if i in PER_TOKEN[len(found)] else x for i, x in enumerate(first)]


# Which of so many results are per token: those of `_forward`, of `_loss` and of `_both`.
PER_TOKEN = {2: (0, 1), 3: (1,), 4: (0, 1, 2)}


def _forward(where: dict[str, Any], _: int, hidden: Array, weight: Array, labels: Array, *__: Array) -> Any:
    out = sharded_linear_logprobs(hidden, weight, labels, cache_bytes=0, **where)
    return out.logprobs, out.entropy


def _both(cache_bytes: int, where: dict[str, Any], copies: int, *operands: Array) -> Any:
    hidden, weight, labels, *seeds = operands

    def results(hidden: Array, weight: Array) -> Any:
        out = sharded_linear_logprobs(hidden, weight, labels, cache_bytes=cache_bytes, **where)
        return out.logprobs, out.entropy

    *out, dhidden, dweight = with_gradients(results, seeds, hidden, weight)
    return *out, dhidden, dweight / copies


def _loss(where: dict[str, Any], copies: int, hidden: Array, weight: Array, labels: Array, *_: Array) -> Any:
    def loss(hidden: Array, weight: Array) -> Array:
        return sharded_linear_cross_entropy(hidden, weight, labels, **where)

    value, (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    return value[None], dhidden * copies, dweight


WAYS: dict[str, Callable[..., Any]] = {
    "logprobs": _forward,
    f"logprobs{BACKWARD}": functools.partial(_both, 0),
    f"logprobs, full cache{BACKWARD}": functools.partial(_both, UNLIMITED),
    f"cross_entropy{BACKWARD}": _loss,
}
