"""An element of an operation's result as a C++ expression: from the elements of the operands that it needs."""

from __future__ import annotations

import math
from typing import Any

from lce_jax.launch._body import BOOL, C_TYPES, FLOAT32, INT32, NARROW, UINT32, Body, Index, Operation
from lce_jax.launch._graph import COUNT, INPUT, Node
from lce_jax.launch._numpy import narrow
from lce_jax.launch._reads import reads_rows
from lce_jax.launch._refusal import UnservedError

OPERATORS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "and": "&",
    "or": "|",
    "xor": "^",
}
COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
FUNCTIONS = {"exponential": "expf", "log": "logf", "tanh": "tanhf"}


def _elementwise(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    x = [body.value(operand, indices) for operand in node.operands]
    if node.op in OPERATORS:
        return body.rounded(node, f"{x[0]} {OPERATORS[node.op]} {x[1]}")
    if node.op in FUNCTIONS:
        return body.rounded(node, f"{FUNCTIONS[node.op]}({x[0]})")
    return SIMPLE[node.op](*x)


def _shift(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    """C++ leaves a shift by 32 and more undefined, and shifts an unsigned number to the right without its sign."""
    value, count = (body.value(operand, indices) for operand in node.operands)
    if node.op == "shift_left":
        return f"(u32){count} < 32 ? {value} << {count} : 0"
    return f"({C_TYPES[node.dtype]})((int){value} >> ((u32){count} < 32 ? (int){count} : 31))"


def _select(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    """An argument, which elsewhere may be uninitialised, and products with gathered rows are read only where chosen."""
    condition, then, otherwise = node.operands
    chosen = body.value(condition, indices)
    if then.op == INPUT or (then.op == "multiply" and reads_rows(then)):
        return body.either(node, chosen, (then, indices), (otherwise, indices))
    return f"{chosen} ? {body.value(then, indices)} : {body.value(otherwise, indices)}"


def _compare(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    left, right = (body.value(operand, indices) for operand in node.operands)
    return f"{left} {COMPARISONS[node.attributes['direction']]} {right}"


def _remainder(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    left, right = (body.value(operand, indices) for operand in node.operands)
    return f"{left} % {right}" if node.dtype in (INT32, UINT32) else f"fmodf({left}, {right})"


def _convert(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    (operand,) = node.operands
    value = body.value(operand, indices)
    if node.dtype == BOOL:
        return f"{value} != 0"
    return body.rounded(node, f"({C_TYPES[node.dtype]}){value}")


def _reduce_precision(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    value, kind = body.value(node.operands[0], indices), NARROW.get(narrow(node.attributes))
    return value if kind is None else f"of_{kind}(to_{kind}({value}))"


def _bitcast_convert(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    (operand,) = node.operands
    value = body.value(operand, indices)
    if (operand.dtype, node.dtype) == (FLOAT32, INT32):
        return f"(int)float_to_bits({value})"
    if (operand.dtype, node.dtype) == (INT32, FLOAT32):
        return f"bits_to_float((u32){value})"
    raise UnservedError(f"the bits of {operand.dtype} as {node.dtype}")


def _iota(_: Body, node: Node, indices: tuple[Index, ...]) -> str:
    return f"({C_TYPES[node.dtype]}){indices[node.attributes['dimension']]}"


def _constant(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    table = body.unused("table")
    elements = ", ".join(body.literal(x) for x in node.value.reshape(-1))
    body.lines.append(f"const {C_TYPES[node.dtype]} {table}[] = {{ {elements} }};")
    return f"{table}[{body.ravel(node, indices)}]"


def _broadcast_in_dim(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    (operand,) = node.operands
    kept = zip(node.attributes["dimensions"], operand.shape, strict=True)
    return body.value(operand, tuple(0 if size == 1 else indices[dim] for dim, size in kept))


def _transpose(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    places = dict(zip(node.attributes["permutation"], indices, strict=True))
    return body.value(node.operands[0], tuple(places[dim] for dim in range(len(indices))))


def _reshape(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    (operand,) = node.operands
    kept = [index for index, size in zip(indices, node.shape, strict=True) if size != 1]
    if [size for size in operand.shape if size != 1] == [size for size in node.shape if size != 1]:
        rest = iter(kept)
        return body.value(operand, tuple(0 if size == 1 else next(rest) for size in operand.shape))
    place = body.ravel(node, indices)
    return body.value(operand, body.unravel(f"({place})", operand.shape))


def _gather(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    """Of each dimension the start that the indices say, moved so that the slice lies inside, and the place in it."""
    (operand, places), told = node.operands, node.attributes
    batch = [i for dim, i in enumerate(indices) if dim not in told["offset_dims"]]
    inside, vector = iter(indices[dim] for dim in told["offset_dims"]), told["index_vector_dim"]
    found: list[Index] = []
    for dim, (total, size) in enumerate(zip(operand.shape, told["slice_sizes"], strict=True)):
        start: Index = 0
        if dim in told["start_index_map"] and total > size:
            at = (*batch[:vector], told["start_index_map"].index(dim), *batch[vector:])
            start = body.simple(_clamped(body.value(places, at), places, total - size))
        if dim not in told["collapsed"]:
            start = body.simple(_sum(next(inside), start))
        found.append(start)
    return body.value(operand, tuple(found))


def _reverse(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    last = [size - 1 if dim in node.attributes["dimensions"] else None for dim, size in enumerate(node.shape)]
    turned = (i if n is None else body.simple(f"{n} - {i}") for i, n in zip(indices, last, strict=True))
    return body.value(node.operands[0], tuple(turned))


def _slice(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    starts, strides = node.attributes["start"], node.attributes["strides"]
    moved = (_sum(_times(i, stride), start) for i, start, stride in zip(indices, starts, strides, strict=True))
    return body.value(node.operands[0], tuple(body.simple(index) for index in moved))


def _starts(body: Body, operands: tuple[Node, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
    found = zip(operands, sizes, shape, strict=True)
    return [_clamped(body.value(operand, ()), operand, total - size) for operand, size, total in found]


def _clamped(index: str, node: Node, last: int) -> str:
    """An element of ``node`` as an index from 0 to ``last``."""
    return f"(int)minimum({index}, {last}u)" if node.dtype == UINT32 else f"minimum(maximum({index}, 0), {last})"


def _dynamic_slice(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    operand, *starts = node.operands
    first = _starts(body, tuple(starts), node.shape, operand.shape)
    moved = (body.simple(_sum(i, start)) for i, start in zip(indices, first, strict=True))
    return body.value(operand, tuple(moved))


def _dynamic_update_slice(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    operand, update, *starts = node.operands
    first = _starts(body, tuple(starts), update.shape, node.shape)
    moved = [body.simple(f"{i} - {start}") for i, start in zip(indices, first, strict=True)]
    inside = [f"{i} >= 0 && {i} < {size}" for i, size in zip(moved, update.shape, strict=True)]
    return body.either(node, " && ".join(inside) or "true", (update, tuple(moved)), (operand, indices))


def _pad(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    operand, value = node.operands
    moved = [body.simple(_sum(i, -low)) for i, low in zip(indices, node.attributes["low"], strict=True)]
    inside = [
        f"{i} >= 0 && {i} < {size}"
        for i, size, total, low in zip(moved, operand.shape, node.shape, node.attributes["low"], strict=True)
        if size != total or low
    ]
    return body.either(node, " && ".join(inside) or "true", (operand, tuple(moved)), (value, ()))


def _concatenate(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    dim = node.attributes["dimension"]
    return _piece(body, node, node.operands, 0, indices, dim)


def _piece(body: Body, node: Node, pieces: tuple[Node, ...], start: int, indices: tuple[Index, ...], dim: int) -> str:
    piece, *rest = pieces
    at = _sum(indices[dim], -start)
    if isinstance(at, int) and rest and at >= piece.shape[dim]:
        return _piece(body, node, tuple(rest), start + piece.shape[dim], indices, dim)
    here = (*indices[:dim], body.simple(at), *indices[dim + 1 :])
    if not rest or isinstance(at, int):
        return body.value(piece, here)
    end = start + piece.shape[dim]
    name = body.declared(node)
    body.add(f"if ({indices[dim]} < {end}) {{")
    body.lines.append(f"{name} = {body.value(piece, here)};")
    body.add("}")
    body.add("else {")
    body.lines.append(f"{name} = {_piece(body, node, tuple(rest), end, indices, dim)};")
    body.add("}")
    return name


def _reduce(body: Body, node: Node, indices: tuple[Index, ...]) -> str:
    operand, dimensions = node.operands[0], node.attributes["dimensions"]
    sizes = tuple(operand.shape[dim] for dim in dimensions)

    def of(reduced: tuple[Index, ...]) -> str:
        inner, outer = iter(reduced), iter(indices)
        places = (next(inner) if dim in dimensions else next(outer) for dim in range(len(operand.shape)))
        return body.value(operand, tuple(places))

    if math.prod(sizes) == 1:
        return of((0,) * len(sizes))
    name, counter = body.declared(node), body.unused("r")
    body.lines.append(f"{name} = {body.literal(body.identity(node))};")
    body.add(f"for (int {counter} = 0; {counter} < {math.prod(sizes)}; ++{counter}) {{")
    body.lines.append(f"{name} = {body.combined(node, name, of(body.unravel(counter, sizes)))};")
    body.add("}")
    return name


def _sum(index: Index, number: Any) -> Index:
    if isinstance(index, int) and isinstance(number, int):
        return index + number
    return index if number == 0 else f"{index} + {number}"


def _times(index: Index, number: int) -> Index:
    if isinstance(index, int):
        return index * number
    return index if number == 1 else f"{index} * {number}"


SIMPLE: dict[str, Any] = {
    "negate": "-({})".format,
    "not": "!{}".format,
    "sign": "sign({})".format,
    "abs": "magnitude({})".format,
    "maximum": "maximum({}, {})".format,
    "minimum": "minimum({}, {})".format,
    "clamp": "minimum(maximum({1}, {0}), {2})".format,
    "is_finite": "isfinite({})".format,
}

OPERATIONS: dict[str, Operation] = {
    COUNT: lambda *_: "(int)b.n[0]",
    **dict.fromkeys((*OPERATORS, *FUNCTIONS, *SIMPLE), _elementwise),
    "shift_left": _shift,
    "shift_right_arithmetic": _shift,
    "select": _select,
    "compare": _compare,
    "remainder": _remainder,
    "convert": _convert,
    "reduce_precision": _reduce_precision,
    "bitcast_convert": _bitcast_convert,
    "iota": _iota,
    "constant": _constant,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "gather": _gather,
    "reverse": _reverse,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "reduce": _reduce,
}
