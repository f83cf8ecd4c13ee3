"""The passes of a call as lists of launches: those of `lce_jax.mosaic`'s host code, and the steps between them.

    forward    prepare ─ statistics ─ join ─ finish                       a whole vocabulary
    part       prepare ─ statistics ─ join                                a shard's statistics, to be gathered
    merge      prepare                join ─ finish                       all shards' statistics
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) … ─ total

With a ``gradient_threshold``, a forward or a merge ends in the live tiles, and a backward makes lists of them:

    forward    … finish ─ select
    backward   … coefficients ─ lists ─ (live dlogits ─ dhidden ─ dweight) … ─ total

Candidates have launches of their own beside these (`_candidates`).

What is saved of each token is flat, ``stride`` numbers a field: its label (int32), its temperature and its floor if it
has one, its candidates' ids (int32), the merged statistics, and the candidates' x.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lce_jax._types import Operands
from lce_jax.launch_lists import _candidates, _launch_list, _saved_tiles
from lce_jax.launch_lists._call_kind import CallKind
from lce_jax.launch_lists._launch_list import LaunchList
from lce_jax.launch_lists._recorder import ROWS, STRIDE, Recorder
from lce_jax.mosaic import _backward, _cache, _dhidden, _forward, _operands, _threshold_backward
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._operands import Prepared
from lce_jax.mosaic.common import _hidden_rows as kernels
from lce_jax.mosaic.common._tokens import coefficients, finish, prepare

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array
type Numbers = tuple[Buffer | None, Buffer | None]  # temperatures and floors


class _Recording:
    """A list that is recording: its memory, its launches, and what is per token."""

    def __init__(self, kind: CallKind) -> None:
        self.kind, self.host = kind, Recorder()
        self.shape = kind.shape

    def input(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        """An operand."""
        return self.host.input(shape, dtype)

    def numbers_of_tokens(self) -> Numbers:
        """The temperatures and the floors, operands, those that there are."""
        there = self.kind.has_temperature, self.kind.has_floor
        temperatures, floors = (self.input(self.kind.num_tokens) if one else None for one in there)
        return temperatures, floors

    @functools.cached_property
    def of_rows(self) -> Buffer:
        """How many tokens there are, and the stride of fields."""
        return self.host.numbers(ROWS, STRIDE)

    @functools.cached_property
    def of_labels(self) -> Buffer:
        """The same, the first column, and the size of the vocabulary."""
        return self.host.numbers(ROWS, STRIDE, self.kind.start, self.kind.vocab_size)

    def operands(self) -> tuple[Buffer, Buffer]:
        """Hidden and the weight."""
        kind = self.kind
        hidden = self.input(kind.num_tokens, kind.hidden_size, dtype=kind.copied_from or kind.dtype)
        weight = self.input(kind.num_columns, kind.hidden_size, dtype=kind.dtype)
        if kind.copied_from is not None:
            count: Buffer = self.host.numbers(ROWS)
            hidden = self.host.launch(kernels.rows, kind.case, hidden, count)
        return hidden, weight

    def saved(self) -> Buffer:
        """Memory for what is saved."""
        return self.host.empty((self.kind.saved_fields * self.kind.num_tokens,), jnp.float32)

    def ids(self, saved: Buffer) -> Buffer:
        """The labels among it."""
        return saved.view((self.kind.num_tokens,), jnp.int32)

    def call(self, hidden: Buffer, weight: Buffer, marked: Any) -> KernelCall:
        """The call, from here on as `lce_jax.mosaic` runs it."""
        kind, tile = self.kind, self.shape.tile
        columns: Any = kind.num_columns if kind.live_columns is None else kind.live_columns
        firsts = _operands.first_padding(columns, self.shape)
        mask: Any = self.host.numbers(*(int(i >= first) for first in firsts for i in range(2 * tile)))
        rows: Any = ROWS
        per_token = marked.targets, marked.scale, marked.holds_target
        prepared = Prepared(hidden, weight, *per_token, mask, columns, rows, marked.floor)
        operands = Operands(hidden, weight, marked.targets, None, rows, kind.live_columns)
        return KernelCall(operands, prepared, kind.case, self.shape, kind.generation, self.host)

    def join_all(self, call: KernelCall, groups: Buffer) -> Buffer:
        """The statistics of the whole vocabulary."""
        scale, rows = call.prepared.scale, call.prepared.num_rows
        return _forward.join_all(self.host, self.kind.case, scale, rows, groups)

    def launch_list(self, outputs: Sequence[Buffer]) -> LaunchList:
        """The list."""
        return _launch_list.launch_list(self.host, outputs, self.kind.device)


def forward(kind: CallKind, keep_cache: bool) -> LaunchList:
    """``hidden, weight, labels [R, 2], temperatures, floors, ids [R, K] -> results, saved, cache``, of all columns.

    Labels are the halves of int64 numbers. Temperatures, floors (in logits) and candidates' ids (int32; out of
    vocabulary: none) are there if the kind has them. The candidates' log-probabilities [R, K] are the last result. With
    a threshold, the live tiles take the place of the cache.
    """
    recording = _Recording(kind)
    call, numbers, saved, groups, cache, maxima = _statistics(recording, keep_cache)
    _candidates.add_logits(recording, call, saved)
    joined = recording.join_all(call, groups)
    given = recording.of_rows, saved, kind.vocab_size, kind.megatron
    results, saved = recording.host.launch(
        finish, kind.case, joined, recording.ids(saved), numbers[0], *given, None, numbers[1]
    )
    dropped, live = _saved_tiles.selected(recording, call, maxima, saved)
    results = [*results, *_candidates.logprobs(recording, saved), *dropped]
    return recording.launch_list([*results, saved, *jax.tree.leaves(cache), *live[: int(keep_cache)]])


def part(kind: CallKind, keep_cache: bool) -> LaunchList:
    """``hidden, weight, labels [R, 2], temperatures, floors, ids [R, K] -> sent, saved, cache, maxima`` of a shard.

    The statistics are the first fields of what is sent (``kind.sent_shape``). The caller writes a tag for each token
    into the last field of the first group: int32, the same on all shards. The candidates' x are sent apart, [K, Tp].
    With a threshold, the maxima of the shard's tiles are what `merge` needs of them.
    """
    recording = _Recording(kind)
    call, _, saved, groups, cache, maxima = _statistics(recording, keep_cache, more_fields=1)
    sent = [groups, *_candidates.sent_logits(recording, call, saved)]
    return recording.launch_list([*sent, saved, *jax.tree.leaves((cache, maxima))])


def merge(kind: CallKind, ranks: int, keep_cache: bool = False) -> LaunchList:
    """``gathered [N * groups, fields + 1, Tp], x [N K, Tp], saved, temperatures, floors, maxima -> results, live``.

    saved is written to. With a threshold: this shard's live tiles, if they are saved, and its part of the dropped mass.
    """
    recording = _Recording(kind)
    groups, *of_group = kind.sent_shape
    gathered = recording.input(ranks * groups, *of_group)
    x = recording.input(ranks * kind.num_candidates, gathered.shape[2]) if kind.num_candidates else None
    saved = recording.input(kind.saved_fields * kind.num_tokens)
    temperatures, floors = recording.numbers_of_tokens()
    marked, _ = recording.host.launch(
        prepare, kind.case, recording.ids(saved), temperatures, 0, recording.of_labels, None, floors
    )
    call = recording.call(gathered, gathered, marked)  # without a weight
    fields = _saved_tiles.fields_of_tiles(kind, keep_cache)
    maxima = recording.input(*_forward.maxima_shape(call, fields)) if fields else None
    joined = recording.join_all(call, gathered)
    tags = gathered.view(gathered.shape, jnp.int32)
    given = recording.of_rows, saved, kind.vocab_size, kind.megatron, tags, floors
    results, saved = recording.host.launch(finish, kind.case, joined, recording.ids(saved), temperatures, *given)
    _candidates.join(recording, x, saved)
    dropped, live = _saved_tiles.selected(recording, call, maxima, saved)
    return recording.launch_list(
        [*results, *_candidates.logprobs(recording, saved), *dropped, saved, *live[: int(keep_cache)]]
    )


def _statistics(
    recording: _Recording, keep_cache: bool, more_fields: int = 0
) -> tuple[KernelCall, Numbers, Buffer, Buffer, Cache | None, Buffer]:
    """The call, what tokens come with, what is saved, the statistics of groups, the cache, what each tile keeps."""
    kind = recording.kind
    hidden, weight = recording.operands()
    labels = recording.input(kind.num_tokens, 2, dtype=jnp.int32)
    temperatures, floors = recording.numbers_of_tokens()
    saved = recording.saved()
    _candidates.keep(recording, saved)
    given = temperatures, 0, recording.of_labels, recording.ids(saved), floors
    marked, _ = recording.host.launch(prepare, kind.case, labels, *given)
    call = recording.call(hidden, weight, marked)
    cached = _saved_tiles.cached_tiles(kind, keep_cache)
    cache = _cache.empty(recording.host, kind.case, recording.shape, cached) if cached else None
    how = _saved_tiles.fields_of_tiles(kind, keep_cache), more_fields
    groups, cache, maxima = _forward.joined(call, _forward.num_live_tiles(call), cache, *how)
    return call, (temperatures, floors), saved, groups, cache, maxima


def backward(
    kind: CallKind,
    seeds: Sequence[str],
    wanted: tuple[bool, bool],
    dhidden_dtype: str,
    *,
    cached: bool,
    owns_cache: bool,
    adds: bool,
) -> LaunchList:
    """``hidden, weight, saved, cotangents, dweight, cache -> dhidden, dweight``, those that are wanted.

    Args:
        kind: that of the forward.
        seeds: which cotangents there are: "logprobs", "entropy", "lse", "candidate_logprobs" ([R, K]), or some of them.
        wanted: which gradients.
        dhidden_dtype: what dhidden is rounded to.
        cached: whether there is a cache, which is the live tiles with a threshold.
        owns_cache: whether its memory may be overwritten.
        adds: dweight is added to a float32 sum, an operand, and is no result.
    """
    kind = dataclasses.replace(kind, vocab_part_size=None)  # the tiles here know no parts
    recording, case = _Recording(kind), kind.case
    hidden, weight = recording.operands()
    saved = recording.input(kind.saved_fields * kind.num_tokens)
    given = {name: recording.input(*_candidates.seed_shape(recording, name)) for name in seeds}
    total = recording.input(kind.num_columns, kind.hidden_size) if adds else None
    cache = _saved_tiles.cache_input(recording) if cached and not kind.gradient_threshold else None
    live = recording.input(*_saved_tiles.live_shape(kind), dtype=jnp.int32) if kind.gradient_threshold else None
    temperatures, floors = (saved if there else None for there in (kind.has_temperature, kind.has_floor))
    of_floors = floors, 1 + kind.has_temperature
    marked, _ = recording.host.launch(
        prepare, case, recording.ids(saved), temperatures, 1, recording.of_labels, None, *of_floors
    )
    call = recording.call(hidden, weight, marked)
    terms = _candidates.terms(recording, saved, given.pop(_candidates.SEED, None))
    how = given, recording.of_rows, kind.vocab_size, terms
    factors = recording.host.launch(coefficients, case, saved, kind.has_temperature, *how)
    candidates = _candidates.placed(recording, call, factors, saved, terms)
    whole = kind.copied_from is None and dhidden_dtype == kind.dtype and _fills(recording)
    if live is None:
        sums, dweight = _backward.walk(call, factors, candidates, cache, whole, owns_cache, total)
    else:
        sums, dweight = _threshold_backward.walk(call, factors, candidates, live, total)
    if sums.dtype == jnp.float32:
        count: Buffer = recording.host.numbers(ROWS)
        sums = recording.host.launch(kernels.total, case, sums, jnp.dtype(dhidden_dtype), count)
    return recording.launch_list([x for x, want in zip((sums, dweight), wanted, strict=True) if want])


def _fills(recording: _Recording) -> bool:
    """Whether dhidden's sums have no more rows and columns than dhidden."""
    splits, rows, columns = _dhidden.sums_shape(recording.kind.case, recording.shape)
    return (splits, rows, columns) == (1, recording.kind.num_tokens, recording.kind.hidden_size)
