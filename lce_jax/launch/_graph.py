"""A program as a graph of arrays: what the reader of StableHLO builds, and what the generated code is made from.

Equal nodes are made once, what follows from constants alone is computed at once, and operations that change nothing
are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lce_jax.launch import _numpy

FOLDED = 64  # elements of the largest constant that is computed from others: it is a table in the code
KERNEL, RESULT, INPUT, CONSTANT, EMPTY, COPY = "kernel", "result", "input", "constant", "empty", "copy"
COUNT = "count"  # of rows, a number that comes with each run
PRODUCT = "dot_general"
SCATTER = "scatter"  # writes some elements of its first operand, where that lies


class Rows(NamedTuple):
    """Operands and results whose memory has only the rows that count, with strides that are known at each run.

    One program for P rows then serves every count up to P, and reads and writes its callers' own arrays. An array has
    at most one dimension before that of its rows, and those after it lie side by side.
    """

    counted_by: int  # the operand, an int32 number, that says how many rows count: at least 1. It has no memory
    operands: Mapping[int, int]  # the index of an operand -> its dimension of rows; after them it reads as anything
    results: Mapping[int, int]  # the index of a result -> its dimension of rows; nothing is written after them


class Strided(NamedTuple):
    """An array whose memory has only the rows that count."""

    number: int  # its place among such arrays
    dimension: int  # of the rows


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One array, or a kernel with several results. Nodes are compared by identity."""

    op: str  # StableHLO's name for it, or one of those above
    operands: tuple[Node, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    attributes: Mapping[str, Any]
    value: Any = None  # of a constant: an array; of a kernel: a `Kernel`
    strided: Strided | None = None

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes; a bool takes one."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Mosaic kernel: its module as JAX lowers it, and which operand each result takes the place of."""

    module: bytes
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    aliases: Mapping[int, int]  # result -> operand


class Builder:
    """Makes nodes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Node] = {}
        self.kernels: list[Node] = []  # in the program's order
        self.products = 0  # of matrices, that are no kernels

    def input(self, index: int, shape: tuple[int, ...], dtype: np.dtype, rows: Rows | None = None) -> Node:
        """The program's argument with this index."""
        if rows is not None and index == rows.counted_by:
            return Node(COUNT, (), shape, dtype, {})
        strided = None
        if rows is not None and index in rows.operands:
            strided = Strided(sorted(rows.operands).index(index), rows.operands[index])
        return Node(INPUT, (), shape, dtype, {"index": index}, strided=strided)

    def constant(self, value: Any, dtype: np.dtype) -> Node:
        """A small array that is known."""
        array = np.asarray(value, dtype)
        key = (CONSTANT, array.shape, array.dtype, array.tobytes())
        return self._once(key, Node(CONSTANT, (), array.shape, array.dtype, {}, array))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Node:
        """Memory of which nothing is known; each call makes another piece."""
        return Node(EMPTY, (), shape, dtype, {})

    def copy(self, x: Node) -> Node:
        """``x`` in memory of its own; each call makes another copy."""
        return Node(COPY, (x,), x.shape, x.dtype, {})

    def kernel(self, kernel: Kernel, operands: tuple[Node, ...]) -> list[Node]:
        """The results of a kernel."""
        node = Node(KERNEL, operands, (), jnp.dtype(bool), {}, kernel)
        self.kernels.append(node)
        return [Node(RESULT, (node,), *result, {"index": i}) for i, result in enumerate(kernel.results)]

    def node(
        self, op: str, operands: tuple[Node, ...], shape: tuple[int, ...], dtype: np.dtype, **attributes: Any
    ) -> Node:
        """The result of an operation of StableHLO."""
        self.products += op == PRODUCT
        if _changes_nothing(op, operands, shape, dtype):
            return operands[0]
        if operands and all(x.op == CONSTANT for x in operands) and math.prod(shape) <= FOLDED:
            return self.constant(_numpy.evaluate(op, [x.value for x in operands], shape, dtype, attributes), dtype)
        key = (op, tuple(map(id, operands)), shape, dtype, tuple(sorted(attributes.items())))
        return self._once(key, Node(op, operands, shape, dtype, attributes))

    def _once(self, key: Hashable, node: Node) -> Node:
        return self._known.setdefault(key, node)


def _changes_nothing(op: str, operands: tuple[Node, ...], shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether the result is the first operand: conversions, reshapes, slices and broadcasts to what it is."""
    same = ("convert", "reshape", "bitcast_convert", "slice", "broadcast_in_dim", "dynamic_slice")
    return op in same and operands[0].shape == shape and operands[0].dtype == dtype
