"""Who reads which array of a program, and how often."""

from __future__ import annotations

from collections.abc import Iterable

from lce_jax.launch._graph import CONSTANT, COPY, EMPTY, INPUT, RESULT, Node
from lce_jax.launch._numpy import BINARY, UNARY
from lce_jax.launch._refusal import UnservedError

MOST_TIMES = 12  # that an element is computed for one of another array: what more are needed of is stored
ELEMENTWISE = {*UNARY, *BINARY, "select", "clamp", "convert"}


def root(node: Node) -> Node:
    """The array whose memory ``node`` is a view of; itself if it is none."""
    while node.op in ("reshape", "bitcast_convert") and node.size == node.operands[0].size:
        if node.dtype.itemsize != node.operands[0].dtype.itemsize or _is_bool(node) != _is_bool(node.operands[0]):
            break
        node = node.operands[0]
    return node


def _is_bool(node: Node) -> bool:
    return node.dtype.kind == "b"


def reachable(nodes: Iterable[Node]) -> dict[Node, None]:
    """All that the nodes come from, themselves included; an ordered set."""
    found: dict[Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += node.operands
    return found


def stored_below(node: Node, computed: Iterable[Node]) -> list[Node]:
    """The stored arrays that an element of ``node`` is computed from."""
    found, todo = [], list(node.operands)
    seen: set[Node] = set()
    while todo:
        below = todo.pop()
        if below in seen:
            continue
        seen.add(below)
        if below.op in (INPUT, RESULT, EMPTY) or below in computed:
            found.append(below)
        else:
            todo += below.operands
    return found


def check_alone(scatter: Node, wanted: Iterable[Node]) -> None:
    """Nothing reads what a scatter writes over, but what it writes.

    Raises:
        UnservedError: something does.
    """
    over, todo = root(scatter.operands[0]), list(wanted)
    alone, seen = over.op in (COPY, RESULT), set[Node]()
    while todo and alone:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            alone = node is not over
            todo += scatter.operands[1:2] if node is scatter else node.operands
    if not alone:
        raise UnservedError("a scatter into an array that is read again")


def needed_often(wanted: Iterable[Node], stored: Iterable[Node]) -> list[Node]:
    """What would be computed more than `MOST_TIMES` for one element of a stored array, because it is shifted again.

    Elementwise operations that read an element share it, others each want one at another place.
    """
    times = dict.fromkeys(stored, 1)
    shared: dict[Node, int] = {}
    found: list[Node] = []
    for node in reversed(_in_order(wanted)):
        needed = times[node] if node in times else shared.get(node, 0)
        if node.op in (INPUT, RESULT, EMPTY, CONSTANT):
            continue
        if needed > MOST_TIMES and node.operands:
            found.append(node)
            needed = 1
        for x in set(node.operands):
            if x in stored:
                continue
            if node.op in ELEMENTWISE or node.op in ("broadcast_in_dim", "compare"):
                shared[x] = max(shared.get(x, 0), needed)
            else:
                shared[x] = shared.get(x, 0) + needed
    return found


def _in_order(wanted: Iterable[Node]) -> list[Node]:
    """All that the nodes come from, operands before what reads them."""
    found: dict[Node, None] = {}
    todo = [(node, False) for node in wanted]
    while todo:
        node, visited = todo.pop()
        if visited:
            found[node] = None
        elif node not in found:
            todo.append((node, True))
            todo += [(x, False) for x in node.operands if x not in found]
    return list(found)


def reads_rows(node: Node) -> bool:
    """Whether a factor of ``node`` is rows that a gather picks: their elements lie side by side, the rows do not."""
    if node.op in ("multiply", "convert", "select"):
        return any(map(reads_rows, node.operands))
    return node.op == "gather" and len(node.shape) - 1 in node.attributes["offset_dims"]
