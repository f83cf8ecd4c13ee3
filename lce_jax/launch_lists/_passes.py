"""The passes of a call as lists of launches: those of `lce_jax.mosaic`'s host code, and the steps between them.

    forward    prepare ─ statistics ─ join ─ finish                       a whole vocabulary
    part       prepare ─ statistics ─ join                                a shard's statistics, to be gathered
    merge      prepare                join ─ finish                       all shards' statistics
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) … ─ total

With a ``gradient_threshold``, a forward or a merge ends in the live tiles, and a backward makes lists of them:

    forward    … finish ─ select
    backward   … coefficients ─ lists ─ (live dlogits ─ dhidden ─ dweight) … ─ total

Candidates have launches of their own beside these (`_candidates`).

What is kept of each token is flat, ``stride`` numbers a field: its label (int32), its temperature and its floor if it
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
from lce_jax.launch_lists import _candidates, _kept, _list
from lce_jax.launch_lists._head import Head
from lce_jax.launch_lists._list import Program
from lce_jax.launch_lists._recorder import ROWS, STRIDE, RecordedKernels, Recorder
from lce_jax.mosaic import _backward, _cache, _dhidden, _forward, _operands, _threshold_backward
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._operands import Prepared

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array
type Numbers = tuple[Buffer | None, Buffer | None]  # temperatures and floors


class _Pass:
    """A list that is made: its memory, its kernels, and what is per token."""

    def __init__(self, head: Head) -> None:
        self.head, self.host = head, Recorder()
        self.kernels: Any = RecordedKernels(head.kernels, self.host)
        self.shape = head.shape

    def input(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        """An operand."""
        return self.host.input(shape, dtype)

    def numbers_of_tokens(self) -> Numbers:
        """The temperatures and the floors, operands, those that there are."""
        there = self.head.has_temperature, self.head.has_floor
        temperatures, floors = (self.input(self.head.num_tokens) if one else None for one in there)
        return temperatures, floors

    @functools.cached_property
    def of_rows(self) -> Buffer:
        """How many tokens there are, and the stride of fields."""
        return self.host.numbers(ROWS, STRIDE)

    @functools.cached_property
    def of_labels(self) -> Buffer:
        """The same, the first column, and the size of the vocabulary."""
        return self.host.numbers(ROWS, STRIDE, self.head.start, self.head.vocab_size)

    def operands(self) -> tuple[Buffer, Buffer]:
        """Hidden and the weight."""
        head = self.head
        hidden = self.input(head.num_tokens, head.hidden_size, dtype=head.copied_from or head.dtype)
        weight = self.input(head.num_columns, head.hidden_size, dtype=head.dtype)
        if head.copied_from is not None:
            hidden = self.kernels.rows(head.case, hidden, self.host.numbers(ROWS))
        return hidden, weight

    def kept(self) -> Buffer:
        """Memory for what is kept."""
        return self.host.empty((self.head.kept_fields * self.head.num_tokens,), jnp.float32)

    def ids(self, kept: Buffer) -> Buffer:
        """The labels among it."""
        return kept.view((self.head.num_tokens,), jnp.int32)

    def call(self, hidden: Buffer, weight: Buffer, marked: Any) -> Call:
        """The call, from here on as `lce_jax.mosaic` runs it."""
        head, tile = self.head, self.shape.tile
        columns: Any = head.num_columns if head.live_columns is None else head.live_columns
        firsts = _operands.first_padding(columns, self.shape)
        mask: Any = self.host.numbers(*(int(i >= first) for first in firsts for i in range(2 * tile)))
        rows: Any = ROWS
        per_token = marked.targets, marked.scale, marked.holds_target
        prepared = Prepared(hidden, weight, *per_token, mask, columns, rows, marked.floor)
        operands = Operands(hidden, weight, marked.targets, None, rows, head.live_columns)
        return Call(operands, prepared, head.case, self.shape, self.kernels, self.host)

    def join_all(self, call: Call, groups: Buffer) -> Buffer:
        """The statistics of the whole vocabulary."""
        scale, rows = call.prepared.scale, call.prepared.num_rows
        return _forward.join_all(self.host, self.kernels, self.head.case, scale, rows, groups)

    def program(self, outputs: Sequence[Buffer]) -> Program:
        """The list."""
        return _list.program(self.host, outputs, self.head.device)


def forward(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures, floors, ids [R, K] -> results, kept, cache``, of all columns.

    Labels are the halves of int64 numbers. Temperatures, floors (in logits) and candidates' ids (int32; out of
    vocabulary: none) are there if the head has them. The candidates' log-probabilities [R, K] are the last result. With
    a threshold, the live tiles take the place of the cache.
    """
    made = _Pass(head)
    call, numbers, kept, groups, cache, maxima = _statistics(made, keep_cache)
    _candidates.add_logits(made, call, kept)
    joined = made.join_all(call, groups)
    given = made.of_rows, kept, head.vocab_size, head.megatron
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), numbers[0], *given, None, numbers[1])
    dropped, live = _kept.selected(made, call, maxima, kept)
    results = [*results, *_candidates.logprobs(made, kept), *dropped]
    return made.program([*results, kept, *jax.tree.leaves(cache), *live[: int(keep_cache)]])


def part(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures, floors, ids [R, K] -> sent, kept, cache, maxima`` of a shard.

    The statistics are the first fields of what is sent (``head.sent_shape``). The caller fills the last field with the
    number of the weight's rows. The candidates' x are sent apart, [K, Tp]. With a threshold, the maxima of the shard's
    tiles are what `merge` needs of them.
    """
    made = _Pass(head)
    call, _, kept, groups, cache, maxima = _statistics(made, keep_cache, more_fields=1)
    sent = [groups, *_candidates.sent_logits(made, call, kept)]
    return made.program([*sent, kept, *jax.tree.leaves((cache, maxima))])


def merge(head: Head, ranks: int, keep_cache: bool = False) -> Program:
    """``gathered [N * groups, fields + 1, Tp], x [N K, Tp], kept, temperatures, floors, maxima -> results, live``.

    kept is written to. With a threshold: this shard's live tiles, if they are kept, and its part of the dropped mass.
    """
    made = _Pass(head)
    groups, *of_group = head.sent_shape
    gathered = made.input(ranks * groups, *of_group)
    x = made.input(ranks * head.num_candidates, gathered.shape[2]) if head.num_candidates else None
    kept = made.input(head.kept_fields * head.num_tokens)
    temperatures, floors = made.numbers_of_tokens()
    marked, _ = made.kernels.prepare(head.case, made.ids(kept), temperatures, 0, made.of_labels, None, floors)
    call = made.call(gathered, gathered, marked)  # without a weight
    fields = _kept.fields_of_tiles(head, keep_cache)
    maxima = made.input(*_forward.maxima_shape(call, fields)) if fields else None
    joined = made.join_all(call, gathered)
    given = made.of_rows, kept, head.vocab_size, head.megatron, gathered, floors
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), temperatures, *given)
    _candidates.join(made, x, kept)
    dropped, live = _kept.selected(made, call, maxima, kept)
    return made.program([*results, *_candidates.logprobs(made, kept), *dropped, kept, *live[: int(keep_cache)]])


def _statistics(
    made: _Pass, keep_cache: bool, more_fields: int = 0
) -> tuple[Call, Numbers, Buffer, Buffer, Cache | None, Buffer]:
    """The call, what tokens come with, what is kept, the statistics of groups, the cache, what is kept of each tile."""
    head = made.head
    hidden, weight = made.operands()
    labels = made.input(head.num_tokens, 2, dtype=jnp.int32)
    temperatures, floors = made.numbers_of_tokens()
    kept = made.kept()
    _candidates.keep(made, kept)
    given = temperatures, 0, made.of_labels, made.ids(kept), floors
    marked, _ = made.kernels.prepare(head.case, labels, *given)
    call = made.call(hidden, weight, marked)
    cached = _kept.cached_tiles(head, keep_cache)
    cache = _cache.empty(made.host, head.case, made.shape, cached) if cached else None
    how = _kept.fields_of_tiles(head, keep_cache), more_fields
    groups, cache, maxima = _forward.joined(call, _forward.num_live_tiles(call), cache, *how)
    return call, (temperatures, floors), kept, groups, cache, maxima


def backward(
    head: Head,
    seeds: Sequence[str],
    wanted: tuple[bool, bool],
    dhidden_dtype: str,
    *,
    cached: bool,
    owns_cache: bool,
    adds: bool,
) -> Program:
    """``hidden, weight, kept, cotangents, dweight, cache -> dhidden, dweight``, those that are wanted.

    Args:
        head: that of the forward.
        seeds: which cotangents there are: "logprobs", "entropy", "lse", "candidate_logprobs" ([R, K]), or some of them.
        wanted: which gradients.
        dhidden_dtype: what dhidden is rounded to.
        cached: whether there is a cache, which is the live tiles with a threshold.
        owns_cache: whether its memory may be overwritten.
        adds: dweight is added to a float32 sum, an operand, and is no result.
    """
    head = dataclasses.replace(head, vocab_part_size=None)  # the tiles here know no parts
    made, case = _Pass(head), head.case
    hidden, weight = made.operands()
    kept = made.input(head.kept_fields * head.num_tokens)
    given = {name: made.input(*_candidates.seed_shape(made, name)) for name in seeds}
    total = made.input(head.num_columns, head.hidden_size) if adds else None
    cache = _kept.cache_input(made) if cached and not head.gradient_threshold else None
    live = made.input(*_kept.live_shape(head), dtype=jnp.int32) if head.gradient_threshold else None
    temperatures, floors = (kept if there else None for there in (head.has_temperature, head.has_floor))
    of_floors = floors, 1 + head.has_temperature
    marked, _ = made.kernels.prepare(case, made.ids(kept), temperatures, 1, made.of_labels, None, *of_floors)
    call = made.call(hidden, weight, marked)
    terms = _candidates.terms(made, kept, given.pop(_candidates.SEED, None))
    how = given, made.of_rows, head.vocab_size, terms
    factors = made.kernels.coefficients(case, kept, head.has_temperature, *how)
    candidates = _candidates.placed(made, call, factors, kept, terms)
    whole = head.copied_from is None and dhidden_dtype == head.dtype and _fills(made)
    if live is None:
        sums, dweight = _backward.walk(call, factors, candidates, cache, whole, owns_cache, total)
    else:
        sums, dweight = _threshold_backward.walk(call, factors, candidates, live, total)
    if sums.dtype == jnp.float32:
        sums = made.kernels.total(case, sums, jnp.dtype(dhidden_dtype), made.host.numbers(ROWS))
    return made.program([x for x, want in zip((sums, dweight), wanted, strict=True) if want])


def _fills(made: _Pass) -> bool:
    """Whether dhidden's sums have no more rows and columns than dhidden."""
    splits, rows, columns = _dhidden.sums_shape(made.head.case, made.shape)
    return (splits, rows, columns) == (1, made.head.num_tokens, made.head.hidden_size)
