"""Candidates in the passes: launches beside those of a call without them.

forward    keep ─ logits … finish ─ logprobs         ids and x are kept of each token
part       keep ─ logits                             the x are sent
merge      join … finish ─ logprobs                  those of all shards are kept
backward   terms ─ coefficients ─ values … dlogits ─ put …

With a threshold, `_kept.selected` reads the ids that are kept.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lce_jax.launch_lists._recorder import ROWS, STRIDE
from lce_jax.mosaic import _candidates, _partial_statistics
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._candidates import Fields, Placed

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array
type Pass = Any  # that of `_passes`, which imports this module

SEED = "candidate_logprobs"


def keep(made: Pass, kept: Buffer) -> None:
    """Takes the ids, an operand [R, K], and keeps them."""
    head = made.head
    if head.num_candidates:
        ids = made.input(head.num_tokens, head.num_candidates, dtype=jnp.int32)
        made.kernels.keep_candidates(head.case, ids, _ids(kept), made.of_rows, _fields(made).ids)


def add_logits(made: Pass, call: Call, kept: Buffer) -> None:
    """Keeps the x of a whole vocabulary."""
    if made.head.num_candidates:
        _candidates.logits(call, _ids(kept), kept, _fields(made), STRIDE)


def sent_logits(made: Pass, call: Call, kept: Buffer) -> list[Buffer]:
    """The x of a shard [K, Tp], if there are candidates."""
    most, tokens = made.head.num_candidates, made.shape.padded_tokens
    if not most:
        return []
    memory = made.host.empty((most * tokens,), jnp.float32)
    sent = _candidates.logits(call, _ids(kept), memory, _fields(made)._replace(x=0), tokens)
    return [made.host.reshape(sent, (most, tokens))]


def join(made: Pass, x: Buffer | None, kept: Buffer) -> None:
    """Keeps the x of all shards."""
    if x is not None:
        fields = _fields(made).x, made.head.first_statistic
        made.kernels.join_candidates(made.head.case, x, kept, made.of_rows, *fields)


def logprobs(made: Pass, kept: Buffer) -> list[Buffer]:
    """The result [R, K], if there are candidates."""
    head = made.head
    if not head.num_candidates:
        return []
    return [made.kernels.candidate_logprobs(head.case, kept, head.has_temperature, made.of_rows)]


def selecting(made: Pass, kept: Buffer, num_columns: Any) -> tuple[list[Any], list[Any]]:
    """For `KernelSet.select`: more numbers, and where the ids are; nothing if there are no candidates."""
    if not made.head.num_candidates:
        return [], []
    return [made.head.start, num_columns], [_ids(kept), _fields(made).ids]


def seed_shape(made: Pass, name: str) -> tuple[int, ...]:
    """That of the cotangent of a result."""
    head = made.head
    return (head.num_tokens, head.num_candidates) if name == SEED else (head.num_tokens,)


def terms(made: Pass, kept: Buffer, seed: Buffer | None) -> Buffer | None:
    """What becomes of their cotangent, if there is one."""
    if seed is None:
        return None
    head = made.head
    return made.kernels.candidate_terms(head.case, kept, head.has_temperature, seed, made.of_rows)


def placed(made: Pass, call: Call, factors: Buffer, kept: Buffer, terms: Buffer | None) -> Placed | None:
    """What stands at the candidates' places in dlogits, if they have a cotangent."""
    if terms is None:
        return None
    return _candidates.placed(call, factors, _ids(kept), kept, terms, _fields(made))


def _ids(kept: Buffer) -> Buffer:
    return kept.view(kept.shape, jnp.int32)


def _fields(made: Pass) -> Fields:
    """How candidates lie in what is kept."""
    head = made.head
    x = head.first_statistic + len(_partial_statistics.kept(head.case.options))
    return Fields(head.first_statistic - head.num_candidates, x, ROWS, STRIDE, head.start)
