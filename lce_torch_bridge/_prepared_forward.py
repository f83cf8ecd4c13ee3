"""The forward of calls that are launched directly: over a whole vocabulary, or over one that is split over a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_jax import launch
from lce_torch_bridge import _direct, _prepared, _programs_of_rows, _rows, _torch, tensor_parallel
from lce_torch_bridge._direct import Loaded, struct
from lce_torch_bridge._prepared import Allocated, Array, Piece, allocated, copies
from lce_torch_bridge._programs import Spec
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands

HALVES = 2  # int32 numbers in an int64 label
WORD = 4  # bytes of a float32 or int32 number
MASKED = Spec._fields.index("masked")  # the last field. Programs here mask what they copy


class Described(NamedTuple):
    """What a plan is made from besides the call."""

    pieces: list[_rows.Piece]
    rows_sent: int  # to the other ranks, padding included: as many as `_execute` sends where JAX runs the programs
    spec: Spec


class Plan(NamedTuple):
    """What a forward allocates and launches."""

    pieces: list[Piece]  # of the forward, or of the statistics of this rank's part of the vocabulary
    results: list[Allocated]  # outputs, S and the cache; of a part, what is sent and the cache
    merge: list[Piece]  # of a split vocabulary: what was gathered to outputs and S
    merged: list[Allocated]


def forward(x: Operands, call: Call, keep_cache: bool, described: Callable[[], Described]) -> list[Any] | None:
    """What `_execute.forward` returns of a call without a bias; None if JAX is to run it."""
    given, device = x.hidden, x.hidden.get_device()
    if _direct.on_gpu(given) and device != _torch.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache, described)
    labels = x.labels if x.labels.dtype is torch.int64 else x.labels.long()
    strides = labels.stride(), None if x.temperature is None else x.temperature.stride()
    ranks = call.group and tensor_parallel.size_and_rank(call.group)
    shapes = device, given.shape, given.dtype, x.weight.shape, x.weight.dtype, strides
    key = ("forward", shapes, call, keep_cache, ranks)
    plan = _prepared.found(key, given, lambda: _planned(x._replace(labels=labels), call, keep_cache, described()))
    if plan is None:
        return None
    hidden, weight, per_token = _direct.usable(given), _direct.usable(x.weight), [labels]
    if x.temperature is not None:
        per_token.append(x.temperature)
    if x.candidates is not None:
        per_token.append(_rows.candidate_ids(x.candidates, call.vocab_size).contiguous())
    addresses = [y.data_ptr() for y in per_token]
    results = [_torch.empty(*each) for each in plan.results]
    _prepared.run(plan.pieces, device, results, [hidden.data_ptr(), weight.data_ptr(), 0, *addresses])
    if not plan.merge:
        return results
    gathered = tensor_parallel.gather(results[0], call.group)
    merged = [_torch.empty(*each) for each in plan.merged]
    _prepared.run(plan.merge, device, merged, [0, *addresses, gathered.data_ptr()])
    return [*merged, *results[1:]]


def _planned(x: Operands, call: Call, keep_cache: bool, described: Described) -> Plan | str:
    """The plan, or why JAX is to run such calls."""
    pieces, rows_sent, spec = described
    parts: list[Any] = [_program(x, call, keep_cache, piece, spec) for piece in pieces]
    merges: list[Any] = [_merge(x, call, piece, spec) for piece in pieces] if call.group else []
    for program in (*parts, *merges):
        if isinstance(program, str):
            return program
    outputs, per_token = _outputs(x, call, spec), _per_token(x, call)
    fields = [Array(WORD * stride[0], (0, stride[0])) for _, stride, _ in outputs[:-1]]
    whole, across = [*fields, Array(WORD, (x.labels.shape[0], 1))], Array(WORD, (rows_sent, 1))
    written = [across] if merges else whole
    cache = [allocated(*each) for each in parts[0].outputs[len(written) :]]
    written = [*written, *[Array()] * len(cache)]
    H = x.hidden.shape[1]

    def part(piece: _rows.Piece, program: Loaded) -> Piece:
        lines = (0, H) if _copied(piece, keep_cache) else None
        operands = [Array(H * x.hidden.element_size(), lines), Array(), Array(), *per_token]
        return _prepared.piece(program, piece.tokens, written, operands)

    launched = list(map(part, pieces, parts))
    if not merges:
        return Plan(launched, [*outputs, *cache], [], [])
    operands = [Array(), *per_token, across]
    merge = [_prepared.piece(each, piece.tokens, whole, operands) for piece, each in zip(pieces, merges, strict=True)]
    sent = allocated((_sent(spec), rows_sent), torch.float32)
    return Plan(launched, [sent, *cache], merge, outputs)


def _outputs(x: Operands, call: Call, spec: Spec) -> list[Allocated]:
    """The fields of the output, and S."""
    tokens, K = x.labels.shape[0], call.num_candidates
    shapes = [(tokens, K) if name == PER_CANDIDATE else (tokens,) for name in call.fields]
    saved = allocated((x.numbers + spec.num_merged, tokens), torch.int32)
    return [*(allocated(shape, torch.float32) for shape in shapes), saved]


def _per_token(x: Operands, call: Call) -> list[Array]:
    """Labels, temperature and candidates, as far as they are there."""
    (stride,) = x.labels.stride()
    arrays = [Array(HALVES * WORD * stride, (0, HALVES * stride))]
    if x.temperature is not None:
        (stride,) = x.temperature.stride()
        arrays.append(Array(WORD * stride, (0, stride)))
    if x.candidates is not None:
        arrays.append(Array(WORD * call.num_candidates, (0, call.num_candidates)))
    return arrays


def _copied(piece: _rows.Piece, keep_cache: bool) -> bool:
    return copies(piece.tokens.stop - piece.tokens.start, piece.rows, piece.masked, keep_cache)


def _sent(spec: Spec) -> int:
    """How many numbers of each token a rank sends: its statistics, and how many columns it has."""
    return sum(spec.statistics.values()) + 1


def _program(x: Operands, call: Call, keep_cache: bool, piece: _rows.Piece, spec: Spec) -> Loaded | str:
    """From hidden and weight to all results, or to the statistics of a part."""
    copied, split, H = _copied(piece, keep_cache), bool(call.group), x.hidden.shape[1]
    of_results = () if split else (call.fields, call.megatron)
    operands = H, x.hidden.dtype, x.weight.shape, x.weight.dtype, x.temperature is None
    key = ("forward", x.hidden.get_device(), *operands, piece.rows, copied, *spec[:MASKED], keep_cache, of_results)

    def plan(device: launch.Device) -> launch.Program:
        per_token, masked = _structs(x, call, piece.rows), spec._replace(masked=copied)
        hidden = jax.ShapeDtypeStruct((piece.rows, H), struct(x.hidden).dtype)
        given = [hidden, struct(x.weight), None, jax.ShapeDtypeStruct((), "int32"), *per_token]
        rows = dict.fromkeys([*[0] * copied, *range(3, 3 + _count(per_token))], 0)
        if split:
            function, results = _programs_of_rows.statistics(masked, keep_cache), {0: 1}
        else:
            function = _programs_of_rows.forward(masked, keep_cache, call.fields, call.megatron)
            results = _results(call)
        return launch.program(function, given, device, rows=launch.Rows(2, rows, results))

    return _direct.loaded(key, x.hidden, plan)


def _merge(x: Operands, call: Call, piece: _rows.Piece, spec: Spec) -> Loaded | str:
    """From the statistics of all ranks, ``[N (F + 1), P]``, to all results."""
    ranks, _ = tensor_parallel.size_and_rank(call.group)
    options = spec[:MASKED], call.fields, call.megatron, x.temperature is None
    key = "merge", x.hidden.get_device(), piece.rows, ranks, *options

    def plan(device: launch.Device) -> launch.Program:
        per_token = _structs(x, call, piece.rows)
        gathered, last = jax.ShapeDtypeStruct((ranks * _sent(spec), piece.rows), "float32"), 1 + _count(per_token)
        function = _programs_of_rows.results(spec._replace(masked=False), call.fields, call.megatron)
        rows = launch.Rows(0, dict.fromkeys(range(1, last), 0) | {last: 1}, _results(call))
        return launch.program(function, [jax.ShapeDtypeStruct((), "int32"), *per_token, gathered], device, rows=rows)

    return _direct.loaded(key, x.hidden, plan)


def _structs(x: Operands, call: Call, rows: int) -> list[Any]:
    """Labels, temperature and candidates of a program."""
    K, array = call.num_candidates, jax.ShapeDtypeStruct
    of_temperature = None if x.temperature is None else array((rows,), "float32")
    return [array((rows, HALVES), "int32"), of_temperature, None if x.candidates is None else array((rows, K), "int32")]


def _count(structs: Sequence[Any]) -> int:
    return sum(each is not None for each in structs)


def _results(call: Call) -> dict[int, int]:
    """The dimensions of the rows of outputs and of S."""
    return {i: int(i == len(call.fields)) for i in range(len(call.fields) + 1)}
