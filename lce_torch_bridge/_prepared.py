"""Calls whose vocabulary is whole, launched directly: a look-up, memory for the results, addresses, launches.

What depends on shapes, dtypes and options alone is decided when a program is made, and found again by one key. Nothing
is packed or padded here: the programs read what is per token where it lies, and write each result where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from lce_jax import launch
from lce_torch_bridge import _direct, _launch, _programs, _rows
from lce_torch_bridge._direct import Loaded, struct
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands, names_of

HALVES = 2  # int32 numbers in an int64 label

type Row = tuple[int, int, int, int]  # an address, bytes from row to row, and strides as `lce_jax.launch` takes them


def forward(x: Operands, call: Call, keep_cache: bool, pieces: list[_rows.Piece], spec: Spec) -> list[Any] | None:
    """What `_execute.forward` returns; None if JAX is to run the call."""
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
    if x.candidates is not None:  # 2³² + 3 stays outside of the vocabulary
        candidates = x.candidates.long().clamp(-1, call.vocab_size).int().contiguous()
        operands.append(_row(candidates))
    results = [*map(_row, fields), (saved.data_ptr(), saved.element_size(), tokens, 1)]
    for piece, program in zip(pieces, programs, strict=True):
        start, count = piece.tokens.start, piece.tokens.stop - piece.tokens.start
        of_hidden = _row(hidden)
        strided = [*operands, *results] if count == piece.rows else [of_hidden, *operands, *results]
        numbers = [count, *(stride for row in strided for stride in row[2:])]
        inputs = [of_hidden[0] + start * of_hidden[1], weight.data_ptr(), 0]
        inputs += [address + start * step for address, step, *_ in operands]
        outputs = [address + start * step for address, step, *_ in results]
        _direct.start(program, hidden, inputs, outputs + [y.data_ptr() for y in cache], numbers)
    return [*fields, saved, *cache]


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    piece: _rows.Piece,
    spec: Spec,
    structure: Any,
) -> list[torch.Tensor] | None:
    """What `_execute.gradients` returns; None if JAX is to run the call."""
    program = _gradients_program(hidden, weight, saved, cache, tuple(cotangents), wanted, piece, spec, structure)
    if program is None:
        return None
    hidden, weight, tokens = _direct.usable(hidden), _direct.usable(weight), hidden.shape[0]
    seeds = [y if y.ndim == 1 else y.contiguous() for y in cotangents.values()]
    grads = [y.new_empty(y.shape) for y, want in zip((hidden, weight), wanted, strict=False) if want]
    rows = [(saved.data_ptr(), 0, tokens, 1), *map(_row, seeds)]
    copied = tokens != piece.rows
    strided = [*[_row(hidden)] * copied, *rows, *[_row(grads[0])] * (copied and wanted[0])]
    numbers = [tokens, *(stride for row in strided for stride in row[2:])]
    inputs = [hidden.data_ptr(), weight.data_ptr(), 0, *(row[0] for row in rows), *(y.data_ptr() for y in cache)]
    _direct.start(program, hidden, inputs, [y.data_ptr() for y in grads], numbers)
    return grads


def _row(x: torch.Tensor, inner: int = 1) -> Row:
    """A tensor's row, of elements that have so many numbers each."""
    stride = x.stride(0)
    return x.data_ptr(), stride * x.element_size(), 0, stride * inner


def _forward_program(x: Operands, call: Call, keep_cache: bool, piece: _rows.Piece, spec: Spec) -> Loaded | None:
    copied = piece.tokens.stop - piece.tokens.start != piece.rows
    key = _key(x.hidden, x.weight, x.bias, piece.rows, copied, spec, call, keep_cache, x.temperature is None)

    def plan(device: launch.Device) -> launch.Program:
        P, K, array = piece.rows, call.num_candidates, jax.ShapeDtypeStruct
        of_temperature = None if x.temperature is None else array((P,), "float32")
        of_candidates = None if x.candidates is None else array((P, K), "int32")
        per_token = [array((P, HALVES), "int32"), of_temperature, of_candidates]
        bias = None if x.bias is None else struct(x.bias)
        operands = [array((P, x.hidden.shape[1]), struct(x.hidden).dtype), struct(x.weight), bias, array((), "int32")]
        function = _programs.forward_of_rows(spec, keep_cache, call.fields, call.megatron)
        count = 2 + (bias is not None)
        there = sum(y is not None for y in per_token)
        rows = dict.fromkeys([*[0] * copied, *range(count + 1, count + 1 + there)], 0)
        results = {i: int(i == len(call.fields)) for i in range(len(call.fields) + 1)}
        return launch.program(function, [*operands, *per_token], device, rows=launch.Rows(count, rows, results))

    return _found(key, x.hidden, plan)


def _gradients_program(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    names: tuple[str, ...],
    wanted: tuple[bool, ...],
    piece: _rows.Piece,
    spec: Spec,
    structure: Any,
) -> Loaded | None:
    copied = hidden.shape[0] != piece.rows
    key = _key(hidden, weight, None, piece.rows, copied, spec, names, wanted, saved.shape[0], len(cache))

    def plan(device: launch.Device) -> launch.Program:
        P, array = piece.rows, jax.ShapeDtypeStruct
        whole = [array((P, hidden.shape[1]), struct(hidden).dtype), struct(weight), None, array((), "int32")]
        K = spec.call.num_candidates
        seeds = [array((P, K) if name == PER_CANDIDATE else (P,), "float32") for name in names]
        function = _programs.gradients_of_rows(spec, names, wanted, True, structure() if cache else None)
        rows = {0: 0} if copied else {}
        rows |= {3: 1} | dict.fromkeys(range(4, 4 + len(seeds)), 0)
        operands = [*whole, array((len(saved), P), "int32"), seeds, *map(struct, cache)]
        results = {0: 0} if copied and wanted[0] else {}
        return launch.program(function, operands, device, rows=launch.Rows(2, rows, results))

    return _found(key, hidden, plan)


def _key(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> tuple[Any, ...]:
    """What a program depends on."""
    of_bias = None if bias is None else bias.dtype
    return hidden.get_device(), hidden.shape[1], hidden.dtype, weight.shape, weight.dtype, of_bias, *rest


def _found(key: Any, hidden: torch.Tensor, plan: Any) -> Loaded | None:
    return _launch.direct_or_none(hidden, lambda: _direct.loaded(key, hidden, plan))
