"""Reads a StableHLO module into a graph: calls are inlined already, loops with a known number of steps are unrolled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from lce_jax.launch._graph import PRODUCT, RESULT, SCATTER, Builder, Kernel, Node, Rows
from lce_jax.launch._jax import hlo, ir
from lce_jax.launch._numpy import BINARY, REDUCE, UNARY
from lce_jax.launch._reads import root
from lce_jax.launch._refusal import UnservedError

MOST_STEPS = 4096  # of a loop
DTYPES = {
    "i1": jnp.bool_, "i32": jnp.int32, "ui32": jnp.uint32, "f32": jnp.float32, "bf16": jnp.bfloat16,
    "f16": jnp.float16,
}  # fmt: skip

type Values = dict[Any, Node]


def read(module: Any, rows: Rows | None = None) -> tuple[Builder, list[Node]]:
    """The graph of the module's function, and its results.

    Raises:
        UnservedError: an operation, a type or a loop that is not known here.
    """
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    (main,) = (op for op in functions if op.name.value == "main")
    builder = Builder()
    (block,) = main.body.blocks
    values = {argument: builder.input(i, *_type(argument), rows) for i, argument in enumerate(block.arguments)}
    return builder, _block(builder, block, values)


def _block(builder: Builder, block: Any, values: Values) -> list[Node]:
    """What the block returns."""
    for op in block.operations:
        name = op.operation.name
        operands = tuple(values[x] for x in op.operation.operands)
        if name in ("func.return", "stablehlo.return", "sdy.return"):
            return list(operands)
        if name == "stablehlo.while":
            results = _unrolled(builder, op, operands, values)
        else:
            results = _operation(builder, op, name.removeprefix("stablehlo."), operands)
        values.update(zip(op.operation.results, results, strict=True))
    raise UnservedError("a block without a result")


def _unrolled(builder: Builder, op: Any, carry: tuple[Node, ...], values: Values) -> list[Node]:
    """The results of a loop, whose steps are counted by constants."""
    (condition,), (body,) = (region.blocks for region in op.operation.regions)
    found = list(carry)
    for _ in range(MOST_STEPS):
        (more,) = _block(builder, condition, values | dict(zip(condition.arguments, found, strict=True)))
        if more.value is None:
            raise UnservedError("a loop whose number of steps depends on the operands")
        if not more.value:
            return found
        found = _block(builder, body, values | dict(zip(body.arguments, found, strict=True)))
    raise UnservedError(f"a loop of more than {MOST_STEPS} steps")


def _operation(builder: Builder, op: Any, name: str, operands: tuple[Node, ...]) -> list[Node]:
    attributes = op.operation.attributes
    types = [_type(result) for result in op.operation.results]
    if name == "custom_call":
        return _custom_call(builder, attributes, operands, types)
    if name == "optimization_barrier":
        return list(operands)
    if name == "sort":
        return _sorted(builder, op, operands)
    if len(types) != 1:
        raise UnservedError(f"the operation {op.operation.name} with {len(types)} results")
    shape, dtype = types[0]
    if name == "constant":
        return [_constant(builder, attributes["value"], shape, dtype)]
    if name == "reduce":
        return [builder.node("reduce", operands, shape, dtype, **_reduction(op))]
    if name == "not" and dtype != jnp.bool_:
        raise UnservedError(f"not of {dtype}")
    if name in UNARY or name in BINARY or name in ("select", "clamp", "is_finite"):
        return [builder.node(name, _spread(builder, operands, shape), shape, dtype)]
    if name == SCATTER:
        return [_scattered(builder, op, operands, shape, dtype)]
    if name not in ATTRIBUTES:
        raise UnservedError(f"the operation {name}")
    if name == PRODUCT and (sums := _of_vector(builder, operands, shape, dtype, **_contraction(attributes))):
        return [sums]
    return [builder.node(name, operands, shape, dtype, **ATTRIBUTES[name](attributes))]


def _spread(builder: Builder, operands: tuple[Node, ...], shape: tuple[int, ...]) -> tuple[Node, ...]:
    """Scalars beside arrays (as ``select`` and ``clamp`` allow them) as arrays."""
    return tuple(
        x if x.shape == shape else builder.node("broadcast_in_dim", (x,), shape, x.dtype, dimensions=())
        for x in operands
    )


def _custom_call(builder: Builder, attributes: Any, operands: tuple[Node, ...], types: list[Any]) -> list[Node]:
    target = attributes["call_target_name"].value
    if target == "AllocateBuffer":
        return [builder.empty(*types[0])]
    if target != "mosaic_gpu_v2":
        raise UnservedError(f"the custom call {target}")
    module = attributes["mhlo.backend_config"]["module"].value_bytes
    aliases = dict(map(_alias, attributes.get("output_operand_aliases", ())))
    return builder.kernel(Kernel(module, tuple(types), aliases), operands)


def _alias(attribute: Any) -> tuple[int, int]:
    """(result, operand) of what stands in ``#stablehlo.output_operand_alias<output_tuple_indices = [], ...>``."""
    result = re.search(r"output_tuple_indices = \[(\d*)\]", str(attribute))
    operand = re.search(r"operand_index = (\d+)", str(attribute))
    assert result is not None
    assert operand is not None
    return int(result[1] or 0), int(operand[1])


def _constant(builder: Builder, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> Node:
    dense: Any = ir.DenseElementsAttr(value)
    if dense.is_splat:
        scalar = builder.constant(dense.get_splat_value().value, dtype)
        return builder.node("broadcast_in_dim", (scalar,), shape, dtype, dimensions=())
    if dtype == jnp.bool_:
        return builder.constant(np.reshape(list(ir.DenseIntElementsAttr(value)), shape), dtype)
    if dtype not in (jnp.int32, jnp.float32):
        raise UnservedError(f"a constant array of {dtype}")
    return builder.constant(np.array(dense).reshape(shape), dtype)


def _reduction(op: Any) -> dict[str, Any]:
    (block,) = op.operation.regions[0].blocks
    names = [inner.operation.name.removeprefix("stablehlo.") for inner in block.operations]
    if len(names) != 2 or names[0] not in REDUCE:
        raise UnservedError(f"a reduction by {', '.join(names)}")
    return {"combine": names[0], "dimensions": _ints(op.operation.attributes["dimensions"])}


def _ints(attribute: Any) -> tuple[int, ...]:
    return tuple(map(int, attribute))


def _named(attribute: Any) -> str:
    """What stands in ``#stablehlo<comparison_direction LT>``."""
    return str(attribute).removesuffix(">").split()[-1]


def _comparison(attributes: Any) -> dict[str, Any]:
    if "compare_type" in attributes and _named(attributes["compare_type"]) == "TOTALORDER":
        raise UnservedError("a comparison in the total order of floats")
    return {"direction": _named(attributes["comparison_direction"])}


def _padding(attributes: Any) -> dict[str, Any]:
    if any(_ints(attributes["interior_padding"])):
        raise UnservedError("padding between elements")
    return {"low": _ints(attributes["edge_padding_low"])}


def _contraction(attributes: Any) -> dict[str, Any]:
    numbers: Any = hlo.DotDimensionNumbers(attributes["dot_dimension_numbers"])
    contracted = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    if numbers.lhs_batching_dimensions or [len(x) for x in contracted] != [1, 1]:
        raise UnservedError("a product of several matrices")
    return {"lhs": contracted[0][0], "rhs": contracted[1][0]}


def _of_vector(
    builder: Builder, operands: tuple[Node, ...], shape: tuple[int, ...], dtype: np.dtype, lhs: int, rhs: int
) -> Node | None:
    """A product of a matrix and a vector as a sum; None if it is another product."""
    (matrix, dim), (vector, _) = sorted(zip(operands, (lhs, rhs), strict=True), key=lambda x: -len(x[0].shape))
    if len(vector.shape) != 1 or len(matrix.shape) != 2:
        return None
    factors = [builder.node("convert", (x,), x.shape, dtype) for x in (matrix, vector)]
    factors[1] = builder.node("broadcast_in_dim", (factors[1],), matrix.shape, dtype, dimensions=(dim,))
    terms = builder.node("multiply", tuple(factors), matrix.shape, dtype)
    zero = builder.constant(0.0, dtype)
    return builder.node("reduce", (terms, zero), shape, dtype, combine="add", dimensions=(dim,))


def _gathered(attributes: Any) -> dict[str, Any]:
    numbers: Any = hlo.GatherDimensionNumbers(attributes["dimension_numbers"])
    if list(numbers.operand_batching_dims):
        raise UnservedError("a gather with batches")
    return {
        "slice_sizes": _ints(attributes["slice_sizes"]),
        "offset_dims": _ints(numbers.offset_dims),
        "collapsed": _ints(numbers.collapsed_slice_dims),
        "start_index_map": _ints(numbers.start_index_map),
        "index_vector_dim": int(numbers.index_vector_dim),
    }


def _scattered(builder: Builder, op: Any, operands: tuple[Node, ...], shape: Any, dtype: np.dtype) -> Node:
    """Elements that are set or added to, each at most once, at places in all dimensions."""
    attributes = op.operation.attributes
    numbers: Any = hlo.ScatterDimensionNumbers(attributes["scatter_dimension_numbers"])
    (block,) = op.operation.regions[0].blocks
    names = [inner.operation.name.removeprefix("stablehlo.") for inner in block.operations]
    is_set = names == ["return"] and block.operations[0].operation.operands[0] == block.arguments[1]
    unique = "unique_indices" in attributes and attributes["unique_indices"].value
    every, vector = list(range(len(shape))), numbers.index_vector_dim
    lists = numbers.inserted_window_dims, numbers.scattered_dims_to_operand_dims, numbers.update_window_dims
    elements = [list(x) for x in lists] == [every, every, []] and vector == len(operands[2].shape)
    if not (is_set or names == ["add", "return"]) or not unique or not elements:
        raise UnservedError("a scatter that does more than setting or adding to single elements, each once")
    over, places, updates = operands
    over = over if root(over).op == RESULT else builder.copy(over)
    return builder.node(SCATTER, (over, places, updates), shape, dtype, combine="set" if is_set else "add")


MOST_SORTED = 512  # numbers that one sort compares, each with each


def _sorted(builder: Builder, op: Any, operands: tuple[Node, ...]) -> list[Node]:
    """A stable sort along the last dimension: the place of each number is how many come before it."""
    keys, attributes = operands[0], op.operation.attributes
    (block,) = op.operation.regions[0].blocks
    compare, *rest = block.operations
    last, size = len(keys.shape), keys.shape[-1]
    by_first = list(compare.operation.operands) == list(block.arguments)[:2] and len(rest) == 1
    ascending = compare.operation.name == "stablehlo.compare" and _comparison(compare.operation.attributes) == {
        "direction": "LT"
    }
    if not by_first or not ascending or keys.dtype != jnp.int32 or attributes["dimension"].value != last - 1:
        raise UnservedError("a sort that is not by one integer along the last dimension")
    if size > MOST_SORTED:
        raise UnservedError(f"a sort of {size} numbers")
    wide, this, other = (*keys.shape, size), tuple(range(last)), (*range(last - 1), last)

    def node(name: str, *given: Node, shape: Any = wide, dtype: Any = jnp.bool_, **attributes: Any) -> Node:
        return builder.node(name, given, shape, jnp.dtype(dtype), **attributes)

    def along(x: Node, dimensions: tuple[int, ...]) -> Node:
        return node("broadcast_in_dim", x, dtype=x.dtype, dimensions=dimensions)

    def added(x: Node) -> Node:
        none = builder.constant(0, jnp.dtype(jnp.int32))
        return node("reduce", x, none, shape=keys.shape, dtype=jnp.int32, combine="add", dimensions=(last,))

    places = [node("iota", dtype=jnp.int32, dimension=dim) for dim in (last, last - 1)]
    pair = along(keys, other), along(keys, this)
    less, equal = (node("compare", *pair, direction=direction) for direction in ("LT", "EQ"))
    before = node("or", less, node("and", equal, node("compare", *places, direction="LT")))
    rank = added(node("convert", before, dtype=jnp.int32))
    chosen = node("compare", along(rank, other), places[1], direction="EQ")
    zeros = along(builder.constant(0, jnp.dtype(jnp.int32)), ())
    found = []
    for x in operands:
        bits = node("bitcast_convert", x, shape=x.shape, dtype=jnp.int32)
        one = added(node("select", chosen, along(bits, other), zeros, dtype=jnp.int32))
        found.append(node("bitcast_convert", one, shape=x.shape, dtype=x.dtype))
    return found


ATTRIBUTES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "reshape": lambda _: {},
    "convert": lambda _: {},
    "bitcast_convert": lambda _: {},
    "dynamic_slice": lambda _: {},
    "dynamic_update_slice": lambda _: {},
    "reduce_precision": lambda a: {name: a[name].value for name in ("exponent_bits", "mantissa_bits")},
    "compare": _comparison,
    "broadcast_in_dim": lambda a: {"dimensions": _ints(a["broadcast_dimensions"])},
    "transpose": lambda a: {"permutation": _ints(a["permutation"])},
    "dot_general": _contraction,
    "gather": _gathered,
    "reverse": lambda a: {"dimensions": _ints(a["dimensions"])},
    "iota": lambda a: {"dimension": a["iota_dimension"].value},
    "concatenate": lambda a: {"dimension": a["dimension"].value},
    "slice": lambda a: {
        "start": _ints(a["start_indices"]),
        "limit": _ints(a["limit_indices"]),
        "strides": _ints(a["strides"]),
    },
    "pad": _padding,
}


def _type(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    kind = ir.RankedTensorType(value.type)
    name = str(kind.element_type)
    if name not in DTYPES:
        raise UnservedError(f"arrays of {name}")
    return tuple(kind.shape), jnp.dtype(DTYPES[name])
