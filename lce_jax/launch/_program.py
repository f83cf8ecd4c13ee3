"""A program as a list of launches, and what runs it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lce_jax._types import Device
from lce_jax.launch import _cuda, _jax, _schedule, _source, _stablehlo
from lce_jax.launch._refusal import UnservedError
from lce_jax.launch._schedule import Schedule, Stage, Storage

KINDS = ("input", "output", "workspace")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The launches of a function for operands of certain shapes, and what they need.

    Attributes:
        outputs: shapes and dtypes of the results, flat.
        workspace_bytes: temporary memory of a run, aligned to 256 bytes. It may hold anything before and after.
        num_kernels: how many launches of Mosaic kernels a run has.
        num_stages: how many launches of generated code.
        source: the generated code.
    """

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    workspace_bytes: int
    source: str
    schedule: Schedule

    @property
    def num_stages(self) -> int:
        """How many launches of generated code a run has."""
        return sum(isinstance(step, Stage) for step in self.schedule.steps)

    @property
    def num_kernels(self) -> int:
        """How many launches of Mosaic kernels a run has."""
        return len(self.schedule.steps) - self.num_stages

    def load(self, device: int) -> Callable[[int, Sequence[int], Sequence[int], int], None]:
        """The program compiled for the current CUDA device, whose number is ``device``.

        Returns:
            ``run(stream, inputs, outputs, workspace)``, with the handle of a stream and addresses: of the operands, of
            the results, each aligned to 16 bytes, and of the workspace. It returns before the GPU has done anything.

        Raises:
            RuntimeError: a compiler or the driver refuses; the message is its own.
        """
        return _load(self, device)


def program(
    function: Callable[..., Any], operands: Sequence[Any], device: Device, donated: Sequence[int] = ()
) -> Program:
    """The launches of ``function(*operands)`` on ``device``.

    Args:
        function: a function of arrays, traced as by ``jax.jit``, jitted or not.
        operands: shapes and dtypes, as ``jax.ShapeDtypeStruct``; each may be a pytree.
        donated: operands, by their numbers among all leaves, whose memory a run may overwrite: that of a result which
            a kernel updates in place, and which has the same address.
        device: what the kernels are compiled for, as JAX names it: "NVIDIA H200", "9.0", 132 multiprocessors.

    Raises:
        UnservedError: the function holds something that only XLA runs; the message names it.
    """
    module, structs = _jax.lower(function, operands, device)
    builder, results = _stablehlo.read(module)
    if builder.products and not builder.kernels:
        raise UnservedError("products of matrices without a kernel")
    return scheduled(builder.kernels, results, structs, donated)


def scheduled(
    kernels: Sequence[Any], results: Sequence[Any], structs: Sequence[Any], donated: Sequence[int] = ()
) -> Program:
    """The program of a graph."""
    schedule = _schedule.schedule(kernels, results, donated)
    stages = [step.segments for step in schedule.steps if isinstance(step, Stage)]
    places = _numbered(schedule)
    slots = {node: places[storage] for node, storage in schedule.storage.items()}
    source = _source.module(stages, slots, len(places))
    return Program(tuple(structs), schedule.workspace_bytes, source, schedule)


def _numbered(schedule: Schedule) -> dict[Storage, int]:
    """Each piece of memory, numbered as generated code knows it."""
    return {storage: i for i, storage in enumerate(dict.fromkeys(schedule.storage.values()))}


def _load(program: Program, device: int) -> Callable[[int, Sequence[int], Sequence[int], int], None]:
    kernels: dict[bytes, _jax.Launch] = {}
    code = _cuda.Module(program.source, device) if program.num_stages else None
    places = _numbered(program.schedule)
    table = list(places)  # of addresses: what generated code reads, then the operands of each kernel
    steps: list[Callable[[int, int], None]] = []  # (stream, the table's address)
    for number, step in enumerate(program.schedule.steps):
        if isinstance(step, Stage):
            assert code is not None
            stage = sum(isinstance(other, Stage) for other in program.schedule.steps[:number])
            blocks = sum(segment.num_blocks for segment in step.segments)
            steps.append(code.launch(f"stage_{stage}", blocks, _source.THREADS))
            continue
        module = step.kernel.module
        if module not in kernels:
            kernels[module] = _jax.compile_kernel(module, device)
        steps.append(functools.partial(_launched, kernels[module], 8 * len(table)))
        table += step.arrays
    origin = [(KINDS.index(storage.kind), storage.place) for storage in table]
    return functools.partial(_run, ctypes.c_uint64 * len(table), origin, steps)


def _launched(launch: _jax.Launch, offset: int, stream: int, table: int) -> None:
    launch(stream, table + offset)


def _run(
    table_type: Any,
    origin: list[tuple[int, int]],
    steps: list[Callable[[int, int], None]],
    stream: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    workspace: int,
) -> None:
    given = (inputs, outputs)
    table = table_type(*(workspace + place if kind == 2 else given[kind][place] for kind, place in origin))
    address = ctypes.addressof(table)
    for step in steps:
        step(stream, address)
