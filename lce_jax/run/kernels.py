"""The forward and backward of a call as kernel launches, for a caller with its own memory and stream, such as torch.

    forward    prepare ─ statistics ─ join ─ (exchange between shards) ─ join ─ finish ─ select
    backward   prepare ─ coefficients ─ (dlogits ─ dhidden ─ dweight) …

That caller is the host (`lce_jax.mosaic._host.Host`). `forward` and `backward` tell the host which kernels to launch on
which of its arrays. The host may launch at once, or record the launches and repeat them in each call. It makes the
kernels with `traced` and `compiled`, without a JAX client on the GPU.

The forward saves one flat array, in which each field has ``stride`` values: the label (int32), the temperature and the
floor (if there are any), the candidates' ids (int32), the merged statistics, and the candidates' x.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.call import _lowered
from lce_jax.call._dispatch import trace_for_device
from lce_jax.call._first_call import check_once, measure_errors
from lce_jax.mathematics._statistics import sum_in_order
from lce_jax.mosaic import _backward, _candidates, _chunks, _compiler, _forward, _generations, _operands, _threshold
from lce_jax.mosaic._call import Generation, KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._chunks import Cache
from lce_jax.mosaic._compiler import Bind, Kernel, traced, why_not
from lce_jax.mosaic._generations import device_refusal, unchecked
from lce_jax.mosaic._host import Host
from lce_jax.mosaic._operands import Geometry, Prepared, SavedLayout, lay_out_saved, make_geometry
from lce_jax.mosaic.common import _tiles, _tokens
from lce_jax.mosaic.common._candidates import cotangents, keep, place_values, products, put
from lce_jax.mosaic.common._threshold import select
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
    "active_tiles_shape",
    "backward",
    "check_once",
    "compiled",
    "device_refusal",
    "forward",
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

THREADS = 128  # the smallest number of rows of a per-token array

PER_CANDIDATE = "candidate_logprobs"  # the name of the result [R, K], and of its cotangent

type Buffer = Any  # an array of the host: it has a shape, a dtype and `view(shape, dtype)`


def compiled(kernels: Sequence[Kernel], device: Device, number: int) -> list[Bind]:
    """Compiles kernels for the current CUDA device; those that an earlier process has lowered are not lowered again."""
    lower = functools.partial(_lowered.recall_or_lower, _lowered.find_lowered_kernels())
    return _compiler.compiled(kernels, device, number, lower)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchedCall:
    """A call whose kernels a host launches. H is a multiple of 64 and at least 128; V is a multiple of `Geometry.atom`.

    Attributes:
        call: describes the caller's arrays.
        rows: R, the number of rows of the kernels' arrays: a multiple of 128, and at least the number of tokens.
        start: the global id of the weight's first row.
        has_temperature: whether each token has a temperature.
        megatron: whether the logprob of an out-of-vocabulary label is -ln Σ e^u instead of 0.
    """

    call: Call
    rows: int
    start: int
    has_temperature: bool = False
    megatron: bool = False

    @functools.cached_property
    def compiled(self) -> Call:
        """The call for which kernels are compiled. Calls with the same number of ``rows`` share kernels."""
        return self.call.replace(num_tokens=self.rows, vocab_size=0, caller_dtype=None, requested=None)

    @property
    def generation(self) -> Generation:
        """The GPU generation of the device; the first generation if no kernels serve the device (see `refusal`)."""
        return _generations.serving(self.call.device) or _generations.GENERATIONS[0]

    @functools.cached_property
    def shape(self) -> Geometry:
        """The sizes and counts of tiles."""
        return make_geometry(self.compiled, self.generation.tiling)

    @property
    def stride(self) -> int:
        """The number of rows of the caller's arrays."""
        return max(self.call.num_tokens, THREADS)

    @property
    def copies_hidden(self) -> bool:
        """Whether hidden is copied first, because kernels read complete tiles of rows, in the weight's dtype."""
        tiling, tokens = self.generation.tiling, self.call.num_tokens
        has_rows = tokens % (tiling.row_block * tiling.most_clustered) == 0 or tokens == self.rows
        return not has_rows or self.call.hidden_dtype != self.call.dtype

    @property
    def unpadded_columns(self) -> int | None:
        """How many columns of the weight are not padding; None if no column is padding."""
        columns = min(max(self.call.vocab_size - self.start, 0), self.call.columns)
        return None if columns == self.call.columns else columns

    @property
    def true_columns(self) -> int:
        """How many columns of the weight are not padding."""
        return self.call.columns if self.unpadded_columns is None else self.unpadded_columns

    @property
    def saved_layout(self) -> SavedLayout:
        """The positions of the per-token fields in the saved array."""
        return lay_out_saved(self.compiled, self.has_temperature)


def refusal(launched: LaunchedCall) -> str | None:
    """Returns why no kernels serve the call; None if kernels serve it."""
    reason = _generations.refusal(launched.compiled)
    if reason is not None:
        return reason
    if not launched.shape.whole_atoms:
        return f"V must be a multiple of {launched.shape.atom}, got {launched.call.columns}"
    if launched.call.hidden_size < THREADS:
        return f"H must be at least {THREADS}, got {launched.call.hidden_size}"
    return None


def refusal_to_scale(size: int, device: Device) -> str | None:
    """Returns why `scale` cannot multiply an array of ``size`` elements on a device; None if it can."""
    reason = device_refusal(device)
    if reason is not None:
        return reason
    if size % _tiles.SCALED or size >= 1 << 31:
        return f"the size must be a multiple of {_tiles.SCALED} and less than 2^31, got {size}"
    return None


def active_tiles_shape(launched: LaunchedCall) -> tuple[int, int]:
    """Returns the shape of the int32 mask of active tiles, which a forward with a ``gradient_threshold`` saves."""
    return _tiles.active_tiles_shape(launched.compiled)


class Tokens(NamedTuple):
    """The per-token operands."""

    labels: Buffer  # [R, 2]: int64 ids as two int32 halves
    temperature: Buffer | None = None  # [R]
    floor: Buffer | None = None  # [R], in logits
    candidates: Buffer | None = None  # [R, K] int32; ids outside the vocabulary are ignored


class Forward(NamedTuple):
    """The results of a forward, and what the backward needs."""

    results: dict[str, Buffer]  # by field name of `LogprobOutput`: [R], or [R, K] for candidates
    saved: Buffer  # flat
    cached: list[Buffer]  # the arrays of the cache, or the mask of active tiles


# (statistics [groups, fields, Tp] of the shard's groups of tiles, candidates' x [R, K], saved array) -> the statistics
# and the x of all shards. The last field of the first group is free for tags.
type Exchange = Callable[[Buffer, Buffer | None, Buffer], tuple[Buffer, Buffer | None]]


class HostPass(NamedTuple):
    """Launches one pass on a host."""

    launched: LaunchedCall
    host: Host

    @property
    def row_numbers(self) -> Buffer:
        """A kernel argument: the number of tokens, and the stride of fields."""
        return self.host.numbers(self.launched.call.num_tokens, self.launched.stride)

    @property
    def label_numbers(self) -> Buffer:
        """A kernel argument: `row_numbers`, the first column, the vocabulary size, the count of unpadded columns."""
        launched, call = self.launched, self.launched.call
        counts = call.num_tokens, launched.stride, launched.start, call.vocab_size, launched.true_columns
        return self.host.numbers(*counts)

    def rows(self, hidden: Buffer) -> Buffer:
        """Returns hidden as kernels read it: with complete tiles of rows, in the weight's dtype."""
        if not self.launched.copies_hidden:
            return hidden
        call = self.launched.call
        copied = self.launched.compiled.replace(hidden_size=call.hidden_size + call.rank)
        return self.host.launch(_tokens.copy_rows, copied, hidden, self.host.numbers(call.num_tokens))

    def ids(self, saved: Buffer) -> Buffer:
        """Returns the labels that the saved array holds."""
        return saved.view((self.launched.rows,), jnp.int32)

    def kernel_call(self, hidden: Buffer, weight: Buffer, marked: Any, adapter: Buffer | None) -> KernelCall:
        """Returns the `KernelCall`, from which `lce_jax.mosaic` launches kernels."""
        launched, shape = self.launched, self.launched.shape
        columns: Any = launched.true_columns
        firsts = _operands.find_first_padding(columns, shape)
        mask = self.host.numbers(*(int(i >= first) for first in firsts for i in range(2 * shape.tile)))
        rows: Any = launched.call.num_tokens
        per_token = marked.targets, marked.row_scale, marked.holds_target
        prepared = Prepared(hidden, weight, *per_token, mask, columns, rows, marked.floor)
        operands = Operands(hidden, weight, marked.targets, None, rows, launched.unpadded_columns, adapter=adapter)
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
    """Launches the forward of all columns, or of a vocabulary shard if ``exchange`` gathers the shards' statistics.

    ``adapter``: ``[V, R]``, the B of an adapter.
    """
    run, call = HostPass(launched, host), launched.compiled
    saved = host.empty((launched.saved_layout.size * launched.rows,), jnp.float32)
    temperature, floor, ids = tokens.temperature, tokens.floor, tokens.candidates
    marked, _ = host.launch(prepare, call, tokens.labels, temperature, 0, run.label_numbers, run.ids(saved), floor)
    kernel_call = run.kernel_call(run.rows(hidden), weight, marked, adapter)
    cached = count_cached_tiles(launched, keep_cache)
    cache = _chunks.empty_cache(host, call, launched.shape, cached) if cached else None
    keeps_maxima = keep_cache and launched.call.gradient_threshold > 0.0
    num_tiles = _forward.count_visited_tiles(kernel_call)
    groups, cache, maxima = _forward.join_tiles(
        kernel_call, num_tiles, cache, saved_fields=int(keeps_maxima), more_fields=int(exchange is not None)
    )
    columns = (
        None if ids is None else host.compute(_candidates.find_columns, ids, launched.start, launched.true_columns)
    )
    x = None if columns is None else _candidates.unscaled(kernel_call, columns)
    tags = None
    if exchange is not None:
        groups, x = exchange(groups, x, saved)
        tags = groups.view(groups.shape, jnp.int32)
    scales = (kernel_call.prepared.row_scale,)
    joined = _forward.join_groups(host, call, scales, launched.call.num_tokens, groups)
    vocab_size, megatron = launched.call.vocab_size, launched.megatron
    results, saved = host.launch(
        finish, call, joined, run.ids(saved), temperature, run.row_numbers, saved, vocab_size, megatron, tags, floor
    )
    named = dict(zip(_operands.list_results(call), results, strict=True))
    if ids is not None and x is not None:
        named[PER_CANDIDATE], saved = host.launch(keep, call, launched.has_temperature, ids, x, saved, run.row_numbers)
    cached_arrays: list[Buffer] = jax.tree.leaves(cache)
    if maxima is not None:
        numbers = host.numbers(launched.call.num_tokens, launched.stride, _threshold.find_padded_tile(kernel_call))
        operands = (
            maxima,
            kernel_call.prepared.targets,
            kernel_call.prepared.row_scale,
            saved,
            launched.saved_layout.statistics,
            numbers,
        )
        cached_arrays = [host.launch(select, call, *operands, _threshold.mark_candidate_tiles(kernel_call, columns))[0]]
    return Forward(named, saved, cached_arrays)


def count_cached_tiles(launched: LaunchedCall, keep_cache: bool) -> int:
    """Returns the number of vocabulary tiles whose exponentials a forward caches."""
    if not keep_cache:
        return 0
    tiles = -(-max(launched.true_columns, 1) // launched.shape.tile)
    return min(_chunks.count_cached_tiles(launched.compiled, launched.shape), tiles)


def backward(
    launched: LaunchedCall,
    host: Host,
    hidden: Buffer,
    weight: Buffer,
    saved: Buffer,
    seeds: dict[str, Buffer],
    cached: list[Buffer],
    dhidden_dtype: str,
    adapter: Buffer | None = None,
    *,
    owns_cache: bool,
    total: Buffer | None = None,
    adds_total: bool = True,
) -> tuple[Buffer, ...]:
    """Launches the backward. Returns dhidden ``[R, H]``, dweight, and for an adapter du and dB in float32.

    Args:
        launched: the same as in the forward.
        host: launches the kernels.
        hidden: ``[R, H]``.
        weight: ``[V, H]``.
        saved: the flat array that the forward saved.
        seeds: the cotangents of "logprobs", "entropy", "lse" and "candidate_logprobs" (``[R, K]``), by name; a result
            without a cotangent is absent.
        cached: `Forward.cached`; empty if the forward cached nothing.
        dhidden_dtype: the dtype of dhidden.
        adapter: ``[V, R]``, the B of an adapter.
        owns_cache: whether the cache's memory may be overwritten.
        total: a float32 sum to which dweight is added. None: dweight is in the weight's dtype.
        adds_total: whether dweight is added to ``total``. False: ``total`` is uninitialized, and dweight overwrites it;
            not with a ``gradient_threshold``.
    """
    # In the backward, a tile may cross the end of a vocabulary part.
    launched = dataclasses.replace(launched, call=launched.call.replace(vocab_part_size=None))
    run, call, seeds = HostPass(launched, host), launched.compiled, dict(seeds)
    temperatures = saved if launched.has_temperature else None
    floors = saved if launched.call.has_floor else None
    marked, _ = host.launch(
        prepare, call, run.ids(saved), temperatures, 1, run.label_numbers, None, floors, launched.saved_layout.floor
    )
    kernel_call = run.kernel_call(run.rows(hidden), weight, marked, adapter)
    seed, each, seed_sums, candidates = seeds.pop(PER_CANDIDATE, None), None, None, None
    saved_operands = call, launched.has_temperature, saved
    if seed is not None:
        each, seed_sums = host.launch(cotangents, *saved_operands, seed, run.row_numbers)
    vocab_size = launched.call.vocab_size
    factors = host.launch(
        coefficients, call, saved, launched.has_temperature, seeds, run.row_numbers, vocab_size, seed_sums
    )
    if each is not None:
        per_token = each, kernel_call.prepared.targets, kernel_call.prepared.row_scale, factors, run.label_numbers
        candidates = PlacedCandidates(*host.launch(place_values, *saved_operands, *per_token))
    if launched.call.gradient_threshold:
        sums, dweight, *adapter_gradients = _threshold.walk(kernel_call, factors, candidates, cached[0], total)
    else:
        cache, shape = Cache(*cached) if cached else None, (1, launched.call.num_tokens, launched.call.hidden_size)
        may_round = _chunks.dhidden_shape(call, launched.shape) == shape and dhidden_dtype == launched.call.dtype.name
        sums, dweight, *adapter_gradients = _backward.walk(
            kernel_call, factors, candidates, cache, may_round, owns_cache, total, adds_total
        )
    if sums.dtype == jnp.float32:
        sums = host.launch(_tokens.total, call, sums, jnp.dtype(dhidden_dtype), host.numbers(launched.call.num_tokens))
    if adapter_gradients:
        adapter_gradients[0] = host.compute(
            _sum_splits, adapter_gradients[0], launched.call.num_tokens, launched.call.rank
        )
    return sums, dweight, *adapter_gradients


def _sum_splits(_: Any, sums: Any, tokens: int, columns: int) -> Any:
    return sum_in_order(sums)[:tokens, :columns]
