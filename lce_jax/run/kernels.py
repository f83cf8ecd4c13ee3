"""The passes of a call as kernels, for a host that brings its own memory and stream.

    forward    prepare ─ statistics ─ join ─ (exchange between shards) ─ join ─ finish ─ select
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) …

`forward` and `backward` are called with a host (`lce_jax.mosaic._host.Host`), and tell it what to launch on which of
its arrays: it may launch at once, or keep what it is told and launch that for each call. `traced` and `compiled` give
it the kernels, without a client of JAX's on the GPU.

What is saved of each token is flat, ``stride`` numbers a field: its label (int32), its temperature and its floor if it
has one, its candidates' ids (int32), the merged statistics, and the candidates' x.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.call._dispatch import trace_for_device
from lce_jax.call._first_call import check_once, measure_errors
from lce_jax.mosaic import _backward, _candidates, _chunks, _forward, _generations, _operands, _threshold
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._chunks import Cache
from lce_jax.mosaic._compiler import Bind, Kernel, compiled, traced, why_not
from lce_jax.mosaic._generations import device_refusal, unchecked
from lce_jax.mosaic._host import Host
from lce_jax.mosaic._operands import Geometry, KeptFields, Prepared, geometry, kept_fields
from lce_jax.mosaic.common import _tiles, _tokens
from lce_jax.mosaic.common._candidates import cotangents, keep, place_values, products, put
from lce_jax.mosaic.common._select import select
from lce_jax.mosaic.common._tokens import coefficients, finish, prepare, scale
from lce_jax.types._types import Call, Device, Operands

__all__ = [
    "THREADS",
    "Bind",
    "Call",
    "Device",
    "Forward",
    "Kernel",
    "LaunchedCall",
    "Tokens",
    "backward",
    "check_once",
    "compiled",
    "device_refusal",
    "forward",
    "live_shape",
    "measure_errors",
    "products",
    "put",
    "refusal",
    "refusal_to_scale",
    "scale",
    "trace_for_device",
    "traced",
    "unchecked",
    "why_not",
]

THREADS = 128  # rows that every per-token array has at least

PER_CANDIDATE = "candidate_logprobs"  # the result [R, K], and its cotangent

type Buffer = Any  # an array of the host's, with a shape, a dtype and `view(shape, dtype)`


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchedCall:
    """A call whose kernels a host launches. H is a multiple of 64, 128 at least, and the weight's V one of the atom.

    Attributes:
        call: of the caller's arrays.
        rows: of the kernels' arrays, as many as there are tokens or more: a multiple of 128.
        start: the global id of the weight's first row.
        has_temperature: whether each token has one.
        megatron: whether labels out of the vocabulary get -ln Σ e^u in place of 0.
    """

    call: Call
    rows: int
    start: int
    has_temperature: bool = False
    megatron: bool = False

    @functools.cached_property
    def compiled(self) -> Call:
        """What kernels are compiled for: those for the same rows are the same."""
        return self.call.replace(num_tokens=self.rows, vocab_size=0, caller_dtype=None, requested=None)

    @property
    def generation(self) -> Generation:
        """The device's; the first where no kernels serve it, and `refusal` says so."""
        return _generations.serving(self.call.device) or _generations.GENERATIONS[0]

    @functools.cached_property
    def shape(self) -> Geometry:
        """The tiles."""
        return geometry(self.compiled, self.generation.tiling)

    @property
    def stride(self) -> int:
        """The rows that the caller's arrays have."""
        return max(self.call.num_tokens, THREADS)

    @property
    def copies_hidden(self) -> bool:
        """Whether hidden is copied first: kernels read its dtype, the weight's, and whole tiles of rows."""
        tiling, tokens = self.generation.tiling, self.call.num_tokens
        has_rows = tokens % (tiling.row_block * tiling.most_clustered) == 0 or tokens == self.rows
        return not has_rows or self.call.hidden_dtype != self.call.dtype

    @property
    def live_columns(self) -> int | None:
        """The true columns among those of the weight; None if all are."""
        live = min(max(self.call.vocab_size - self.start, 0), self.call.columns)
        return None if live == self.call.columns else live

    @property
    def true_columns(self) -> int:
        """How many of the weight's columns count."""
        return self.call.columns if self.live_columns is None else self.live_columns

    @property
    def kept(self) -> KeptFields:
        """Where what is saved of each token lies."""
        return kept_fields(self.compiled, self.has_temperature)


def refusal(launched: LaunchedCall) -> str | None:
    """Why no kernels serve these calls; None if some do."""
    reason = _generations.refusal(launched.compiled)
    if reason is not None:
        return reason
    if not launched.shape.whole_atoms:
        return f"V must be a multiple of {launched.shape.atom}, got {launched.call.columns}"
    if launched.call.hidden_size < THREADS:
        return f"H must be at least {THREADS}, got {launched.call.hidden_size}"
    return None


def refusal_to_scale(size: int, device: Device) -> str | None:
    """Why `scale` does not multiply so many numbers on a device; None if it does."""
    reason = device_refusal(device)
    if reason is not None:
        return reason
    if size % _tiles.SCALED or size >= 1 << 31:
        return f"{size} numbers must be a multiple of {_tiles.SCALED}, and less than 2^31"
    return None


def live_shape(launched: LaunchedCall) -> tuple[int, int]:
    """The shape of the live tiles, in int32, that a forward keeps with a threshold."""
    return _tiles.live_shape(launched.compiled)


class Tokens(NamedTuple):
    """What each token comes with."""

    labels: Buffer  # [R, 2]: the halves of int64 numbers
    temperature: Buffer | None = None  # [R]
    floor: Buffer | None = None  # [R], in logits
    candidates: Buffer | None = None  # [R, K] int32; out of vocabulary: none


class Forward(NamedTuple):
    """What a forward computes."""

    results: dict[str, Buffer]  # by the field of `LogprobOutput`: [R], [R, K] of candidates
    saved: Buffer  # flat
    kept: list[Buffer]  # the cache, or the live tiles


# Given the statistics of a shard's groups of tiles [groups, fields, Tp], of which the last field of the first group is
# free, its candidates' x [R, K] and what is saved, returns those of all shards.
type Exchange = Callable[[Buffer, Buffer | None, Buffer], tuple[Buffer, Buffer | None]]


class HostPass(NamedTuple):
    """A pass that is told to a host."""

    launched: LaunchedCall
    host: Host

    @property
    def of_rows(self) -> Buffer:
        """How many tokens there are, and the stride of fields."""
        return self.host.numbers(self.launched.call.num_tokens, self.launched.stride)

    @property
    def of_labels(self) -> Buffer:
        """The same, the first column, the size of the vocabulary, and how many columns count."""
        launched, call = self.launched, self.launched.call
        counts = call.num_tokens, launched.stride, launched.start, call.vocab_size, launched.true_columns
        return self.host.numbers(*counts)

    def rows(self, hidden: Buffer) -> Buffer:
        """Hidden as kernels read it: all their rows, in the weight's dtype."""
        if not self.launched.copies_hidden:
            return hidden
        call = self.launched.call
        copied = self.launched.compiled.replace(hidden_size=call.hidden_size + call.rank)
        return self.host.launch(_tokens.copy_rows, copied, hidden, self.host.numbers(call.num_tokens))

    def ids(self, saved: Buffer) -> Buffer:
        """The labels among what is saved."""
        return saved.view((self.launched.rows,), jnp.int32)

    def kernel_call(self, hidden: Buffer, weight: Buffer, marked: Any, adapter: Buffer | None) -> KernelCall:
        """The call, from here on as `lce_jax.mosaic` runs it."""
        launched, shape = self.launched, self.launched.shape
        columns: Any = launched.true_columns
        firsts = _operands.first_padding(columns, shape)
        mask = self.host.numbers(*(int(i >= first) for first in firsts for i in range(2 * shape.tile)))
        rows: Any = launched.call.num_tokens
        per_token = marked.targets, marked.row_scale, marked.holds_target
        prepared = Prepared(hidden, weight, *per_token, mask, columns, rows, marked.floor)
        operands = Operands(hidden, weight, marked.targets, None, rows, launched.live_columns, adapter=adapter)
        return KernelCall(operands, prepared, launched.compiled, shape, launched.generation, self.host).add_adapter()


def forward(
    launched: LaunchedCall,
    host: Host,
    hidden: Buffer,
    weight: Buffer,
    tokens: Tokens,
    keep_cache: bool,
    exchange: Exchange | None = None,
    adapter: Buffer | None = None,
) -> Forward:
    """The results of all columns, or with ``exchange`` of a vocabulary that is split over shards.

    ``adapter``: ``[V, R]``, B of an adapter.
    """
    run, call = HostPass(launched, host), launched.compiled
    saved = host.empty((launched.kept.size * launched.rows,), jnp.float32)
    temperature, floor, ids = tokens.temperature, tokens.floor, tokens.candidates
    of_labels = temperature, 0, run.of_labels, run.ids(saved), floor
    marked, _ = host.launch(prepare, call, tokens.labels, *of_labels)
    kernel_call = run.kernel_call(run.rows(hidden), weight, marked, adapter)
    cached = cached_tiles(launched, keep_cache)
    cache = _chunks.empty_cache(host, call, launched.shape, cached) if cached else None
    fields_of_tiles = int(keep_cache and launched.call.gradient_threshold > 0.0)
    how = _forward.num_live_tiles(kernel_call), cache, fields_of_tiles, int(exchange is not None)
    groups, cache, maxima = _forward.joined(kernel_call, *how)
    columns = None if ids is None else host.compute(_candidates.columns_of, ids, launched.start, launched.true_columns)
    x = None if columns is None else _candidates.unscaled(kernel_call, columns)
    tags = None
    if exchange is not None:
        groups, x = exchange(groups, x, saved)
        tags = groups.view(groups.shape, jnp.int32)
    joined = _forward.join_all(host, call, kernel_call.prepared.row_scale, launched.call.num_tokens, groups)
    more = run.of_rows, saved, launched.call.vocab_size, launched.megatron, tags, floor
    results, saved = host.launch(finish, call, joined, run.ids(saved), temperature, *more)
    named = dict(zip(_operands.result_statistics(call), results, strict=True))
    if ids is not None and x is not None:
        named[PER_CANDIDATE], saved = host.launch(keep, call, launched.has_temperature, ids, x, saved, run.of_rows)
    kept: list[Buffer] = jax.tree.leaves(cache)
    if maxima is not None:
        numbers = host.numbers(launched.call.num_tokens, launched.stride, _threshold.always_live(kernel_call))
        given = (
            maxima,
            kernel_call.prepared.targets,
            kernel_call.prepared.row_scale,
            saved,
            launched.kept.statistics,
            numbers,
        )
        kept = [host.launch(select, call, *given, _threshold.held(kernel_call, columns))[0]]
    return Forward(named, saved, kept)


def cached_tiles(launched: LaunchedCall, keep_cache: bool) -> int:
    """The vocabulary tiles whose exponentials a forward keeps."""
    if not keep_cache:
        return 0
    tiles = -(-max(launched.true_columns, 1) // launched.shape.tile)
    return min(_chunks.num_cached_tiles(launched.compiled, launched.shape), tiles)


def backward(
    launched: LaunchedCall,
    host: Host,
    hidden: Buffer,
    weight: Buffer,
    saved: Buffer,
    seeds: dict[str, Buffer],
    kept: list[Buffer],
    dhidden_dtype: str,
    adapter: Buffer | None = None,
    *,
    owns_cache: bool,
    total: Buffer | None = None,
    adds_total: bool = True,
) -> tuple[Buffer, ...]:
    """Dhidden ``[R, H]`` and dweight; of an adapter du and the gradient of its B too, in float32.

    Args:
        launched: that of the forward.
        host: told what to launch.
        hidden: ``[R, H]``.
        weight: ``[V, H]``.
        saved: by the forward, flat.
        seeds: the cotangents that there are, of "logprobs", "entropy", "lse" and "candidate_logprobs" (``[R, K]``).
        kept: by the forward, the cache or the live tiles; none if there are none.
        dhidden_dtype: what dhidden is rounded to.
        adapter: ``[V, R]``, B of an adapter.
        owns_cache: whether its memory may be overwritten.
        total: a float32 sum that dweight is added to. None: dweight is in the weight's dtype.
        adds_total: False where the sum may hold anything, and is written; not with a threshold.
    """
    # The tiles of a backward do not begin anew at the parts of the vocabulary.
    launched = dataclasses.replace(launched, call=launched.call.replace(vocab_part_size=None))
    run, call, given = HostPass(launched, host), launched.compiled, dict(seeds)
    temperatures, floors = (saved if there else None for there in (launched.has_temperature, launched.call.has_floor))
    of_floors = floors, launched.kept.floor
    marked, _ = host.launch(prepare, call, run.ids(saved), temperatures, 1, run.of_labels, None, *of_floors)
    kernel_call = run.kernel_call(run.rows(hidden), weight, marked, adapter)
    seed, each, of_candidates, candidates = given.pop(PER_CANDIDATE, None), None, None, None
    of_kept = call, launched.has_temperature, saved
    if seed is not None:
        each, of_candidates = host.launch(cotangents, *of_kept, seed, run.of_rows)
    how = given, run.of_rows, launched.call.vocab_size, of_candidates
    factors = host.launch(coefficients, call, saved, launched.has_temperature, *how)
    if each is not None:
        of_tokens = each, kernel_call.prepared.targets, kernel_call.prepared.row_scale, factors, run.of_labels
        candidates = PlacedCandidates(*host.launch(place_values, *of_kept, *of_tokens))
    if launched.call.gradient_threshold:
        sums, dweight, *of_adapter = _threshold.walk(kernel_call, factors, candidates, kept[0], total)
    else:
        cache, shape = Cache(*kept) if kept else None, (1, launched.call.num_tokens, launched.call.hidden_size)
        may_round = _chunks.dhidden_shape(call, launched.shape) == shape and dhidden_dtype == launched.call.dtype.name
        how_sums = may_round, owns_cache, total, adds_total
        sums, dweight, *of_adapter = _backward.walk(kernel_call, factors, candidates, cache, *how_sums)
    if sums.dtype == jnp.float32:
        sums = host.launch(_tokens.total, call, sums, jnp.dtype(dhidden_dtype), host.numbers(launched.call.num_tokens))
    if of_adapter:
        of_adapter[0] = host.compute(_total, of_adapter[0], launched.call.num_tokens, launched.call.rank)
    return sums, dweight, *of_adapter


def _total(_: Any, sums: Any, tokens: int, columns: int) -> Any:
    return sums.sum(0)[:tokens, :columns]
