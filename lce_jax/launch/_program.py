"""A program as a list of launches, and what runs it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lce_jax._types import Device
from lce_jax.launch import _cuda, _jax, _schedule, _source, _stablehlo
from lce_jax.launch._graph import Rows
from lce_jax.launch._reads import reachable, reads_rows
from lce_jax.launch._refusal import UnservedError
from lce_jax.launch._schedule import Schedule, Stage, Storage

type Run = Callable[[int, int, Sequence[int], Sequence[int]], None]

KEPT = 64  # runs of a program whose launches are kept, each with a table of a few hundred bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The launches of a function for operands of certain shapes, and what they need.

    Attributes:
        outputs: shapes and dtypes of the results, flat.
        workspace_bytes: temporary memory of a run, aligned to 256 bytes. It may hold anything before and after.
        num_kernels: how many launches of Mosaic kernels a run has.
        num_stages: how many launches of generated code.
        num_numbers: how many numbers a run is given besides addresses.
        source: the generated code.
    """

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    workspace_bytes: int
    source: str
    schedule: Schedule
    num_numbers: int = 0

    @property
    def num_stages(self) -> int:
        """How many launches of generated code a run has."""
        return sum(isinstance(step, Stage) for step in self.schedule.steps)

    @property
    def num_kernels(self) -> int:
        """How many launches of Mosaic kernels a run has."""
        return len(self.schedule.steps) - self.num_stages

    def load(self, device: int) -> Run:
        """The program compiled for the current CUDA device, whose number is ``device``.

        Returns:
            ``run(stream, workspace, numbers, addresses)``, with the handle of a stream, the address of the workspace,
            and those of the results and then of the operands, each aligned to 16 bytes. ``numbers`` is empty without
            `Rows`. With them, it is how many rows count, then for each of their operands and each of their results two
            strides, in elements: of the dimension before the rows (0 if there is none), and of the rows. The operand
            that says how many rows count has no address: 0. A run returns before the GPU has done anything. What the
            last runs were given is kept, because an allocator hands out the same addresses again and again.

        Raises:
            RuntimeError: a compiler or the driver refuses; the message is its own.
        """
        return _load(self, device)


def program(
    function: Callable[..., Any],
    operands: Sequence[Any],
    device: Device,
    donated: Sequence[int] = (),
    rows: Rows | None = None,
) -> Program:
    """The launches of ``function(*operands)`` on ``device``.

    Args:
        function: a function of arrays, traced as by ``jax.jit``, jitted or not.
        operands: shapes and dtypes, as ``jax.ShapeDtypeStruct``; each may be a pytree.
        donated: operands, by their numbers among all leaves, whose memory a run may overwrite: that of a result which
            a kernel updates in place, and which has the same address.
        rows: operands and results of which only the rows that count are there. None: all arrays are whole.
        device: what the kernels are compiled for, as JAX names it: "NVIDIA H200", "9.0", 132 multiprocessors.

    Raises:
        UnservedError: the function holds something that only XLA runs; the message names it.
    """
    module, structs = _jax.lower(function, operands, device)
    builder, results = _stablehlo.read(module, rows)
    sums = (node for node in reachable(results) if node.op == "reduce" and reads_rows(node.operands[0]))
    if not builder.kernels and (builder.products or any(sums)):
        raise UnservedError("products of matrices without a kernel")
    return scheduled(builder.kernels, results, structs, donated, rows)


def scheduled(
    kernels: Sequence[Any],
    results: Sequence[Any],
    structs: Sequence[Any],
    donated: Sequence[int] = (),
    rows: Rows | None = None,
) -> Program:
    """The program of a graph."""
    schedule = _schedule.schedule(kernels, results, donated, rows)
    stages = [step.segments for step in schedule.steps if isinstance(step, Stage)]
    places = _numbered(schedule)
    slots = {node: places[storage] for node, storage in schedule.storage.items()}
    num_numbers = 0 if rows is None else 1 + 2 * (len(rows.operands) + len(rows.results))
    source = _source.module(stages, slots, len(places), num_numbers)
    return Program(tuple(structs), schedule.workspace_bytes, source, schedule, num_numbers)


def _numbered(schedule: Schedule) -> dict[Storage, int]:
    """Each piece of memory, numbered as generated code knows it."""
    return {storage: i for i, storage in enumerate(dict.fromkeys(schedule.storage.values()))}


def _load(program: Program, device: int) -> Run:
    kernels: dict[bytes, _jax.Step] = {}
    code = _cuda.Module(program.source, device) if program.num_stages else None
    table = _Table(program)
    steps: list[tuple[Step, int]] = []
    for number, step in enumerate(program.schedule.steps):
        if isinstance(step, Stage):
            assert code is not None
            stage = sum(isinstance(other, Stage) for other in program.schedule.steps[:number])
            blocks = sum(segment.num_blocks for segment in step.segments)
            steps.append((code.launch(f"stage_{stage}", blocks, _source.THREADS), -1))
            continue
        module = step.kernel.module
        if module not in kernels:
            kernels[module] = _jax.compile_kernel(module, device)
        steps.append((kernels[module], table.add(step.arrays)))
    return table.runner(steps)


type Step = Callable[[int, int], Callable[[], Any]]  # (stream, the address of what it is given) -> launch() -> status


class _Table:
    """The one piece of host memory that a run makes: all that its launches are given.

    It begins with what generated code is given by value, addresses and numbers. Then come the operands of each kernel,
    and at last the table's own address, from which the driver copies what generated code is given.
    """

    def __init__(self, program: Program) -> None:
        self._first_output = 1 + program.num_numbers
        self._first_input = self._first_output + len(program.outputs)
        self._entries: list[tuple[int, int]] = []  # index into a run's values, and what is added
        self.add(_numbered(program.schedule) or [Storage(0)])
        self._entries += [(1 + i, 0) for i in range(program.num_numbers)] or [(0, 0)]

    def add(self, arrays: Iterable[Storage]) -> int:
        """More addresses. Returns the place of the first."""
        first = len(self._entries)
        self._entries += map(self._entry, arrays)
        return first

    def _entry(self, storage: Storage) -> tuple[int, int]:
        if storage.kind == "workspace":
            return 0, storage.place
        return storage.place + (self._first_input if storage.kind == "input" else self._first_output), 0

    def runner(self, steps: Sequence[tuple[Step, int]]) -> Run:
        """What fills a table and takes the steps, each with the place in the table of what it is given."""
        indices, offsets = zip(*self._entries, (0, 0), strict=True)
        table_type, picked = ctypes.c_uint64 * len(indices), operator.itemgetter(*indices)
        placed = [(step, 8 * (place % len(indices))) for step, place in steps]

        # Nothing writes to a table, and the driver copies what it needs of it at the launch: threads may share one.
        @functools.lru_cache(KEPT)
        def bound(values: tuple[int, ...]) -> tuple[Any, list[Callable[[], Any]]]:
            stream, *given = values
            table = table_type(*map(operator.add, picked(given), offsets))
            address = table[-1] = ctypes.addressof(table)
            return table, [step(stream, address + place) for step, place in placed]

        def run(stream: int, workspace: int, numbers: Sequence[int], addresses: Sequence[int]) -> None:
            _table, launches = bound((stream, workspace, *numbers, *addresses))  # it lives until all are launched
            for launch in launches:
                status = launch()
                if status:
                    _cuda.check(status)

        return run
