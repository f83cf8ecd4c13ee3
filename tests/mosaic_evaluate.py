"""What Pallas's interpreter makes of a kernel, run an operation at a time in place of being compiled.

A kernel has some ten thousand operations, most of them of one integer; to compile them took XLA ten times as long.
Integers are NumPy's; what has fractions goes through XLA, whose programs of one operation all kernels share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import callback as jax_callback
from jax._src import core


def run_thread(jaxpr: Any, consts: Sequence[Any], *args: Any) -> None:
    """In place of ``thread_map._run_jaxpr`` (JAX 0.11.2 and 0.12.0)."""
    evaluate(getattr(jaxpr, "jaxpr", jaxpr), consts, args)


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.val, x.aval.dtype) if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        values.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return [read(x) for x in jaxpr.outvars]


def _results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "io_callback":
        return jax_callback.io_callback_impl(*operands, **eqn.params)
    if name in CONTROL:
        return CONTROL[name](*operands, **eqn.params)
    if name in MOVES:
        return [MOVES[name](*map(np.asarray, operands), **eqn.params)]
    if name in OF_INTEGERS and all(x.aval.dtype.kind in "iub" for x in (*eqn.invars, *eqn.outvars)):
        return [OF_INTEGERS[name](*map(np.asarray, operands), **eqn.params)]
    found = eqn.primitive.bind(*operands, **eqn.params)
    return found if eqn.primitive.multiple_results else [found]


def _closed(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return evaluate(getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts, args)


def _call(*operands: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return _closed(jaxpr, operands)


def _cond(index: Any, *operands: Any, branches: Sequence[Any], **_: Any) -> list[Any]:
    return _closed(branches[min(max(int(index), 0), len(branches) - 1)], operands)


def _while(*operands: Any, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any) -> Sequence[Any]:
    first = cond_nconsts + body_nconsts
    of_cond, of_body, carry = operands[:cond_nconsts], operands[cond_nconsts:first], operands[first:]
    while _closed(cond_jaxpr, (*of_cond, *carry))[0]:
        carry = tuple(_closed(body_jaxpr, (*of_body, *carry)))
    return carry


def _scan(*operands: Any, length: int, reverse: bool, jaxpr: Any, **more: Any) -> list[Any]:
    if "ft_in" in more:
        consts, carry, each = map(list, more["ft_in"].update(operands).unpack())
    else:
        first, last = more["num_consts"], more["num_consts"] + more["num_carry"]
        consts, carry, each = operands[:first], operands[first:last], operands[last:]
    rows: list[Any] = [None] * length
    for i in reversed(range(length)) if reverse else range(length):
        found = _closed(jaxpr, (*consts, *carry, *(np.asarray(x)[i] for x in each)))
        carry, rows[i] = found[: len(carry)], found[len(carry) :]
    return [*carry, *map(np.stack, zip(*rows, strict=True))]


CONTROL: dict[str, Callable[..., Sequence[Any]]] = {
    "jit": _call, "pjit": _call, "cond": _cond, "while": _while, "scan": _scan,
}  # fmt: skip


def _broadcast(x: np.ndarray, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...], **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(i, 1) for i in range(len(shape))]), shape)


def _slice(x: np.ndarray, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (None,) * x.ndim))]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple[int, ...]) -> np.ndarray:
    """A slice that would leave the array begins earlier, as XLA's."""
    first = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(i, i + size) for i, size in zip(first, slice_sizes, strict=True))]


MOVES: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "select_n": lambda which, *cases: np.where(which, *cases[::-1]),
    "slice": _slice,
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
}  # fmt: skip


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Towards zero, as XLA."""
    return np.floor_divide(x - np.fmod(x, y), y)


def _of(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Of arrays alone: what JAX says besides is for devices."""
    return lambda *operands, **_: np.asarray(function(*operands))


OF_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": _of(np.add), "sub": _of(np.subtract), "mul": _of(np.multiply), "div": _of(_divide), "rem": _of(np.fmod),
    "neg": _of(np.negative), "sign": _of(np.sign), "max": _of(np.maximum), "min": _of(np.minimum),
    "and": _of(np.bitwise_and), "or": _of(np.bitwise_or), "not": _of(np.invert), "lt": _of(np.less),
    "le": _of(np.less_equal), "gt": _of(np.greater), "ge": _of(np.greater_equal), "eq": _of(np.equal),
    "ne": _of(np.not_equal), "clamp": _of(lambda low, x, high: np.clip(x, low, high)),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
}  # fmt: skip
