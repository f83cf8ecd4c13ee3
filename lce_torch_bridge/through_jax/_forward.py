"""The forward by programs of JAX: tensors in, programs and the collectives between them, tensors out."""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs, _run
from lce_torch_bridge.through_jax._key import key_of
from lce_torch_bridge.through_jax._programs import ProgramKey

type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, what is per token
type Packed = tuple[list[torch.Tensor], list[Any]]  # each piece's packed results, and the first one's cache


def forward(x: Operands, call: Call, keep_cache: bool, lend_cache: bool) -> list[Any]:
    """What `operators._execute.forward` returns."""
    tokens = x.labels.shape[0]
    key = key_of(x.weight, call)

    def operands(piece: _padding.Piece) -> Inputs:
        hidden = _padding.pad(x.hidden[piece.tokens], piece.rows)
        return hidden, x.weight, x.bias, _tokens(x, piece, call)

    # The backward takes all tokens at once, so one cache must hold all of them.
    pieces = [_padding.whole(tokens)] if keep_cache else _padding.pieces(tokens)
    inputs = list(map(operands, pieces))
    run = _run_alone if call.group == _tensor_parallel.NO_GROUP else _run_shard
    packed, cache = run(inputs, key, call, keep_cache, lend_cache)
    return [*_unpacked(packed, call, tokens), *cache]


def _run_alone(inputs: list[Inputs], key: ProgramKey, call: Call, keep_cache: bool, lend: bool) -> Packed:
    """The forward over a vocabulary that is not split."""
    found = _run.run(_programs.forward(key, keep_cache, call.fields, call.megatron), *inputs, lend=lend)
    return [packed for packed, *_ in found], found[0][1:]


def _run_shard(inputs: list[Inputs], key: ProgramKey, call: Call, keep_cache: bool, lend: bool) -> Packed:
    """The forward over a split vocabulary, with one collective for all pieces."""
    parts = _run.run(_programs.statistics(key, keep_cache), *inputs, lend=lend)
    sent = [packed for packed, *_ in parts]
    gathered = _tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    merge = _programs.results(key, call.fields, call.megatron)
    shards = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    found = _run.run(merge, *((each[3], of_shards) for each, of_shards in shards), waits=1)
    return [packed for (packed,) in found], parts[0][1:]


def _unpacked(parts: list[torch.Tensor], call: Call, tokens: int) -> list[torch.Tensor]:
    """The outputs, one by one, and what the backward needs, from the pieces' packed results without the padding.

    They are copies in torch's memory: a view could not be written in place, and ``record_stream`` does not reach JAX's.
    """
    packed = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).narrow(1, 0, tokens)
    row = len(call.fields) - (call.num_candidates > 0)
    outputs: Any = torch.unbind_copy(packed[:row].view(torch.float32))  # type: ignore[func-returns-value]
    outputs = list(outputs)
    if call.num_candidates:
        first, row = row, row + call.num_candidates
        of_candidates = packed[first:row].view(torch.float32).T
        outputs.insert(call.fields.index(PER_CANDIDATE), of_candidates.clone(memory_format=torch.contiguous_format))
    return [*outputs, packed[row:].clone(memory_format=torch.contiguous_format)]


def _tokens(x: Operands, piece: _padding.Piece, call: Call) -> torch.Tensor:
    """Labels, temperature, floor and candidates as `through_jax._programs` describes them."""
    labels = x.labels[piece.tokens].long()
    if labels.stride() != (1,):  # one token counts as contiguous with any stride, and only with 1 has it halves
        labels = labels.clone(memory_format=torch.contiguous_format)
    columns = [labels.view(torch.int32).view(-1, 2)]
    if x.temperature is not None:
        columns.append(x.temperature[piece.tokens].view(torch.int32)[:, None])
    if x.floor is not None:
        columns.append(x.floor[piece.tokens].view(torch.int32)[:, None])
    if x.candidates is not None:
        columns.append(_padding.candidate_ids(x.candidates[piece.tokens], call.vocab_size))
    return _padding.with_count(columns[0] if len(columns) == 1 else torch.cat(columns, 1), piece.rows)
