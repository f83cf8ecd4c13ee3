"""Calls whose vocabulary is whole, launched directly: a look-up, memory for the results, addresses, launches.

What depends on shapes, dtypes and options alone is decided when a program is made, and found again by one key. Nothing
is packed or padded here: the programs read what is per token where it lies, and write each result where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_jax import launch
from lce_torch_bridge import _direct, _launch, _programs, _rows
from lce_torch_bridge._direct import Loaded, struct
from lce_torch_bridge._main_grad import nothing_like
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands, names_of

HALVES = 2  # int32 numbers in an int64 label
MASKED = Spec._fields.index("masked")  # the last field. Programs here mask what they copy

type Row = tuple[int, int, int, int]  # an address, bytes from row to row, and strides as `lce_jax.launch` takes them


def forward(x: Operands, call: Call, keep_cache: bool, pieces: list[_rows.Piece], spec: Spec) -> list[Any] | None:
    """What `_execute.forward` returns of a call without a bias; None if JAX is to run it."""
    found = (_forward_program(x, call, keep_cache, piece, spec) for piece in pieces)
    programs = [program for program in found if program is not None]
    if not programs:
        return None
    hidden, weight, labels = _direct.usable(x.hidden), _direct.usable(x.weight), x.labels.long()
    tokens, empty = labels.shape[0], hidden.new_empty
    fields = [
        empty((tokens, call.num_candidates) if name == PER_CANDIDATE else (tokens,), dtype=torch.float32)
        for name in names_of(call)[0]
    ]
    ((height, _), _), *of_cache = programs[0].outputs[len(fields) :]
    saved = empty((height, tokens), dtype=torch.int32)
    cache = [empty(shape, dtype=dtype) for shape, dtype in of_cache]
    operands = [_row(labels, HALVES)]
    if x.temperature is not None:
        operands.append(_row(x.temperature))
    if x.candidates is not None:
        candidates = _rows.candidate_ids(x.candidates, call.vocab_size).contiguous()
        operands.append(_row(candidates))
    results = [*map(_row, fields), (saved.data_ptr(), saved.element_size(), tokens, 1)]
    for piece, program in zip(pieces, programs, strict=True):
        start, count = piece.tokens.start, piece.tokens.stop - piece.tokens.start
        of_hidden = _row(hidden)
        strided = [*[of_hidden] * _copies(count, piece.rows, piece.masked, keep_cache), *operands, *results]
        numbers = [count, *(stride for row in strided for stride in row[2:])]
        inputs = [of_hidden[0] + start * of_hidden[1], weight.data_ptr(), 0]
        inputs += [address + start * step for address, step, *_ in operands]
        outputs = [address + start * step for address, step, *_ in results]
        _direct.start(program, hidden, inputs, outputs + [y.data_ptr() for y in cache], numbers)
    return [*fields, saved, *cache]


class Backward(NamedTuple):
    """What is static about a backward."""

    cotangents: tuple[str, ...]
    wanted: tuple[bool, ...]
    adds: bool  # dweight is added to a float32 sum
    owns_cache: bool  # the cache may be overwritten
    rows: int  # of the program
    spec: Spec


def gradients(
    x: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    main_grad: torch.Tensor | None,
    how: Backward,
    structure: Callable[[], Any],
) -> list[torch.Tensor] | None:
    """What `_execute.gradients` returns of hidden, weight and S; None if JAX is to run the call."""
    if main_grad is not None and not _direct.is_usable(main_grad):
        return None
    hidden, weight, saved = x
    program = _gradients_program(x, cache, how, structure)
    if program is None:
        return None
    hidden, weight, tokens = _direct.usable(hidden), _direct.usable(weight), hidden.shape[0]
    sums = [] if main_grad is None else [main_grad]
    if sums or how.owns_cache:
        torch.autograd.graph.increment_version([*sums, *cache] if how.owns_cache else sums)  # as any change in place
    grads = [hidden.new_empty(hidden.shape)] if how.wanted[0] else []
    if how.wanted[1]:
        grads.append(weight.new_empty(weight.shape) if main_grad is None else main_grad)
    seeds = [y if y.ndim == 1 else y.contiguous() for y in cotangents]
    rows = [(saved.data_ptr(), 0, tokens, 1), *map(_row, seeds)]
    copied = _copies(tokens, how.rows, how.spec.masked, bool(cache))
    strided = [*[_row(hidden)] * copied, *rows, *[_row(grads[0])] * (copied and how.wanted[0])]
    numbers = [tokens, *(stride for row in strided for stride in row[2:])]
    inputs = [hidden.data_ptr(), weight.data_ptr(), 0, *(row[0] for row in rows)]
    inputs += [y.data_ptr() for y in (*sums, *cache)]
    _direct.start(program, hidden, inputs, [y.data_ptr() for y in grads], numbers)
    if main_grad is not None:
        grads[-1] = nothing_like(main_grad, weight.dtype)
    return grads


def _copies(count: int, rows: int, masked: bool, keeps: bool) -> bool:
    """Whether a program of so many rows takes only those that count, and copies hidden, to tiles of its own.

    Otherwise they must be all there. That spares the copy, and costs one more program: not beside a cache, whose size
    is many times that of the copy, nor for few rows.
    """
    return masked and (count != rows or keeps or rows == _rows.SMALLEST)


def _row(x: torch.Tensor, inner: int = 1) -> Row:
    """A tensor's row, of elements that have so many numbers each."""
    stride = x.stride(0)
    return x.data_ptr(), stride * x.element_size(), 0, stride * inner


def _forward_program(x: Operands, call: Call, keep_cache: bool, piece: _rows.Piece, spec: Spec) -> Loaded | None:
    copied = _copies(piece.tokens.stop - piece.tokens.start, piece.rows, piece.masked, keep_cache)
    static = piece.rows, copied, *spec[:MASKED]
    key = _key(x.hidden, x.weight, *static, call, keep_cache, x.temperature is None)

    def plan(device: launch.Device) -> launch.Program:
        P, K, array = piece.rows, call.num_candidates, jax.ShapeDtypeStruct
        of_temperature = None if x.temperature is None else array((P,), "float32")
        of_candidates = None if x.candidates is None else array((P, K), "int32")
        per_token = [array((P, HALVES), "int32"), of_temperature, of_candidates]
        operands = [array((P, x.hidden.shape[1]), struct(x.hidden).dtype), struct(x.weight), None, array((), "int32")]
        function = _programs.forward_of_rows(spec._replace(masked=copied), keep_cache, call.fields, call.megatron)
        there = sum(y is not None for y in per_token)
        rows = dict.fromkeys([*[0] * copied, *range(3, 3 + there)], 0)
        results = {i: int(i == len(call.fields)) for i in range(len(call.fields) + 1)}
        return launch.program(function, [*operands, *per_token], device, rows=launch.Rows(2, rows, results))

    return _found(key, x.hidden, plan)


def _gradients_program(
    x: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: Sequence[torch.Tensor],
    how: Backward,
    structure: Callable[[], Any],
) -> Loaded | None:
    hidden, weight, saved = x
    copied, wanted = _copies(hidden.shape[0], how.rows, how.spec.masked, bool(cache)), how.wanted
    *static, spec = how
    key = _key(hidden, weight, *static, copied, *spec[:MASKED], saved.shape[0], len(cache))

    def plan(device: launch.Device) -> launch.Program:
        P, K, array = how.rows, spec.call.num_candidates, jax.ShapeDtypeStruct
        whole = [array((P, hidden.shape[1]), struct(hidden).dtype), struct(weight), array((), "int32")]
        seeds = [array((P, K) if name == PER_CANDIDATE else (P,), "float32") for name in how.cotangents]
        given = spec._replace(masked=copied), how.cotangents, wanted, structure() if cache else None
        function = _programs.gradients_of_rows(*given, how.owns_cache)
        first = 4 + len(seeds)  # after what is per token
        rows = dict.fromkeys([0] * copied, 0) | {3: 1} | dict.fromkeys(range(4, first), 0)
        total = array(weight.shape, "float32") if how.adds else None
        operands = [*whole, array((saved.shape[0], P), "int32"), seeds, total, *map(struct, cache)]
        donated = range(first, first + how.adds + len(cache) * how.owns_cache)
        results = {0: 0} if copied and wanted[0] else {}
        return launch.program(function, operands, device, donated, rows=launch.Rows(2, rows, results))

    return _found(key, hidden, plan)


def _key(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    """What a program depends on."""
    return hidden.get_device(), hidden.shape[1], hidden.dtype, weight.shape, weight.dtype, *rest


def _found(key: Any, hidden: torch.Tensor, plan: Any) -> Loaded | None:
    return _launch.direct_or_none(hidden, lambda: _direct.loaded(key, hidden, plan))
