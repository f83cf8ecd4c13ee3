"""StableHLO's operations on NumPy arrays: what is known before a program runs is computed with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lce_jax.launch._refusal import UnservedError

type Attributes = Mapping[str, Any]

UNARY: dict[str, Callable[[Any], Any]] = {
    "negate": np.negative,
    "not": np.logical_not,
    "sign": np.sign,
    "abs": np.abs,
    "exponential": np.exp,
    "log": np.log,
    "tanh": np.tanh,
}


def _truncating_divide(x: Any, y: Any) -> Any:
    if np.issubdtype(x.dtype, np.integer):
        return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))
    return x / y


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _truncating_divide,
    "remainder": np.fmod,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift_right_arithmetic": np.right_shift,
    "shift_left": np.left_shift,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
REDUCE: dict[str, Any] = {
    "add": np.add,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "or": np.logical_or,
    "and": np.logical_and,
}


def evaluate(
    op: str, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype, attributes: Attributes
) -> np.ndarray:
    """The result of an operation.

    Raises:
        UnservedError: no operation of this name is known.
    """
    with np.errstate(all="ignore"):
        if op in UNARY:
            found = UNARY[op](*operands)
        elif op in BINARY:
            found = BINARY[op](*operands)
        elif op == "compare":
            found = COMPARE[attributes["direction"]](*operands)
        elif op in STRUCTURAL:
            found = STRUCTURAL[op](operands, shape, dtype, attributes)
        else:
            raise UnservedError(f"the operation {op}")
    return np.asarray(found).astype(dtype)


def narrow(attributes: Attributes) -> np.dtype:
    """The type with these exponent and mantissa bits."""
    bits = attributes["exponent_bits"], attributes["mantissa_bits"]
    types = {(8, 7): jnp.dtype(jnp.bfloat16), (5, 10): jnp.dtype(jnp.float16), (8, 23): jnp.dtype(jnp.float32)}
    if bits not in types:
        raise UnservedError(f"rounding to {bits[0]} exponent and {bits[1]} mantissa bits")
    return types[bits]


def _convert(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    """A float outside an integer type's range becomes its nearest number, NaN 0."""
    del shape, attributes
    (x,) = operands
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(x.dtype, np.integer):
        x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), *(np.iinfo(dtype).min, np.iinfo(dtype).max))
    return x


def _broadcast(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del dtype
    x, dimensions = operands[0], attributes["dimensions"]
    along = [1] * len(shape)
    for size, dim in zip(x.shape, dimensions, strict=True):
        along[dim] = size
    return np.broadcast_to(x.reshape(along), shape)


def _slice(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del shape, dtype
    return operands[0][tuple(map(slice, attributes["start"], attributes["limit"], attributes["strides"]))]


def _starts(indices: Any, sizes: Any, shape: Any) -> list[int]:
    return [int(np.clip(int(i), 0, n - size)) for i, size, n in zip(indices, sizes, shape, strict=True)]


def _dynamic_slice(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del dtype, attributes
    x, *indices = operands
    starts = _starts(indices, shape, x.shape)
    return x[tuple(slice(i, i + size) for i, size in zip(starts, shape, strict=True))]


def _dynamic_update_slice(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del dtype, attributes
    x, update, *indices = operands
    found = x.copy()
    starts = _starts(indices, update.shape, shape)
    found[tuple(slice(i, i + size) for i, size in zip(starts, update.shape, strict=True))] = update
    return found


def _pad(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    x, value = operands
    found = np.full(shape, value, dtype)
    inside = zip(attributes["low"], x.shape, shape, strict=True)
    source = tuple(slice(max(-low, 0), min(size, total - low)) for low, size, total in inside)
    target = tuple(slice(s.start + low, s.stop + low) for s, low in zip(source, attributes["low"], strict=True))
    found[target] = x[source]
    return found


def _iota(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del operands
    dim = attributes["dimension"]
    along = [1] * len(shape)
    along[dim] = shape[dim]
    return np.broadcast_to(np.arange(shape[dim]).astype(dtype).reshape(along), shape)


def _reduce(operands: Any, shape: Any, dtype: Any, attributes: Attributes) -> Any:
    del shape
    x, start = operands
    combine = REDUCE[attributes["combine"]]
    return combine(combine.reduce(x, axis=tuple(attributes["dimensions"]), dtype=dtype, initial=None), start)


STRUCTURAL: dict[str, Callable[..., Any]] = {
    "reshape": lambda operands, shape, *_: operands[0].reshape(shape),
    "transpose": lambda operands, *rest: operands[0].transpose(rest[-1]["permutation"]),
    "convert": _convert,
    "reduce_precision": lambda operands, *rest: operands[0].astype(narrow(rest[-1])),
    "copy": lambda operands, *_: operands[0],
    "bitcast_convert": lambda operands, shape, dtype, _: operands[0].view(dtype).reshape(shape),
    "select": lambda operands, *_: np.where(*operands),
    "concatenate": lambda operands, *rest: np.concatenate(operands, axis=rest[-1]["dimension"]),
    "clamp": lambda operands, *_: np.minimum(np.maximum(operands[1], operands[0]), operands[2]),
    "reverse": lambda operands, *rest: np.flip(operands[0], rest[-1]["dimensions"]),
    "is_finite": lambda operands, *_: np.isfinite(operands[0]),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "iota": _iota,
    "reduce": _reduce,
}
