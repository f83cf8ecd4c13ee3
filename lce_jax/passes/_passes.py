"""The passes of a call as lists of launches: those of `lce_jax.mosaic`'s host code, and the steps between them.

    forward    prepare ─ statistics ─ join ─ finish                       a whole vocabulary
    part       prepare ─ statistics ─ join                                a shard's statistics, to be gathered
    merge      prepare                join ─ finish                       all shards' statistics
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) … ─ total

What is kept of each token is flat, ``stride`` numbers a field: its label (int32), its temperature if it has one, and
the merged statistics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lce_jax._types import Case, Device, Operands, Options
from lce_jax.mosaic import _backward, _cache, _chunks, _dhidden, _forward, _generations, _partial_statistics
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._operands import Prepared
from lce_jax.passes import _list
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
        entropy, stats, logit_scale, logit_softcap, cache_bytes: as in `lce_jax.linear_logprobs`.
        has_temperature: whether each token has one.
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
    has_temperature: bool = False
    megatron: bool = False

    @property
    def case(self) -> Case:
        """As the kernels know it."""
        options = Options(
            logit_scale=self.logit_scale, logit_softcap=self.logit_softcap, entropy=self.entropy, stats=self.stats,
            cache_bytes=self.cache_bytes,
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
        return 1 + self.has_temperature + 3 + self.entropy

    @property
    def sent_shape(self) -> tuple[int, int, int]:
        """What a shard sends: of each group of tiles, the fields of statistics and the number of columns."""
        tiling = _generations.KERNEL_SETS[0].tiling
        fields = len(_partial_statistics.names(self.case.options)) + 1
        return _chunks.num_groups(self.case, tiling), fields, geometry(self.case, tiling).padded_tokens


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
        hidden = self.input(head.num_tokens, head.hidden_size, dtype=head.dtype)
        return hidden, self.input(head.num_columns, head.hidden_size, dtype=head.dtype)

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

    def join_all(self, call: Call, groups: Buffer) -> Buffer:
        """The statistics of the whole vocabulary."""
        scale, rows = call.prepared.scale, call.prepared.num_rows
        return _forward.join_all(self.host, self.kernels, self.head.case, scale, rows, groups)

    def program(self, outputs: Sequence[Buffer]) -> Program:
        """The list."""
        return _list.program(self.host, outputs, self.head.device)


def forward(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures -> results, kept, cache`` of a whole vocabulary.

    Labels are the halves of int64 numbers. Temperatures are there if the head has them.
    """
    made = _Pass(head)
    call, temperatures, kept, groups, cache = _statistics(made, keep_cache)
    joined = made.join_all(call, groups)
    given = made.of_rows, kept, head.vocab_size, head.megatron
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), temperatures, *given)
    return made.program([*results, kept, *jax.tree.leaves(cache)])


def part(head: Head, keep_cache: bool) -> Program:
    """``hidden, weight, labels [R, 2], temperatures -> statistics, kept, cache`` of a shard.

    The statistics are the first fields of what is sent (``head.sent_shape``). The caller fills the last field with the
    number of the weight's rows.
    """
    made = _Pass(head)
    _, _, kept, groups, cache = _statistics(made, keep_cache, more_fields=1)
    return made.program([groups, kept, *jax.tree.leaves(cache)])


def merge(head: Head, ranks: int) -> Program:
    """``gathered [N * groups, fields + 1, Tp], kept, temperatures -> results``; kept is written to."""
    made = _Pass(head)
    groups, *of_group = head.sent_shape
    gathered = made.input(ranks * groups, *of_group)
    kept = made.input(head.kept_fields * head.num_tokens)
    temperatures = made.input(head.num_tokens) if head.has_temperature else None
    marked, _ = made.kernels.prepare(head.case, made.ids(kept), temperatures, 0, made.of_labels, None)
    call = made.call(gathered, gathered, marked)  # without a weight
    joined = made.join_all(call, gathered)
    given = made.of_rows, kept, head.vocab_size, head.megatron, gathered
    results, kept = made.kernels.finish(head.case, joined, made.ids(kept), temperatures, *given)
    return made.program([*results, kept])


def _statistics(
    made: _Pass, keep_cache: bool, more_fields: int = 0
) -> tuple[Call, Buffer | None, Buffer, Buffer, Cache | None]:
    """The call, the temperatures, what is kept, the statistics of groups, the cache."""
    head = made.head
    hidden, weight = made.operands()
    labels = made.input(head.num_tokens, 2, dtype=jnp.int32)
    temperatures = made.input(head.num_tokens) if head.has_temperature else None
    kept = made.kept()
    marked, _ = made.kernels.prepare(head.case, labels, temperatures, 0, made.of_labels, made.ids(kept))
    call = made.call(hidden, weight, marked)
    cached = cached_tiles(head, keep_cache)
    cache = _cache.empty(made.host, head.case, made.shape, cached) if cached else None
    groups, cache, _ = _forward.joined(call, _forward.num_live_tiles(call), cache, more_fields=more_fields)
    return call, temperatures, kept, groups, cache


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
        seeds: which cotangents there are: some of "logprobs", "entropy" and "lse".
        wanted: which gradients.
        dhidden_dtype: what dhidden is rounded to.
        cached: whether there is a cache.
        owns_cache: whether its memory may be overwritten.
        adds: dweight is added to a float32 sum, an operand, and is no result.
        exact: there are as many tokens as the program takes.
    """
    made, case = _Pass(head), head.case
    hidden, weight = made.operands()
    kept = made.input(head.kept_fields * head.num_tokens)
    given = {name: made.input(head.num_tokens) for name in seeds}
    total = made.input(head.num_columns, head.hidden_size) if adds else None
    cache = _cache_input(made) if cached else None
    temperatures = kept if head.has_temperature else None
    marked, _ = made.kernels.prepare(case, made.ids(kept), temperatures, 1, made.of_labels, None)
    call = made.call(hidden, weight, marked)
    factors = made.kernels.coefficients(case, kept, head.has_temperature, given, made.of_rows, head.vocab_size)
    whole = exact and dhidden_dtype == head.dtype and _fills(made)
    sums, dweight = _backward.walk(call, factors, None, cache, whole, owns_cache, total)
    if sums.dtype == jnp.float32 or not whole:
        sums = made.kernels.total(case, sums, jnp.dtype(dhidden_dtype), made.host.numbers(ROWS))
    return made.program([x for x, want in zip((sums, dweight), wanted, strict=True) if want])


def _fills(made: _Pass) -> bool:
    """Whether dhidden's sums have no more rows and columns than dhidden."""
    splits, rows, columns = _dhidden.sums_shape(made.head.case, made.shape)
    return (splits, rows, columns) == (1, made.head.num_tokens, made.head.hidden_size)


def _cache_input(made: _Pass) -> Cache:
    structs = _cache.empty(Recorder(), made.head.case, made.shape, cached_tiles(made.head, True))
    exponentials, highest = (made.input(*x.shape, dtype=x.dtype) for x in structs)
    return Cache(exponentials, highest)


def cached_tiles(head: Head, keep_cache: bool) -> int:
    """The vocabulary tiles whose exponentials a forward keeps."""
    if not keep_cache:
        return 0
    shape = geometry(head.case, _generations.KERNEL_SETS[0].tiling)
    live = head.num_columns if head.live_columns is None else max(head.live_columns, 1)
    return min(_cache.num_cached_tiles(head.case, shape), -(-live // shape.tile))
