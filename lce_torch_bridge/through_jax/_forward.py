"""The forward by programs of JAX: tensors in, programs and the collectives between them, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands, names_of
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs, _run
from lce_torch_bridge.through_jax._key import key_of
from lce_torch_bridge.through_jax._programs import ProgramKey

type Inputs = tuple[torch.Tensor | None, ...]  # hidden, weight, bias or None, what is per token


def forward(x: Operands, call: Call, keep_cache: bool, lend_cache: bool) -> list[Any]:
    """What `operators._execute.forward` returns."""
    tokens, key, (fields, _) = x.labels.shape[0], key_of(x.weight, call), names_of(call)
    # The backward takes all tokens at once, so one cache must hold all of them.
    pieces = [_padding.whole(tokens)] if keep_cache else _padding.pieces(tokens)
    inputs = [
        (_padding.pad(x.hidden[piece.tokens], piece.rows), x.weight, x.bias, _tokens(x, piece, call))
        for piece in pieces
    ]
    if call.group == _tensor_parallel.NO_GROUP:
        whole = _programs.forward(key, keep_cache, fields, call.megatron)
        packed, cache = _split(_run.run(whole, *inputs, lend=lend_cache))
    else:
        sent, cache = _split(_run.run(_programs.statistics(key, keep_cache), *inputs, lend=lend_cache))
        packed = _merged(sent, inputs, key, call)
    return [*_unpacked(packed, fields, call.num_candidates, tokens), *cache]


def _split(of_pieces: list[list[Any]]) -> tuple[list[torch.Tensor], list[Any]]:
    """The pieces' packed results, and the first one's cache: a forward that keeps one takes a single piece."""
    return [packed for packed, *_ in of_pieces], of_pieces[0][1:]


def _merged(sent: list[torch.Tensor], inputs: Sequence[Inputs], key: ProgramKey, call: Call) -> list[torch.Tensor]:
    """The pieces' results from the statistics of all ranks, with one collective for all pieces."""
    gathered = _tensor_parallel.gather(sent[0] if len(sent) == 1 else torch.cat(sent, 1), call.group)
    of_pieces = zip(inputs, gathered.split(sent[0].shape[1], 2), strict=True)
    merge = _programs.results(key, call.fields, call.megatron)
    return [packed for (packed,) in _run.run(merge, *[(given[3], every) for given, every in of_pieces], waits=1)]


def _unpacked(
    parts: list[torch.Tensor], fields: tuple[str, ...], num_candidates: int, tokens: int
) -> list[torch.Tensor]:
    """The outputs, one by one, and what the backward needs, from the pieces' packed results without the padding.

    They are copies in torch's memory: a view could not be written in place, and ``record_stream`` does not reach JAX's.
    """
    packed = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).narrow(1, 0, tokens)
    row = len(fields) - (num_candidates > 0)
    outputs: Any = torch.unbind_copy(packed[:row].view(torch.float32))  # type: ignore[func-returns-value]
    outputs = list(outputs)
    if num_candidates:
        first, row = row, row + num_candidates
        of_candidates = packed[first:row].view(torch.float32).T
        outputs.insert(fields.index(PER_CANDIDATE), of_candidates.clone(memory_format=torch.contiguous_format))
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
