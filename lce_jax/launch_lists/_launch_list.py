"""A list of launches, where its memory lies, and what runs it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lce_jax._types import Device
from lce_jax.launch_lists import _compiler
from lce_jax.launch_lists._driver import Graph, Launches
from lce_jax.launch_lists._recorder import Buffer, Kernel, Launch, Recorder, Storage, Symbol

ALIGNMENT = 256  # bytes
KEPT = 64  # runs whose launches are kept, each with a table of a few hundred bytes

REPEATED = 3  # runs over the same memory, after which their launches become a CUDA graph

type Run = Callable[..., None]  # (stream, workspace, numbers, addresses, is_captured=False)


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchList:
    """Launches of kernels, and the memory that they need.

    Attributes:
        inputs: shapes and dtypes of the operands. Those that have rows may have fewer than here.
        outputs: shapes and dtypes of the results; None for one that takes an operand's place.
        workspace_bytes: temporary memory of a run, aligned to 256 bytes. It may hold anything before and after.
        launches: in order.
    """

    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct | None, ...]
    workspace_bytes: int
    launches: tuple[Launch, ...]
    given: tuple[tuple[Any, ...], ...]
    device: Device

    def numbers(self, rows: int, stride: int) -> list[int]:
        """The int32 numbers that a run over so many rows finds in the GPU's memory."""
        known = {"rows": rows, "stride": stride}
        return [known[x.name] if isinstance(x, Symbol) else int(x) for numbers in self.given for x in numbers]

    def load(self, device: int) -> Run:
        """The program compiled for the current CUDA device, whose number is ``device``.

        Returns:
            ``run(stream, workspace, numbers, addresses, is_captured=False)``, with the handle of a stream, the
            addresses of the workspace and of the numbers, and those of the results that are not None, then of the
            operands, each aligned to 16 bytes. A run returns before the GPU has done anything. Runs that repeat the
            same addresses become one CUDA graph, except where the caller says that the stream is being captured.

        Raises:
            RuntimeError: Mosaic does not compile a kernel; the reason is in the process's standard error.
        """
        kernels = list(dict.fromkeys(launch.kernel for launch in self.launches))
        steps = dict(zip(kernels, _compiler.compiled(kernels, self.device, device), strict=True))
        return run_of(self, steps, Graph)

    @property
    def num_outputs(self) -> int:
        """How many results have memory of their own."""
        return sum(output is not None for output in self.outputs)


def launch_list(recorder: Recorder, outputs: Sequence[Buffer], device: Device) -> LaunchList:
    """The list that a recorder has kept, without launches that no output needs."""
    storages = [x.storage for x in outputs]
    launches = _needed(recorder.launches, storages)
    own = [x for x in dict.fromkeys(storages) if x.kind == "workspace"]
    for place, storage in enumerate(own):
        storage.kind, storage.place = "output", place
    structs = [x.struct if x.storage in own else None for x in outputs]
    given = tuple(recorder.numbers_given)
    workspace = _placed(launches)
    return LaunchList(
        tuple(x.struct for x in recorder.inputs), tuple(structs), workspace, tuple(launches), given, device
    )


def _needed(launches: Sequence[Launch], outputs: Sequence[Storage]) -> list[Launch]:
    needed, kept = set(outputs), []
    for launch in reversed(launches):
        if any(x.storage in needed for x in launch.results):
            needed.update(x.storage for x in (*launch.operands, *launch.results))
            kept.append(launch)
    return kept[::-1]


def _placed(launches: Sequence[Launch]) -> int:
    """Gives each temporary piece of memory its place. Returns how many bytes that takes."""
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for number, launch in enumerate(launches):
        for x in (*launch.operands, *launch.results):
            if x.storage.kind == "workspace":
                first.setdefault(x.storage, number)
                last[x.storage] = number
    placed: list[Storage] = []
    for storage in sorted(first, key=lambda x: -x.num_bytes):  # the largest first: the others go where they fit
        at_once = [x for x in placed if first[x] <= last[storage] and first[storage] <= last[x]]
        storage.place = 0
        for other in sorted(at_once, key=lambda x: x.place):
            if storage.place + storage.num_bytes <= other.place:
                break
            storage.place = max(storage.place, _aligned(other.place + other.num_bytes))
        placed.append(storage)
    return max((_aligned(x.place + x.num_bytes) for x in placed), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


type Step = Callable[[int, int], Callable[[], Any]]  # (stream, where the addresses are) -> launch()
type Record = Callable[[Callable[[int], Launches], int], Any]  # as `_driver.Graph`


def run_of(launches: LaunchList, steps: dict[Kernel, Step], record: Record | None = None) -> Run:
    """What launches the steps, each given the addresses of its operands and results.

    ``record`` makes one launch of those of a run that is repeated. None: each is launched.
    """
    entries: list[tuple[int, int]] = []  # an index into what a run is given, and what is added
    placed: list[tuple[Step, int]] = []
    first = {"workspace": 0, "numbers": 1, "output": 2, "input": 2 + launches.num_outputs}
    for launch in launches.launches:
        placed.append((steps[launch.kernel], 8 * len(entries)))
        for x in (*launch.operands, *launch.results):
            base, place = first[x.storage.kind], x.storage.place
            entries.append((base, place) if base < 2 else (base + place, 0))
    indices, offsets = zip(*entries, strict=True)
    table_type, picked = ctypes.c_uint64 * len(indices), operator.itemgetter(*indices)

    @functools.lru_cache(KEPT)
    def bound(stream: int, *given: int) -> _Bound:
        table = table_type(*map(operator.add, picked(given), offsets))
        return _Bound(placed, table, stream, record if len(placed) > 1 else None)

    def run(stream: int, workspace: int, numbers: int, addresses: Sequence[int], is_captured: bool = False) -> None:
        bound(stream, workspace, numbers, *addresses).run(is_captured)

    return run


class _Bound:
    """The launches of runs over the same memory."""

    def __init__(self, placed: Sequence[tuple[Step, int]], table: Any, stream: int, record: Record | None) -> None:
        self.placed, self.stream, self.record = placed, stream, record
        self.table = table  # of addresses: nothing writes to it, so threads may share it
        self.launches = self.on(stream)
        self.runs = 0
        self.graph: Any = None

    def on(self, stream: int) -> list[Callable[[], Any]]:
        """The launches on a stream."""
        start = ctypes.addressof(self.table)
        return [step(stream, start + place) for step, place in self.placed]

    def run(self, is_captured: bool) -> None:
        """Launches all, as one graph if they were launched `REPEATED` times before."""
        if self.graph is not None and not is_captured:
            self.graph.launch()
            return
        for launch in self.launches:
            launch()
        if self.record is not None and not is_captured:
            self.runs += 1
            if self.runs == REPEATED:
                self.graph = self.record(self.on, self.stream)
