"""The passes of a call as lists of launches: those of `lce_jax.mosaic`'s host code, and the steps between them.

    forward    prepare ─ statistics ─ join ─ finish                       a whole vocabulary
    part       prepare ─ statistics ─ join                                a shard's statistics, to be gathered
    merge                             join ─ finish                       all shards' statistics
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) … ─ total

With a ``gradient_threshold``, a forward or a merge ends in the live tiles, and a backward makes lists of them:

    forward    … finish ─ select
    backward   … coefficients ─ lists ─ (live dlogits ─ dhidden ─ dweight) … ─ total

Candidates have launches of their own beside these (`_candidates`).

What is kept of each token is flat, ``stride`` numbers a field: its label (int32), its temperature if it has one, its
candidates' ids (int32), the merged statistics, and the candidates' x.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lce_jax._types import Case, Device, Operands, Options
from lce_jax.mosaic import _backward, _cache, _dhidden, _forward, _generations, _live_backward, _partial_statistics
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._operands import Prepared
from lce_jax.passes import _candidates, _kept, _list
from lce_jax.passes._list import Program
from lce_jax.passes._recorder import ROWS, STRIDE, RecordedKernels, Recorder

type Buffer = Any  # a `_recorder.Buffer`, which the host code takes for an array

THREADS = 128  # rows that every per-token array has at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What is static about the calls that a program serves.

    Attributes:
        num_tokens: the most tokens, a multiple of 128.
        hidden_size: H, a multiple of 64, 128 at least.
        num_columns: V of the weight, a multiple of 8.
        vocab_size: of the whole vocabulary.
        start: the global id of the weight's first row.
        dtype: the weight's.
        device: what runs it.
        entropy, stats, logit_scale, logit_softcap, cache_bytes, gradient_threshold: as in `lce_jax.linear_logprobs`.
        dropped_mass: whether what the threshold leaves out is a result, the last one.
        num_candidates: K, of each token; 0: none.
        has_temperature: whether each token has one.
        copied_from: hidden's dtype where its rows are copied first: it has fewer than ``num_tokens``, or another dtype
            than the weight. None: kernels read it where it lies.
        megatron: whether labels out of the vocabulary get -ln Σ e^u in place of 0.
    """

    num_tokens: int
    hidden_size: int
    num_columns: int
    vocab_size: int
    start: int
    dtype: str
    device: Device
    entropy: bool = True
    stats: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    cache_bytes: int = 0
    gradient_threshold: float = 0.0
    dropped_mass: bool = False
    num_candidates: int = 0
    has_temperature: bool = False
    copied_from: str | None = None
    megatron: bool = False

    @property
    def case(self) -> Case:
        """As the kernels know it."""
        options = Options(
            logit_scale=self.logit_scale, logit_softcap=self.logit_softcap, entropy=self.entropy, stats=self.stats,
            cache_bytes=self.cache_bytes, gradient_threshold=self.gradient_threshold,
            num_candidates=self.num_candidates,
        )  # fmt: skip
        return Case(
            num_tokens=self.num_tokens, hidden_size=self.hidden_size, vocab_size=self.num_columns,
            dtype=jnp.dtype(self.dtype), options=options, device=self.device,
        )  # fmt: skip

    @property
    def live_columns(self) -> int | None:
        """The true columns among those of the weight; None if all are."""
        live = min(max(self.vocab_size - self.start, 0), self.num_columns)
        return None if live == self.num_columns else live

    @property
    def kept_fields(self) -> int:
        """How many numbers are kept of each token."""
        return self.first_statistic + len(_partial_statistics.kept(self.case.options)) + self.num_candidates

    @property
    def first_statistic(self) -> int:
        """The field of the first one that is kept."""
        return 1 + self.has_temperature + self.num_candidates

    @property
    def sent_fields(self) -> int:
        """How many numbers of each token a shard sends: statistics, its number of columns, and the candidates' x."""
        return len(_partial_statistics.names(self.case.options)) + 1 + self.num_candidates

    @property
    def padded_tokens(self) -> int:
        """How many tokens the arrays have that a shard sends."""
        return geometry(self.case, _generations.KERNEL_SETS[0].tiling).padded_tokens


def refusal(head: Head) -> str | None:
    """Why no list serves these calls; None if one does."""
    reason = _generations.refusal(head.case)
    if reason is not None:
        return reason
    shape = geometry(head.case, _generations.KERNEL_SETS[0].tiling)
    if not shape.whole_atoms:
        return f"V must be a multiple of {shape.atom}, got {head.num_columns}"
    if head.hidden_size < THREADS:
        return f"H must be at least {THREADS}, got {head.hidden_size}"
    return None


class _Pass:
    """A list that is made: its memory, its kernels, and what is per token."""

    def __init__(self, head: Head) -> None:
        self.head, self.host = head, Recorder()
        kernels = _generations.serving(head.device)
        assert kernels is not None
        self.kernels: Any = RecordedKernels(kernels, self.host)
        self.shape = geometry(head.case, kernels.tiling)

    def input(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        """An operand."""
        return self.host.input(shape, dtype)

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
        mask: Any = self.host.numbers(*(int(i >= columns % tile) for i in range(2 * tile)))
        rows: Any = ROWS
        per_token = marked.targets, marked.scale, marked.holds_target
        prepared = Prepared(hidden, weight, *per_token, mask, columns, rows)
        operands = Operands(hidden, weight, marked.targets, None, rows, head.live_columns)
        return Call(operands, prepared, head.case, self.shape, self.kernels, self.host)

    def program(self, outputs: Sequence[Buffer]) -> Program:
        """The list."""
        return _list.program(self.host, outputs, self.head.device)


def forward(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures, ids [R, K] -> results, kept, cache`` of a whole vocabulary.

    Labels are the halves of int64 numbers. Temperatures and candidates' ids (int32; out of vocabulary: none) are there
    if the head has them. The candidates' log-probabilities [R, K] are the last result. With a threshold, the live tiles
    take the place of the cache.
    """
    made = _Pass(head)
    call, temperatures, kept, groups, cache, maxima = _statistics(made, keep_cache)
    _candidates.add_logits(made, call, kept)
    joined = _forward.join_all(call, groups)
    given = made.of_rows, kept, head.vocab_size, head.megatron
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), temperatures, *given)
    dropped, live = _kept.selected(made, call, maxima, kept)
    results = [*results, *_candidates.logprobs(made, kept), *dropped]
    return made.program([*results, kept, *jax.tree.leaves(cache), *live[: int(keep_cache)]])


def part(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures, ids [R, K] -> sent, kept, cache, maxima`` of a shard.

    What is sent is [1, fields, Tp]: the statistics, one field that the caller fills with the number of the weight's
    rows, and the candidates' x. With a threshold, the maxima of the shard's tiles are what `merge` needs of them.
    """
    made = _Pass(head)
    call, _, kept, groups, cache, maxima = _statistics(made, keep_cache)
    sent: Any = made.host.empty((1, head.sent_fields, made.shape.padded_tokens), jnp.float32)
    _candidates.send_logits(made, call, kept, sent)
    return made.program([_forward.join_all(call, groups, sent), kept, *jax.tree.leaves((cache, maxima))])


def merge(head: Head, ranks: int, keep_cache: bool = False) -> Program:
    """``gathered [N, fields, Tp], kept, temperatures, maxima -> results, live``; kept is written to.

    With a threshold: this shard's live tiles, if they are kept, and its part of the dropped mass.
    """
    made = _Pass(head)
    gathered = made.input(ranks, head.sent_fields, made.shape.padded_tokens)
    kept = made.input(head.kept_fields * head.num_tokens)
    temperatures = made.input(head.num_tokens) if head.has_temperature else None
    marked, _ = made.kernels.prepare(head.case, made.ids(kept), temperatures, 0, made.of_labels, None)
    call = made.call(gathered, gathered, marked)  # without a weight
    fields = _kept.fields_of_tiles(head, keep_cache)
    maxima = made.input(*_forward.maxima_shape(call, _forward.num_live_tiles(call), fields)) if fields else None
    joined = _forward.join_all(call, gathered)
    given = made.of_rows, kept, head.vocab_size, head.megatron, gathered
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), temperatures, *given)
    _candidates.join(made, gathered, kept)
    dropped, live = _kept.selected(made, call, maxima, kept)
    return made.program([*results, *_candidates.logprobs(made, kept), *dropped, kept, *live[: int(keep_cache)]])


def _statistics(made: _Pass, keep_cache: bool) -> tuple[Call, Buffer | None, Buffer, Buffer, Cache | None, Buffer]:
    """The call, the temperatures, what is kept, the statistics of groups, the cache, what is kept of each tile."""
    head = made.head
    hidden, weight = made.operands()
    labels = made.input(head.num_tokens, 2, dtype=jnp.int32)
    temperatures = made.input(head.num_tokens) if head.has_temperature else None
    kept = made.kept()
    _candidates.keep(made, kept)
    marked, _ = made.kernels.prepare(head.case, labels, temperatures, 0, made.of_labels, made.ids(kept))
    call = made.call(hidden, weight, marked)
    cached = _kept.cached_tiles(head, keep_cache)
    cache = _cache.empty(made.host, head.case, made.shape, cached) if cached else None
    fields = _kept.fields_of_tiles(head, keep_cache)
    groups, cache, maxima = _forward.joined(call, _forward.num_live_tiles(call), cache, fields)
    return call, temperatures, kept, groups, cache, maxima


def backward(
    head: Head,
    seeds: Sequence[str],
    wanted: tuple[bool, bool],
    dhidden_dtype: str,
    *,
    cached: bool,
    owns_cache: bool,
    adds: bool,
    exact: bool,
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
        exact: there are as many tokens as the program takes.
    """
    made, case = _Pass(head), head.case
    hidden, weight = made.operands()
    kept = made.input(head.kept_fields * head.num_tokens)
    given = {name: made.input(*_candidates.seed_shape(made, name)) for name in seeds}
    total = made.input(head.num_columns, head.hidden_size) if adds else None
    cache = _kept.cache_input(made) if cached and not head.gradient_threshold else None
    live = made.input(*_kept.live_shape(head), dtype=jnp.int32) if head.gradient_threshold else None
    temperatures = kept if head.has_temperature else None
    marked, _ = made.kernels.prepare(case, made.ids(kept), temperatures, 1, made.of_labels, None)
    call = made.call(hidden, weight, marked)
    terms = _candidates.terms(made, kept, given.pop(_candidates.SEED, None))
    how = given, made.of_rows, head.vocab_size, terms
    factors = made.kernels.coefficients(case, kept, head.has_temperature, *how)
    candidates = _candidates.placed(made, call, factors, kept, terms)
    whole = exact and dhidden_dtype == head.dtype and _fills(made)
    if live is None:
        sums, dweight = _backward.walk(call, factors, candidates, cache, whole, owns_cache, total)
    else:
        sums, dweight = _live_backward.walk(call, factors, live, total)
    if sums.dtype == jnp.float32 or not whole:
        sums = made.kernels.total(case, sums, jnp.dtype(dhidden_dtype), made.host.numbers(ROWS))
    return made.program([x for x, want in zip((sums, dweight), wanted, strict=True) if want])


def _fills(made: _Pass) -> bool:
    """Whether dhidden's sums have no more rows and columns than dhidden."""
    splits, rows, columns = _dhidden.sums_shape(made.head.case, made.shape)
    return (splits, rows, columns) == (1, made.head.num_tokens, made.head.hidden_size)
