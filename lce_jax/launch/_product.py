"""Small products of matrices in generated code: what the kernels leave out, some columns at the end of a vocabulary.

A block computes a tile of the result in float32, from strips of both operands in shared memory: by tensor cores
(``mma.sync``) if both have 16 bits, otherwise number by number.
"""

from __future__ import annotations

import math
from typing import Any

from lce_jax.launch._body import FLOAT32, NARROW, Body, Index, index_type
from lce_jax.launch._graph import Node
from lce_jax.launch._refusal import UnservedError

TILE = 64  # rows and columns of a block's part of the result
DEPTH = 32  # elements of the contraction at a time
NARROW_DEPTH = 64  # of 16 bits
STRIDE = NARROW_DEPTH + 8  # of a row in shared memory, so that a warp's loads meet no bank twice
MOST = 1024  # of the smallest of rows, columns and contraction: larger products are for tensor cores

# 16 warps, each 16 rows by 16 columns. A thread's numbers are those that mma.sync gives it.
ON_CUDA = f"""
typedef const unsigned short (*Strip)[{STRIDE}];
DEVICE int row_in_tile(int thread, int u) {{ return thread / 128 * 16 + thread % 32 / 4 + u / 2 % 2 * 8; }}
DEVICE int column_in_tile(int thread, int u) {{
  return thread / 32 % 4 * 16 + thread % 4 * 2 + u / 4 * 8 + u % 2;
}}
DEVICE unsigned int pair(Strip x, int i, int k) {{ return *(const unsigned int*)&x[i][k]; }}
""" + "".join(
    f"""
DEVICE void multiply_{kind}(Strip left, Strip right, float* sums, int thread) {{
  const int k = thread % 4 * 2, i = row_in_tile(thread, 0), j = thread / 32 % 4 * 16 + thread % 32 / 4;
  _Pragma("unroll") for (int d = k; d < {NARROW_DEPTH}; d += 16) _Pragma("unroll") for (int n = 0; n < 2; ++n) {{
    float* c = sums + 4 * n;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(pair(left, i, d)), "r"(pair(left, i + 8, d)), "r"(pair(left, i, d + 8)), "r"(pair(left, i + 8, d + 8)),
          "r"(pair(right, j + 8 * n, d)), "r"(pair(right, j + 8 * n, d + 8)));
  }}
}}
"""
    for kind in NARROW.values()
)


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
    across, left = -(-columns // TILE), node.operands[0].dtype
    kind = NARROW.get(left) if node.operands[1].dtype == left else None
    step, strip = (DEPTH, f"[{DEPTH}][{TILE}]") if kind is None else (NARROW_DEPTH, f"[{TILE}][{STRIDE}]")
    body.add(f"alignas(16) SHARED {'float' if kind is None else 'u16'} left{strip}, right{strip};")
    body.add(f"const int row = block / {across} * {TILE}, column = block % {across} * {TILE};")
    body.add(f"float sums[{TILE * TILE // threads}] = {{}};")
    body.add(f"for (int first = 0; first < {depth}; first += {step}) {{")
    sizes = depth, step, threads
    _load(body, "left", node.operands[0], node.attributes["lhs"], ("row", rows), sizes, kind)
    _load(body, "right", node.operands[1], node.attributes["rhs"], ("column", columns), sizes, kind)
    body.add("SYNCHRONIZE")
    if kind is None:
        body.add(f"for (int k = 0; k < {DEPTH}; ++k) for (int u = 0; u < {TILE * TILE // threads}; ++u) {{")
        body.add(f"const int e = thread + u * {threads};")
        body.add(f"sums[u] += left[k][e / {TILE}] * right[k][e % {TILE}];")
        body.add("}")
    else:
        body.add(f"multiply_{kind}(left, right, sums, thread);")
    body.add("SYNCHRONIZE")
    body.add("}")
    body.add(f"EACH for (int u = 0; u < {TILE * TILE // threads}; ++u) {{")
    if kind is None:
        body.add(f"const int e = thread + u * {threads}, i = row + e / {TILE}, j = column + e % {TILE};")
    else:
        body.add("const int i = row + row_in_tile(thread, u), j = column + column_in_tile(thread, u);")
    index = index_type(node)
    body.add(f"if (i < {rows} && j < {columns}) ((float*)b.at[{slot}])[({index})i * {columns} + j] = sums[u];")
    body.add("}")
    return body.lines


def _load(
    body: Body,
    name: str,
    operand: Node,
    contracted: int,
    along: tuple[str, int],
    sizes: tuple[int, int, int],
    kind: str | None,
) -> None:
    """Fills a strip: elements that lie side by side in an operand are loaded by neighbouring threads."""
    (place, size), (depth, step, threads) = along, sizes
    minor = contracted == len(operand.shape) - 1
    body.add(f"UNROLLED for (int e = thread; e < {TILE * step}; e += {threads}) {{")
    split = (f"e / {step}", f"e % {step}") if minor else (f"e % {TILE}", f"e / {TILE}")
    body.add(f"const int i = {place} + {split[0]}, k = first + {split[1]};")
    body.add(f"{'float' if kind is None else 'u16'} x = 0;")
    body.add(f"if (i < {size} && k < {depth}) {{")
    rest: Any = iter(body.unravel("i", tuple(n for dim, n in enumerate(operand.shape) if dim != contracted)))
    indices: tuple[Index, ...] = tuple("k" if dim == contracted else next(rest) for dim in range(len(operand.shape)))
    value = body.value(operand, indices)
    body.add(f"x = {value if kind is None else body.to_storage(operand, value)};")
    body.add("}")
    body.add(f"{name}[{split[1]}][{split[0]}] = x;" if kind is None else f"{name}[{split[0]}][{split[1]}] = x;")
    body.add("}")


def _sizes(node: Node) -> tuple[int, int, int]:
    """Rows, columns, and the length of the contraction."""
    left, right = node.operands
    depth = left.shape[node.attributes["lhs"]]
    return math.prod(left.shape) // depth, math.prod(right.shape) // depth, depth
