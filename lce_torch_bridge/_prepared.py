"""Calls that are launched directly with nothing packed or padded: what their forward and their backward share.

What depends on shapes, dtypes and options alone is a plan, made once and found again by one key. A run then allocates
its results and launches. Programs read what is per token where it lies, and write each result where it belongs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lce_torch_bridge import _launch, _rows, _torch
from lce_torch_bridge._direct import Loaded

MOST_PLANS = 4096  # of all shapes together; each takes about two KiB

_plans: dict[Any, Any] = {}


class Array(NamedTuple):
    """How a program sees an operand or a result."""

    row_bytes: int = 0  # from one of its rows to the next; 0: each run is given the whole array
    strides: tuple[int, int] | None = None  # as `lce_jax.launch` takes them; None: the array has all rows


class Piece(NamedTuple):
    """A program for some of the rows, and what its runs are given besides the addresses of whole arrays."""

    program: Loaded
    numbers: tuple[int, ...]
    moved: tuple[int, ...]  # bytes from the beginning of each array, results before operands; empty for the first rows


def piece(program: Loaded, rows: slice, results: Sequence[Array], operands: Sequence[Array]) -> Piece:
    """The program over these rows of arrays that lie so."""
    strides = [array.strides for array in (*operands, *results) if array.strides is not None]
    numbers = rows.stop - rows.start, *(stride for pair in strides for stride in pair)
    moved = tuple(rows.start * array.row_bytes for array in (*results, *operands)) if rows.start else ()
    return Piece(program, numbers, moved)


type Allocated = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def allocated(shape: Sequence[int], dtype: torch.dtype) -> Allocated:
    """What `lce_torch_bridge._torch.empty` is given for a contiguous tensor.

    Example:
        >>> import torch
        >>> from lce_torch_bridge._prepared import allocated
        >>> allocated((5, 3, 2), torch.float32)[:2]
        ((5, 3, 2), (6, 2, 1))
    """
    return tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), dtype


def run(pieces: Sequence[Piece], device: int, results: Sequence[torch.Tensor], operands: Sequence[int]) -> None:
    """Launches the pieces on torch's current stream; ``device`` is the current one.

    Args:
        pieces: what is launched, one after the other.
        device: its number.
        results: whole tensors.
        operands: the addresses of whole tensors.
    """
    stream, addresses = _torch.current_stream(device), (*[y.data_ptr() for y in results], *operands)
    for program, numbers, moved in pieces:
        workspace = _torch.empty((program.workspace_bytes,), (1,), torch.uint8)  # reused in the stream's order
        here = tuple(map(operator.add, addresses, moved)) if moved else addresses
        program.run(stream, workspace.data_ptr(), numbers, here)


def found(key: Any, x: torch.Tensor, plan: Callable[[], Any]) -> Any:
    """What ``plan()`` is, made once for a key; None if JAX is to run such calls, because it is the reason, a text."""
    known = _plans.get(key)
    if known is None or isinstance(known, str) or _launch.asked() == "jax":
        return _launch.direct_or_none(x, lambda: known or _made(key, plan))
    return known


def _made(key: Any, plan: Callable[[], Any]) -> Any:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    made = _plans[key] = plan()
    return made


def copies(count: int, rows: int, masked: bool, keeps: bool) -> bool:
    """Whether a program of so many rows takes only those that count, and copies hidden, to tiles of its own.

    Otherwise they must be all there. That spares the copy, and costs one more program: not beside a cache, whose size
    is many times that of the copy, nor for few rows.
    """
    return masked and (count != rows or keeps or rows == _rows.SMALLEST)
