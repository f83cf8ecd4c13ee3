"""Candidates in the passes of `lce_jax.kernels`: launches beside those of a call without them.

forward    keep ─ logits … finish ─ logprobs         ids and x are saved of each token
shards     keep ─ logits ─ (exchange) ─ join …       the x are sent
backward   terms ─ coefficients ─ values … dlogits ─ put …

With a threshold, `select` reads the ids that are saved.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lce_jax.mosaic import _candidates, _partial_statistics
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._candidates import Fields, PlacedCandidates
from lce_jax.mosaic.common._candidate_tokens import (
    candidate_logprobs,
    candidate_terms,
    join_candidates,
    keep_candidates,
)

type Buffer = Any  # an array of the host's
type Pass = Any  # that of `lce_jax.kernels`, which imports this module

SEED = "candidate_logprobs"


def keep(run: Pass, ids: Buffer | None, saved: Buffer) -> None:
    """Keeps the ids [R, K]."""
    if ids is not None:
        run.host.launch(keep_candidates, run.kind.case, ids, _ids(saved), run.of_rows, _fields(run).ids)


def add_logits(run: Pass, call: KernelCall, saved: Buffer) -> None:
    """Keeps the x of a whole vocabulary."""
    if run.kind.num_candidates:
        _candidates.logits(call, _ids(saved), saved, _fields(run), run.kind.stride)


def sent_logits(run: Pass, call: KernelCall, saved: Buffer) -> Buffer | None:
    """The x of a shard [K, Tp], if there are candidates."""
    most, tokens = run.kind.num_candidates, run.kind.shape.padded_tokens
    if not most:
        return None
    memory = run.host.empty((most * tokens,), jnp.float32)
    sent = _candidates.logits(call, _ids(saved), memory, _fields(run)._replace(x=0), tokens)
    return run.host.reshape(sent, (most, tokens))


def join(run: Pass, x: Buffer | None, saved: Buffer) -> None:
    """Keeps the x of all shards."""
    if x is not None:
        fields = _fields(run).x, run.kind.first_statistic
        run.host.launch(join_candidates, run.kind.case, x, saved, run.of_rows, *fields)


def logprobs(run: Pass, saved: Buffer) -> dict[str, Buffer]:
    """The result [R, K], if there are candidates."""
    kind = run.kind
    if not kind.num_candidates:
        return {}
    given = kind.case, saved, kind.has_temperature, run.of_rows
    return {SEED: run.host.launch(candidate_logprobs, *given)}


def selecting(run: Pass, saved: Buffer, num_columns: Any) -> tuple[list[Any], list[Any]]:
    """For `select`: more numbers, and where the ids are; nothing if there are no candidates."""
    if not run.kind.num_candidates:
        return [], []
    return [run.kind.start, num_columns], [_ids(saved), _fields(run).ids]


def terms(run: Pass, saved: Buffer, seed: Buffer | None) -> Buffer | None:
    """What becomes of their cotangent, if there is one."""
    if seed is None:
        return None
    kind = run.kind
    given = kind.case, saved, kind.has_temperature, seed, run.of_rows
    return run.host.launch(candidate_terms, *given)


def placed(
    run: Pass, call: KernelCall, factors: Buffer, saved: Buffer, terms: Buffer | None
) -> PlacedCandidates | None:
    """What stands at the candidates' places in dlogits, if they have a cotangent."""
    if terms is None:
        return None
    return _candidates.placed(call, factors, _ids(saved), saved, terms, _fields(run))


def _ids(saved: Buffer) -> Buffer:
    return saved.view(saved.shape, jnp.int32)


def _fields(run: Pass) -> Fields:
    """How candidates lie in what is saved."""
    kind = run.kind
    x = kind.first_statistic + len(_partial_statistics.kept(kind.case.options))
    return Fields(kind.first_statistic - kind.num_candidates, x, kind.num_tokens, kind.stride, kind.start)
