"""The order of a program's launches, and where its arrays lie.

The kernels run in the program's order. Before each, what it reads is computed, in as few stages as it depends on
itself. Small arrays are computed as soon as they can be, so that the large ones they come from need not be kept.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from lce_jax.launch._graph import CONSTANT, COPY, EMPTY, INPUT, PRODUCT, RESULT, SCATTER, Kernel, Node, Rows, Strided
from lce_jax.launch._reads import ELEMENTWISE, check_alone, needed_often, reachable, root, stored_below
from lce_jax.launch._source import Segment, is_apart, segments

SMALL = 16 << 20  # bytes of an array that is computed early
ALIGNMENT = 256  # bytes, of each array in the workspace


@dataclasses.dataclass(eq=False)
class Storage:
    """A piece of memory: an argument, a result, or a part of the workspace."""

    num_bytes: int
    kind: str = "workspace"  # or "input", "output"
    place: int = 0  # the index of the argument or result, or the offset in bytes
    first: int = -1  # the first and the last step that use it
    last: int = -1


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, and the memory of its operands and results, in its own order."""

    kernel: Kernel
    arrays: tuple[Storage, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One launch of generated code."""

    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of a program, the memory of each stored array, and the size of the workspace."""

    steps: tuple[Launch | Stage, ...]
    storage: dict[Node, Storage]
    workspace_bytes: int


def schedule(
    kernels: Sequence[Node], results: Sequence[Node], donated: Sequence[int] = (), rows: Rows | None = None
) -> Schedule:
    """Orders the steps of a program with these kernels, in their order, and these results.

    The arguments with the indices in ``donated`` may be overwritten.
    """
    return _Scheduler(kernels, results, donated, rows).run()


class _Scheduler:
    def __init__(
        self, kernels: Sequence[Node], results: Sequence[Node], donated: Sequence[int], rows: Rows | None
    ) -> None:
        self._donated, self._rows = donated, rows
        live = reachable(results)
        self._kernels = [kernel for kernel in kernels if kernel in live]
        self._of_kernel: dict[Node, dict[int, Node]] = collections.defaultdict(dict)
        for node in live:
            if node.op == RESULT:
                self._of_kernel[node.operands[0]][node.attributes["index"]] = node
        self._readers = collections.Counter(root(x) for node in live if root(node) is node for x in node.operands)
        self._readers.update(map(root, results))
        self._copies: dict[Node, Node] = {}  # of operands
        self._results = self._with_memory_of_their_own(results)
        self._operands = {kernel: self._owned(kernel) for kernel in self._kernels}
        self._whole_first: list[Node] = []
        self._pending = self._to_compute()
        self._below = {node: stored_below(node, self._pending) for node in self._pending}
        self._storage: dict[Node, Storage] = {}
        self._steps: list[Launch | Stage] = []
        self._done: set[Node] = set()

    def run(self) -> Schedule:
        for kernel in self._kernels:
            self._compute(self._operands[kernel])
            arrays = [self._memory(x) for x in self._operands[kernel]]
            for i, (shape, dtype) in enumerate(kernel.value.results):
                result = self._of_kernel[kernel].get(i) or Node(RESULT, (kernel,), shape, dtype, {"index": i})
                if i in kernel.value.aliases:
                    self._storage[result] = arrays[kernel.value.aliases[i]]
                arrays.append(self._memory(result))
            self._add(Launch(kernel.value, tuple(arrays)), arrays)
            self._done.add(kernel)
        self._compute(self._results)
        for i, node in enumerate(self._results):
            self._storage[node] = storage = self._overwritten(node) or self._memory(node)
            storage.kind, storage.place = "output", i
        return Schedule(tuple(self._steps), self._storage, _placed(self._storage.values()))

    def _with_memory_of_their_own(self, results: Sequence[Node]) -> list[Node]:
        """The results' arrays. A result that is an argument, or another result, or has rows apart, is copied."""
        found: list[Node] = []
        for i, result in enumerate(results):
            node, strided = root(result), _strided(i, self._rows)
            copied = strided is not None or node.op in (INPUT, CONSTANT) or node in found
            found.append(_copy(result, strided) if copied else node)
        return found

    def _owned(self, kernel: Node) -> list[Node]:
        """The kernel's operands; a copy of what it would overwrite while others read it."""
        operands = [root(x) for x in kernel.operands]
        for i in kernel.value.aliases.values():
            kept = operands[i].op == INPUT and operands[i].attributes["index"] not in self._donated
            if kept or operands[i].op == CONSTANT or self._readers[operands[i]] > 1:
                operands[i] = _copy(operands[i])
        return [x if x.strided is None else self._whole(x) for x in operands]

    def _whole(self, node: Node) -> Node:
        """An operand that has only the rows that count, in memory for all rows."""
        return self._copies.setdefault(node, _copy(node))

    def _to_compute(self) -> dict[Node, None]:
        """The arrays that generated code stores."""
        found: dict[Node, None] = {}
        wanted = [x for operands in self._operands.values() for x in operands] + self._results
        for node in reachable(wanted):
            if is_apart(node):
                found[node] = None
            if node.op == PRODUCT:
                found |= dict.fromkeys(x for x in map(_computed, node.operands) if x is not None)
            if node.op == SCATTER:
                check_alone(node, wanted)
                found |= dict.fromkeys(x for x in (root(node.operands[0]), node.operands[2]) if x.op != RESULT)
        for node in wanted:
            if node.op not in (INPUT, RESULT, EMPTY):
                found[node] = None
        self._whole_first = needed_often(wanted, found)
        return found | dict.fromkeys(self._whole_first)

    def _compute(self, targets: Iterable[Node]) -> None:
        """Stages until the targets are there; each computes all that it can of them, and all that is small."""
        required: set[Node] = set()
        todo = [x for x in targets if x in self._pending]
        while todo:
            node = todo.pop()
            if node not in required:
                required.add(node)
                todo += [x for x in self._below[node] if x in self._pending]
        while True:
            ready = self._ready(required)
            if not ready:
                return
            used = [self._memory(x) for node in ready for x in (node, *self._below[node])]
            self._add(Stage(tuple(segments(ready))), used)
            self._done.update(ready)
            for node in ready:
                del self._pending[node]

    def _ready(self, required: set[Node]) -> dict[Node, None]:
        """What one stage can compute. It computes again what it needs of itself, unless that has blocks of its own."""
        ready: dict[Node, None] = {}

        def is_there(x: Node, reader: Node) -> bool:
            if x.op == RESULT:
                return x.operands[0] in self._done
            if x in self._done or x.op in (INPUT, EMPTY):
                return True
            again = not is_apart(x) and x not in self._whole_first and x.num_bytes <= SMALL
            return x in ready and again and reader.op not in (PRODUCT, SCATTER)

        candidates = [x for x in self._pending if x in required or x.num_bytes <= SMALL]
        before = -1
        while before < len(ready):
            before = len(ready)
            found = (x for x in candidates if all(is_there(below, x) for below in self._below[x]))
            ready |= dict.fromkeys([x for x in found if x not in ready])
        return ready

    def _memory(self, node: Node) -> Storage:
        if node.op == SCATTER:
            return self._storage.setdefault(node, self._memory(root(node.operands[0])))
        if node not in self._storage:
            self._storage[node] = Storage(node.num_bytes)
            if node.op == INPUT:
                self._storage[node].kind, self._storage[node].place = "input", node.attributes["index"]
        return self._storage[node]

    def _overwritten(self, result: Node) -> Storage | None:
        """The memory of a kernel's result that only ``result`` reads, each element where it writes it."""
        for x in self._below.get(result, ()):
            alone = self._readers[x] == 1 and sum(x in below for below in self._below.values()) == 1
            fits = x.op == RESULT and x.num_bytes == result.num_bytes and self._storage[x].kind == "workspace"
            if alone and fits and _in_its_place(result, x):
                return self._storage[x]
        return None

    def _add(self, step: Launch | Stage, used: Iterable[Storage]) -> None:
        for storage in used:
            storage.first = len(self._steps) if storage.first < 0 else storage.first
            storage.last = len(self._steps)
        self._steps.append(step)


def _computed(operand: Node) -> Node | None:
    """What a product reads again for each tile of its result, if it is more than elements of an array."""
    node = operand
    while node.op in ("transpose", "reshape", "convert", "slice", "broadcast_in_dim"):
        node = node.operands[0]
    if node.op in (INPUT, RESULT, EMPTY, CONSTANT) or is_apart(node):
        return None
    return root(operand.operands[0] if operand.op == "transpose" else operand)


def _in_its_place(node: Node, x: Node) -> bool:
    """Whether an element of ``node`` needs no other element of ``x`` than the one at its own place."""
    if node is x or x not in reachable([node]):
        return True
    if node.op not in ELEMENTWISE or node.shape != x.shape:
        return False
    return all(_in_its_place(operand, x) for operand in node.operands)


def _copy(node: Node, strided: Strided | None = None) -> Node:
    return Node(COPY, (node,), node.shape, node.dtype, {}, strided=strided)


def _strided(result: int, rows: Rows | None) -> Strided | None:
    """Where the rows of a result go; None if its memory is whole."""
    if rows is None or result not in rows.results:
        return None
    return Strided(len(rows.operands) + sorted(rows.results).index(result), rows.results[result])


def _placed(storages: Iterable[Storage]) -> int:
    """Places what lies in the workspace, the largest first, where nothing lies at the same time; returns its size."""
    workspace = {id(x): x for x in storages if x.kind == "workspace" and x.first >= 0}
    placed: list[Storage] = []
    for storage in sorted(workspace.values(), key=lambda x: -x.num_bytes):
        at = 0
        for other in sorted(placed, key=lambda x: x.place):
            apart = other.last < storage.first or storage.last < other.first
            if not apart and at + storage.num_bytes > other.place:
                at = max(at, _aligned(other.place + other.num_bytes))
        storage.place = at
        placed.append(storage)
    return max((_aligned(x.place + x.num_bytes) for x in placed), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
