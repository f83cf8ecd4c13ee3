"""Candidates in the passes: launches beside those of a call without them.

forward    keep ─ logits … finish ─ logprobs         ids and x are saved of each token
part       keep ─ logits                             the x are sent
merge      join … finish ─ logprobs                  those of all shards are saved
backward   terms ─ coefficients ─ values … dlogits ─ put …

With a threshold, `_saved_tiles.selected` reads the ids that are saved.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lce_jax.launch_lists._recorder import ROWS, STRIDE
from lce_jax.mosaic import _candidates, _partial_statistics
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._candidates import Fields, PlacedCandidates
from lce_jax.mosaic.common._candidate_tokens import (
    candidate_logprobs,
    candidate_terms,
    join_candidates,
    keep_candidates,
)

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array
type Recording = Any  # that of `_passes`, which imports this module

SEED = "candidate_logprobs"


def keep(recording: Recording, saved: Buffer) -> None:
    """Takes the ids, an operand [R, K], and keeps them."""
    kind = recording.kind
    if kind.num_candidates:
        ids = recording.input(kind.num_tokens, kind.num_candidates, dtype=jnp.int32)
        given = ids, _ids(saved), recording.of_rows, _fields(recording).ids
        recording.host.launch(keep_candidates, kind.case, *given)


def add_logits(recording: Recording, call: KernelCall, saved: Buffer) -> None:
    """Keeps the x of a whole vocabulary."""
    if recording.kind.num_candidates:
        _candidates.logits(call, _ids(saved), saved, _fields(recording), STRIDE)


def sent_logits(recording: Recording, call: KernelCall, saved: Buffer) -> list[Buffer]:
    """The x of a shard [K, Tp], if there are candidates."""
    most, tokens = recording.kind.num_candidates, recording.shape.padded_tokens
    if not most:
        return []
    memory = recording.host.empty((most * tokens,), jnp.float32)
    sent = _candidates.logits(call, _ids(saved), memory, _fields(recording)._replace(x=0), tokens)
    return [recording.host.reshape(sent, (most, tokens))]


def join(recording: Recording, x: Buffer | None, saved: Buffer) -> None:
    """Keeps the x of all shards."""
    if x is not None:
        fields = _fields(recording).x, recording.kind.first_statistic
        recording.host.launch(join_candidates, recording.kind.case, x, saved, recording.of_rows, *fields)


def logprobs(recording: Recording, saved: Buffer) -> list[Buffer]:
    """The result [R, K], if there are candidates."""
    kind = recording.kind
    if not kind.num_candidates:
        return []
    given = kind.case, saved, kind.has_temperature, recording.of_rows
    return [recording.host.launch(candidate_logprobs, *given)]


def selecting(recording: Recording, saved: Buffer, num_columns: Any) -> tuple[list[Any], list[Any]]:
    """For `select`: more numbers, and where the ids are; nothing if there are no candidates."""
    if not recording.kind.num_candidates:
        return [], []
    return [recording.kind.start, num_columns], [_ids(saved), _fields(recording).ids]


def seed_shape(recording: Recording, name: str) -> tuple[int, ...]:
    """That of the cotangent of a result."""
    kind = recording.kind
    return (kind.num_tokens, kind.num_candidates) if name == SEED else (kind.num_tokens,)


def terms(recording: Recording, saved: Buffer, seed: Buffer | None) -> Buffer | None:
    """What becomes of their cotangent, if there is one."""
    if seed is None:
        return None
    kind = recording.kind
    given = kind.case, saved, kind.has_temperature, seed, recording.of_rows
    return recording.host.launch(candidate_terms, *given)


def placed(
    recording: Recording, call: KernelCall, factors: Buffer, saved: Buffer, terms: Buffer | None
) -> PlacedCandidates | None:
    """What stands at the candidates' places in dlogits, if they have a cotangent."""
    if terms is None:
        return None
    return _candidates.placed(call, factors, _ids(saved), saved, terms, _fields(recording))


def _ids(saved: Buffer) -> Buffer:
    return saved.view(saved.shape, jnp.int32)


def _fields(recording: Recording) -> Fields:
    """How candidates lie in what is saved."""
    kind = recording.kind
    x = kind.first_statistic + len(_partial_statistics.kept(kind.case.options))
    return Fields(kind.first_statistic - kind.num_candidates, x, ROWS, STRIDE, kind.start)
