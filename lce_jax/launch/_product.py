"""Small products of matrices in generated code: what the kernels leave out, some columns at the end of a vocabulary.

A block computes a tile of the result in float32, from strips of both operands in shared memory. No tensor cores: such a
product is a hundredth of a call's work.
"""

from __future__ import annotations

import math
from typing import Any

from lce_jax.launch._body import FLOAT32, Body, Index, index_type
from lce_jax.launch._graph import Node
from lce_jax.launch._refusal import UnservedError

TILE = 64  # rows and columns of a block's part of the result
DEPTH = 32  # elements of the contraction at a time
MOST = 1024  # of the smallest of rows, columns and contraction: larger products are for tensor cores


def num_blocks(node: Node) -> int:
    """How many tiles the result has."""
    rows, columns, _ = _sizes(node)
    return -(-rows // TILE) * -(-columns // TILE)


def lines(node: Node, slot: int, body: Body, threads: int) -> list[str]:
    """The function that computes one tile.

    Raises:
        UnservedError: a product that is not small, not of matrices or not summed in float32.
    """
    rows, columns, depth = _sizes(node)
    if min(rows, columns, depth) > MOST or node.dtype != FLOAT32:
        raise UnservedError(f"a product of [{rows}, {depth}] and [{depth}, {columns}] in {node.dtype}")
    across = -(-columns // TILE)
    body.add(f"SHARED float left[{DEPTH}][{TILE}], right[{DEPTH}][{TILE}];")
    body.add(f"const int row = block / {across} * {TILE}, column = block % {across} * {TILE};")
    body.add(f"float sums[{TILE * TILE // threads}] = {{}};")
    body.add(f"for (int first = 0; first < {depth}; first += {DEPTH}) {{")
    _load(body, "left", node.operands[0], node.attributes["lhs"], ("row", rows), depth, threads)
    _load(body, "right", node.operands[1], node.attributes["rhs"], ("column", columns), depth, threads)
    body.add("SYNCHRONIZE")
    body.add(f"for (int k = 0; k < {DEPTH}; ++k) for (int u = 0; u < {TILE * TILE // threads}; ++u) {{")
    body.add(f"const int e = thread + u * {threads};")
    body.add(f"sums[u] += left[k][e / {TILE}] * right[k][e % {TILE}];")
    body.add("}")
    body.add("SYNCHRONIZE")
    body.add("}")
    body.add(f"for (int u = 0; u < {TILE * TILE // threads}; ++u) {{")
    body.add(f"const int e = thread + u * {threads}, i = row + e / {TILE}, j = column + e % {TILE};")
    kind = index_type(node)
    body.add(f"if (i < {rows} && j < {columns}) ((float*)b.at[{slot}])[({kind})i * {columns} + j] = sums[u];")
    body.add("}")
    return body.lines


def _load(
    body: Body, name: str, operand: Node, contracted: int, along: tuple[str, int], depth: int, threads: int
) -> None:
    """Fills a strip: elements that lie side by side in an operand are loaded by neighbouring threads."""
    place, size = along
    minor = contracted == len(operand.shape) - 1
    body.add(f"for (int e = thread; e < {TILE * DEPTH}; e += {threads}) {{")
    split = (f"e / {DEPTH}", f"e % {DEPTH}") if minor else (f"e % {TILE}", f"e / {TILE}")
    body.add(f"const int i = {place} + {split[0]}, k = first + {split[1]};")
    body.add("float x = 0;")
    body.add(f"if (i < {size} && k < {depth}) {{")
    rest: Any = iter(body.unravel("i", tuple(n for dim, n in enumerate(operand.shape) if dim != contracted)))
    indices: tuple[Index, ...] = tuple("k" if dim == contracted else next(rest) for dim in range(len(operand.shape)))
    value = body.value(operand, indices)
    body.add(f"x = {value};")
    body.add("}")
    body.add(f"{name}[{split[1]}][{split[0]}] = x;")
    body.add("}")


def _sizes(node: Node) -> tuple[int, int, int]:
    """Rows, columns, and the length of the contraction."""
    left, right = node.operands
    depth = left.shape[node.attributes["lhs"]]
    return math.prod(left.shape) // depth, math.prod(right.shape) // depth, depth
