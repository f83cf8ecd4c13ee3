"""CUDA C++ for what lies between the kernels: one function a stage, whose thread blocks share out its arrays.

An element is computed from its indices: an operation asks its operands for the elements it needs, so that whole chains
become one expression and nothing in between is stored. Sums over many elements have a thread block for 32 results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from lce_jax.launch import _product as product
from lce_jax.launch._body import C_TYPES, NARROW, Body, Index, index_type, stored
from lce_jax.launch._expressions import OPERATIONS
from lce_jax.launch._graph import COPY, PRODUCT, SCATTER, Node
from lce_jax.launch._reads import reads_rows

THREADS = 512
LANES = 32  # results that lie side by side, of a block that reduces
PER_THREAD = 4  # elements of large arrays
LARGE = 1 << 20
LONG = 32  # a reduction of more elements has blocks of its own; the others are loops in an element's expression

PRELUDE = """
typedef unsigned short u16; typedef unsigned int u32;
struct Buffers { void* at[BUFFERS]; long long n[NUMBERS]; };  // n: how many rows count, then pairs of strides
DEVICE float of_bf16(u16 x) { return bits_to_float((u32)x << 16); }
DEVICE u16 to_bf16(float x) {
  u32 b = float_to_bits(x);
  return x != x ? 0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
DEVICE float maximum(float a, float b) { return a > b || a != a ? a : b; }
DEVICE float minimum(float a, float b) { return a < b || a != a ? a : b; }
DEVICE int maximum(int a, int b) { return a > b ? a : b; }
DEVICE int minimum(int a, int b) { return a < b ? a : b; }
DEVICE u32 maximum(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 minimum(u32 a, u32 b) { return a < b ? a : b; }
DEVICE long long minimum(long long a, long long b) { return a < b ? a : b; }
DEVICE int sign(int a) { return (a > 0) - (a < 0); }
DEVICE float sign(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
DEVICE int magnitude(int a) { return a < 0 ? -a : a; }
DEVICE float magnitude(float a) { return fabsf(a); }
"""
ON_CUDA = (
    """
#define DEVICE static __device__ __forceinline__
#define PART DEVICE
#define STAGE(name) extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Buffers b)
#define WHERE const int block = blockIdx.x, thread = threadIdx.x;
#define SHARED __shared__
#define SYNCHRONIZE __syncthreads();
#define UNROLLED _Pragma("unroll 16")
#define EACH _Pragma("unroll")
DEVICE float bits_to_float(unsigned int x) { return __uint_as_float(x); }
DEVICE unsigned int float_to_bits(float x) { return __float_as_uint(x); }
DEVICE float of_f16(unsigned short x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEVICE unsigned short to_f16(float x) { unsigned short y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
"""
    + product.ON_CUDA
)


class Segment(NamedTuple):
    """Arrays that are computed together: of one shape, or reductions of arrays of one shape. A product is alone."""

    nodes: tuple[Node, ...]
    num_blocks: int


def is_apart(node: Node) -> bool:
    """Whether a node has blocks of its own: a product, a scatter, or a reduction over many elements."""
    return node.op in (PRODUCT, SCATTER) or (node.op == "reduce" and node.operands[0].size > LONG * node.size)


def segments(nodes: Iterable[Node]) -> list[Segment]:
    """A stage's arrays, grouped."""
    groups: dict[Any, list[Node]] = {}
    for node in nodes:
        key: Any = (node.shape,)
        if node.op in (PRODUCT, SCATTER):
            key = node
        elif is_apart(node):
            key = node.operands[0].shape, node.attributes["dimensions"]
        groups.setdefault(key, []).append(node)
    return [Segment(tuple(group), _num_blocks(group[0])) for group in groups.values()]


def _num_blocks(node: Node) -> int:
    if node.op == PRODUCT:
        return product.num_blocks(node)
    if node.op == SCATTER:
        return -(-node.operands[2].size // THREADS)
    per_block = _lanes(node.size) if is_apart(node) else THREADS * _per_thread(node.size)
    return -(-node.size // per_block)


def _lanes(size: int) -> int:
    return min(LANES, THREADS, 1 << (size - 1).bit_length())


def _per_thread(size: int) -> int:
    return PER_THREAD if size >= LARGE else 1


def module(stages: Sequence[Sequence[Segment]], slots: Mapping[Node, int], num_slots: int, num_numbers: int = 0) -> str:
    """The source of all stages. ``slots`` says which buffer holds each stored array."""
    sizes = {"THREADS": THREADS, "BUFFERS": max(num_slots, 1), "NUMBERS": max(num_numbers, 1)}
    functions = ["\n".join(f"#define {name} {size}" for name, size in sizes.items()) + PRELUDE]
    for i, stage in enumerate(stages):
        here = {node for segment in stage for node in segment.nodes}
        functions += [_function(f"part_{i}_{j}", segment, slots, here) for j, segment in enumerate(stage)]
        functions.append(_stage(i, stage))
    return "\n".join(functions)


def _stage(number: int, stage: Sequence[Segment]) -> str:
    lines, first = [], 0
    for j, segment in enumerate(stage):
        last = first + segment.num_blocks
        lines.append(f"  if (block < {last}) return part_{number}_{j}(b, block - {first}, thread);")
        first = last
    return "\n".join([f"STAGE(stage_{number}) {{", "  WHERE", *lines, "}"])


def _function(name: str, segment: Segment, slots: Mapping[Node, int], here: Set[Node]) -> str:
    first, *_ = segment.nodes
    body = Body(slots, here, OPERATIONS)
    if first.op == PRODUCT:
        lines = product.lines(first, slots[first], body, THREADS)
    elif first.op == SCATTER:
        lines = _scattering(first, slots[first], body)
    else:
        lines = (_reducing if is_apart(first) else _mapping)(segment, slots, body)
    return "\n".join([f"PART void {name}(const Buffers& b, int block, int thread) {{", *lines, "}"])


def _mapping(segment: Segment, slots: Mapping[Node, int], body: Body) -> list[str]:
    """Each thread computes some elements, far from each other so that neighbours read neighbours.

    It stores them after it has computed all, so that their loads need not wait for one another.
    """

    def computed(n: int, node: Node, indices: tuple[Index, ...]) -> str:
        value = body.value(node.operands[0], indices) if node.op == COPY else body.computed(node, indices)
        return f"found{n}[k] = {body.to_storage(node, value)};"

    def kept(n: int, node: Node, indices: tuple[Index, ...]) -> str:
        place = "i" if node.strided is None else body.strided(node, indices)
        return f"(({stored(node)}*)b.at[{slots[node]}])[{place}] = found{n}[k];"

    first, *_ = segment.nodes
    per_thread, kind = _per_thread(first.size), index_type(first)
    for n, node in enumerate(segment.nodes):
        body.add(f"{stored(node)} found{n}[{per_thread}];")
    numbered = sorted(enumerate(segment.nodes), key=lambda x: _rows(x[1]))
    for line in (computed, kept):
        body.add(f"UNROLLED for (int k = 0; k < {per_thread}; ++k) {{")
        body.add(f"const {kind} i = ({kind})block * {THREADS * per_thread} + thread + k * {THREADS};")
        body.add(f"if (i < {first.size}) {{")
        indices = body.unravel("i", first.shape)
        for dim, nodes in itertools.groupby(numbered, lambda x: _rows(x[1])):
            body.add("{" if dim < 0 else f"if ({indices[dim]} < b.n[0]) {{")
            for n, node in nodes:
                body.add(line(n, node, indices))
            body.add("}")
        body.add("}}")
    return body.lines


def _rows(node: Node) -> int:
    """The dimension of which only the rows that count are stored; -1 if all are."""
    strided = node.operands[0].strided or node.strided if node.op == COPY else None
    return -1 if strided is None else strided.dimension


def _scattering(node: Node, slot: int, body: Body) -> list[str]:
    """Each thread stores one element, if its place is inside."""
    _, places, updates = node.operands
    body.add(f"const int i = block * {THREADS} + thread;")
    body.add(f"if (i < {updates.size}) {{")
    at = body.unravel("i", updates.shape)
    found = [body.simple(body.value(places, (*at, dim))) for dim in range(len(node.shape))]
    inside = " && ".join(f"{x} >= 0 && {x} < {size}" for x, size in zip(found, node.shape, strict=True))
    value = body.value(updates, at)
    body.add(f"if ({inside}) {{")
    element = f"(({stored(node)}*)b.at[{slot}])[{body.ravel(node, tuple(found))}]"
    if node.attributes["combine"] == "add":
        before = f"of_{NARROW[node.dtype]}({element})" if node.dtype in NARROW else element
        value = body.rounded(node, f"{before} + {value}")
    body.add(f"{element} = {body.to_storage(node, value)};")
    body.add("}}")
    return body.lines


def _reducing(segment: Segment, slots: Mapping[Node, int], body: Body) -> list[str]:
    """The threads of a block that share a result each take every so-manieth element, then one adds up theirs."""
    first, *_ = segment.nodes
    lanes, shape, dimensions = _lanes(first.size), first.operands[0].shape, first.attributes["dimensions"]
    rows, length = THREADS // lanes, math.prod(shape[dim] for dim in dimensions)
    for k, node in enumerate(segment.nodes):
        body.add(f"SHARED {C_TYPES[node.dtype]} parts{k}[{THREADS}];")
        body.add(f"{C_TYPES[node.dtype]} sum{k} = {body.literal(body.identity(node))};")
    minor = dimensions == (len(shape) - 1,) and all(reads_rows(node.operands[0]) for node in segment.nodes)
    across, place = (
        ("thread / {0}, row = thread % {0}", f"lane * {rows} + r")
        if minor
        else ("thread % {1}, row = thread / {1}", f"r * {lanes} + lane")
    )
    body.add(f"const int lane = {across.format(rows, lanes)};")
    body.add(f"const {index_type(first)} i = ({index_type(first)})block * {lanes} + lane;")
    body.add(f"if (i < {first.size}) {{")
    kept = body.unravel("i", first.shape)
    body.add(f"UNROLLED for (int r = row; r < {length}; r += {rows}) {{")
    reduced = iter(body.unravel("r", tuple(shape[dim] for dim in dimensions)))
    rest = iter(kept)
    indices = tuple(next(reduced) if dim in dimensions else next(rest) for dim in range(len(shape)))
    for k, node in enumerate(segment.nodes):
        value = body.value(node.operands[0], indices)
        body.add(f"sum{k} = {body.combined(node, f'sum{k}', value)};")
    body.add("}}")
    for k, _ in enumerate(segment.nodes):
        body.add(f"parts{k}[thread] = sum{k};")
    body.add("SYNCHRONIZE")
    body.add(f"if (row != 0 || i >= {first.size}) return;")
    for k, node in enumerate(segment.nodes):
        body.add(f"for (int r = 1; r < {rows}; ++r) {{")
        body.add(f"sum{k} = {body.combined(node, f'sum{k}', f'parts{k}[{place}]')};")
        body.add("}")
        body.add(f"(({stored(node)}*)b.at[{slots[node]}])[i] = {body.to_storage(node, f'sum{k}')};")
    return body.lines
