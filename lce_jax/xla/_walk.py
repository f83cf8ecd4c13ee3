"""The loops over tiles of logits that all functions of the implementation "xla" share, with their cache and plan.

`Walk.fold` computes statistics, and `Walk.gradients` the gradients. Both compute one tile of logits at a time. A tile
is a chunk of tokens times some columns of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics import _logprobs
from lce_jax.types import _jax
from lce_jax.types._types import OVERWRITES, Call, Plan, Primals, cache_notes, candidate_notes, unused_notes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


class Chunk(NamedTuple):
    """A chunk of tokens."""

    start: Any
    size: int
    new: Bool[Array, "t"]  # whether a token is in no earlier chunk

    def take[A](self, tree: A) -> A:
        """Returns the chunk's rows of [T, ...] arrays."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start, self.size), tree)

    def put[A](self, full: A, part: A) -> A:
        """Returns ``full`` with the chunk's rows replaced by ``part``."""
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, self.start, 0), full, part)


def loop_over_chunks[C](num_tokens: int, size: int, num_rows: Any, body: Callable[[Chunk, C], C], carry: C) -> C:
    """Runs ``carry = body(chunk, carry)`` over chunks of ``size`` tokens, up to ``num_rows`` tokens (None: all).

    All chunks have equal size, so the last one may overlap the one before. So one loop body serves all chunks, and XLA
    computes the products of all chunks in the same way.
    """
    rows = num_tokens if num_rows is None else num_rows

    def step(i: Array, carry: C) -> C:
        start = jnp.minimum(i * size, num_tokens - size)
        return body(Chunk(start, size, start + jnp.arange(size, dtype=jnp.int32) >= i * size), carry)

    return lax.fori_loop(0, (rows + size - 1) // size, step, carry)


def map_chunks[R](function: Callable[[Any], R], per_token: Any, size: int, num_rows: Any, like: Any) -> R:
    """Computes ``function(per_token)`` for [T, ...] arrays, in chunks of tokens. Rows that no chunk computes are 0.

    ``like`` are arrays that vary over the mesh axes over which the results vary.
    """
    return map_chunks_with_cache(lambda part, _, cache: (function(part), cache), per_token, size, num_rows, like, None)[
        0
    ]


def map_chunks_with_cache[R, K](
    function: Callable[[Any, Any, K], tuple[R, K]], per_token: Any, size: int, num_rows: Any, like: Any, cache: K
) -> tuple[R, K]:
    """Runs `map_chunks` with a cache. ``function(per_token, first, cache)`` returns its result and the updated cache.

    ``first`` is the chunk's first token.
    """
    num_tokens = jax.tree.leaves(per_token)[0].shape[0]
    if size >= num_tokens:
        return function(per_token, 0, cache)

    def run_chunk(chunk: Chunk, carry: tuple[R, K]) -> tuple[R, K]:
        results, cache = carry
        part, cache = function(chunk.take(per_token), chunk.start, cache)
        return chunk.put(results, part), cache

    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[:size], per_token), 0, cache)[0])
    empty = jax.tree.map(lambda x: jnp.zeros((num_tokens, *x.shape[1:]), x.dtype), shapes)
    return loop_over_chunks(num_tokens, size, num_rows, run_chunk, (_jax.vary_like(empty, (per_token, like)), cache))


def loop_over_columns[C](columns: int, tile_v: int, cached: int, body: Callable[[Any, int, bool, C], C], carry: C) -> C:
    """Runs ``carry = body(start, size, is_cached, carry)`` over the vocabulary: first a remainder, then full tiles.

    The remainder comes first, so that the loop over full tiles depends on it. Otherwise XLA could compute the remainder
    early and keep its tile in memory. The tiles of the first ``cached`` columns are cached.
    """
    num_tiles, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, cached > 0, carry)
    num_cached = max(cached - rest, 0) // tile_v
    for first, last, is_cached in ((0, num_cached, True), (num_cached, num_tiles, False)):
        if first < last:
            carry = lax.fori_loop(first, last, lambda i, c, x=is_cached: body(rest + i * tile_v, tile_v, x, c), carry)
    return carry


class HeadTokens(NamedTuple):
    """The per-token operands of one model, for some tokens."""

    hidden: Float[Array, "t H"]  # in the weight's dtype
    inverse_temperature: Float[Array, "t"] | None  # 1 / temperature, times a traced scale or cap; None: 1
    raw_scale: Float[Array, "t"] | None


class Head(NamedTuple):
    """The per-column operands of one model, for some columns of the vocabulary."""

    weight: Float[Array, "v H"]  # or [H, v]: see Call.weight_layout
    bias: Float[Array, "v"] | None  # in the statistics' dtype
    adapter: Float[Array, "v R"] | None = None  # in the weight's dtype


class Shard(NamedTuple):
    """The arrays of a shard. ``tokens`` and ``heads`` have an entry for each model. Unmasked rows come first."""

    tokens: tuple[HeadTokens, ...]
    heads: tuple[Head, ...]
    rows: Any  # further [T, ...] arrays, for the caller's functions
    num_rows: Int[Array, ""] | None  # how many rows are unmasked; None: all
    num_columns: Int[Array, ""] | None  # how many columns are not padding; None: all


class LogitTile(NamedTuple):
    """A tile of logits: some tokens and some columns, with their operands."""

    calls: tuple[Call, ...]
    tokens: tuple[HeadTokens, ...]
    rows: Any
    first: Any  # the tile's first token
    heads: tuple[Head, ...]
    start: Any  # the tile's first column
    unpadded: Bool[Array, "v"] | None  # whether a column is not padding; None: no column is padding
    index: Any  # the tile's index among the cached tiles; None: not cached

    def products(self) -> tuple[Float[Array, "t v"], ...]:
        """Computes the raw products of each model: h·Wᵀ, plus the bias or the adapter's u·Bᵀ."""
        products = []
        for call, tokens, head in zip(self.calls, self.tokens, self.heads, strict=True):
            hidden, u = call.split(tokens.hidden)
            raw = dot(hidden, head.weight, 1, call.hidden_dim, call, call.stat_dtype)
            if head.bias is not None:
                raw = raw + head.bias[None, :]
            if head.adapter is not None:
                raw = raw + dot(u, head.adapter, 1, 1, call, call.stat_dtype)
            products.append(raw)
        return tuple(products)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A loop over tiles of logits. The fields are its static sizes."""

    calls: tuple[Call, ...]  # one for each model; only the first has gradients
    columns: int  # the number of columns that the loop covers
    tile_t: int  # the tokens of a chunk
    tile_v: int  # the columns of a tile
    cached_columns: int = 0  # how many columns are cached: those of the first tiles

    def fold[C](self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, LogitTile], C]) -> C:
        """Runs ``carry = add(carry, tile)`` over all tiles. Each chunk of t tokens starts with ``empty(t)``.

        Arrays in the carry are [t, ...], and arrays in the result are [T, ...].
        """
        return self.fold_with_cache(shard, empty, lambda carry, tile, cache: (add(carry, tile), cache), None)[0]

    def fold_with_cache[C, K](
        self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, LogitTile, K], tuple[C, K]], cache: K
    ) -> tuple[C, K]:
        """Runs `fold` with a cache. ``add(carry, tile, cache)`` returns the carry and the updated cache."""
        cache = _jax.vary_like(cache, shard)

        def fold_chunk(per_token: Any, first: Any, cache: K) -> tuple[C, K]:
            tokens, rows = per_token

            def fold_tile(start: Any, size: int, is_cached: bool, carry: tuple[C, K]) -> tuple[C, K]:
                logits = self._tile(shard, start, size, is_cached)._replace(tokens=tokens, rows=rows, first=first)
                return add(carry[0], logits, carry[1])

            carry = _jax.vary_like(empty(tokens[0].hidden.shape[0]), shard)
            return loop_over_columns(self.columns, self.tile_v, self.cached_columns, fold_tile, (carry, cache))

        return map_chunks_with_cache(fold_chunk, (shard.tokens, shard.rows), self.tile_t, shard.num_rows, shard, cache)

    def gradients(
        self,
        shard: Shard,
        dlogits: Callable[[LogitTile], Float[Array, "t v"]],
        dweight: Float[Array, "V H"] | None = None,
    ) -> Primals:
        """Computes the gradients of the first model (eq. 5).

        ``dlogits(tile)`` returns the gradient with respect to the tile's raw products.

        dweight is rounded, or added to the sum ``dweight``. The other gradients are in the statistics' dtype. A
        gradient that `Call.gradients` does not request is None.
        """
        # Because of the barrier, the backward starts after the forward. Otherwise XLA would keep tiles that both passes
        # compute, and allocate the gradients early, although the forward's tiles could use that memory.
        shard, zero = lax.optimization_barrier((shard, jnp.float32(0)))
        (call, *_), head, vocab_dim = self.calls, shard.heads[0], self.calls[0].vocab_dim
        dtype = call.dtype if dweight is None else dweight.dtype

        def tile(start: Any, size: int, is_cached: bool, carry: Primals) -> Primals:
            part = self._column_gradients(
                shard, self._tile(shard, start, size, is_cached), dlogits, carry.hidden, dtype
            )

            def put(full: Array, columns: Array, dim: int, adds: bool = False) -> Array:
                columns = columns.astype(full.dtype)
                columns += lax.dynamic_slice_in_dim(full, start, size, dim) if adds else 0
                return lax.dynamic_update_slice_in_dim(full, columns, start, dim)

            put_weight = functools.partial(put, dim=vocab_dim, adds=dweight is not None)
            return Primals(
                part.hidden,
                jax.tree.map(put_weight, carry.weight, part.weight),
                *jax.tree.map(functools.partial(put, dim=0), carry[2:], part[2:]),
            )

        init = Primals(
            jnp.full(shard.tokens[0].hidden.shape, zero.astype(call.stat_dtype)),
            jnp.full(head.weight.shape, zero.astype(call.dtype)) if dweight is None else dweight,
            *jax.tree.map(lambda x: jnp.zeros(x.shape, call.stat_dtype), head[1:]),
        ).select(call.gradients)
        return loop_over_columns(self.columns, self.tile_v, self.cached_columns, tile, _jax.vary_like(init, shard))

    def _column_gradients(
        self, shard: Shard, tile: LogitTile, dlogits: Callable[..., Array], dhidden: Float[Array, "T H"], dtype: Any
    ) -> Primals:
        """Adds the contribution of a tile's columns to ``dhidden``, and computes the other gradients of these columns.

        With a single chunk, the product itself rounds dweight to ``dtype``. With several chunks, dweight is summed
        first.
        """
        call = self.calls[0]
        if self.tile_t == call.num_tokens:
            part = gradient_products(call, dlogits(tile), tile, call.stat_dtype, dtype)
            return part._replace(hidden=jax.tree.map(jnp.add, dhidden, part.hidden))

        def add_chunk(chunk: Chunk, carry: Primals) -> Primals:
            tokens, rows = chunk.take((shard.tokens, shard.rows))
            chunk_tile = tile._replace(tokens=tokens, rows=rows, first=chunk.start)
            d = dlogits(chunk_tile)
            d = jnp.where(chunk.new[:, None], d, 0.0)  # chunks may overlap, but each token counts once
            part = gradient_products(call, d, chunk_tile, call.stat_dtype, call.stat_dtype)
            dhidden = jax.tree.map(lambda full, x: chunk.put(full, x + chunk.take(full)), carry.hidden, part.hidden)
            return Primals(dhidden, *jax.tree.map(jnp.add, carry[1:], part[1:]))

        columns = jax.tree.map(lambda x: jnp.zeros(x.shape, call.stat_dtype), tile.heads[0])
        init = Primals(dhidden, *_jax.vary_like(columns, shard)).select(call.gradients)
        return loop_over_chunks(call.num_tokens, self.tile_t, shard.num_rows, add_chunk, init)

    def _tile(self, shard: Shard, start: Any, size: int, is_cached: bool) -> LogitTile:
        """Returns the tile of all tokens and the ``size`` columns from ``start`` on."""
        unpadded = _logprobs.unpadded_columns(start, size, shard.num_columns)
        index = (start + (self.tile_v - 1)) // self.tile_v if is_cached else None
        heads = []
        for call, head in zip(self.calls, shard.heads, strict=True):
            weight = lax.dynamic_slice_in_dim(head.weight, start, size, axis=call.vocab_dim)
            others = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), head[1:])
            heads.append(Head(weight, *others))
        return LogitTile(self.calls, shard.tokens, shard.rows, 0, tuple(heads), start, unpadded, index)


def gradient_dtype(call: Call) -> jnp.dtype:
    """Returns the dtype of dlogits and of the cache: on a CPU the statistics' dtype, elsewhere the weight's dtype."""
    return call.stat_dtype if call.device.platform == "cpu" else call.dtype


def gradient_products(
    call: Call, d: Float[Array, "t v"], tile: LogitTile, dhidden_dtype: Any, dweight_dtype: Any
) -> Primals:
    """Computes eq. 5 for a tile. ``d`` is the gradient with respect to the tile's raw products.

    The gradients of a bias and of an adapter are in the statistics' dtype.
    """
    head, dhidden, dweight, dbias, dadapter = tile.heads[0], None, None, None, None
    if head.bias is not None and call.gradients.bias:
        dbias = jnp.sum(d, axis=0, dtype=call.stat_dtype)
    head = head._replace(weight=_logprobs.zero_padding(head.weight, tile.unpadded, call))
    if head.adapter is not None and tile.unpadded is not None:
        head = head._replace(adapter=jnp.where(tile.unpadded[:, None], head.adapter, jnp.zeros((), call.dtype)))
    operands = d, head, tile.tokens[0].hidden
    d, head, hidden = jax.tree.map(lambda x: x.astype(gradient_dtype(call)), operands)
    hidden, u = call.split(hidden)
    if call.gradients.hidden:
        dhidden = dot(d, head.weight, 1, call.vocab_dim, call, dhidden_dtype)
        if head.adapter is not None:
            dhidden = jnp.concatenate([dhidden, dot(d, head.adapter, 1, 0, call, dhidden_dtype)], axis=1)
    if head.adapter is not None and call.gradients.adapter:
        dadapter = dot(d, u, 0, 0, call, call.stat_dtype)
    if call.gradients.weight:
        left, right = (d, hidden) if call.vocab_dim == 0 else (hidden, d)
        dweight = dot(left, right, 0, 0, call, dweight_dtype)
    return Primals(dhidden, dweight, dbias, dadapter)


def dot(left: Array, right: Array, left_dim: int, right_dim: int, call: Call, dtype: Any) -> Array:
    """Computes the matrix product that contracts ``left_dim`` with ``right_dim``, summed and returned in ``dtype``."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=call.precision, preferred_element_type=dtype)


class TileCache(NamedTuple):
    """The values that the forward caches for the first tiles."""

    columns: tuple[Float[Array, "T columns"], ...]  # the first is in `gradient_dtype`
    rows: tuple[Float[Array, "tiles T"], ...]  # the references of each tile, to which the tile's columns are relative

    def read(self, tile: LogitTile) -> tuple[list[Float[Array, "t v"]], list[Float[Array, "t"]]]:
        """Returns the columns and the references of a tile."""
        t, v = tile.tokens[0].hidden.shape[0], tile.heads[0].weight.shape[tile.calls[0].vocab_dim]
        columns = [lax.dynamic_slice(x, _index(tile.first, tile.start), (t, v)) for x in self.columns]
        return columns, [lax.dynamic_slice(x, _index(tile.index, tile.first), (1, t))[0] for x in self.rows]

    def write(self, tile: LogitTile, columns: Sequence[Array], rows: Sequence[Array]) -> TileCache:
        """Returns the cache with the columns and the references of a tile replaced."""
        row_start, column_start = _index(tile.index, tile.first), _index(tile.first, tile.start)
        row_pairs = zip(self.rows, rows, strict=True)
        return TileCache(
            tuple(
                lax.dynamic_update_slice(x, part, column_start) for x, part in zip(self.columns, columns, strict=True)
            ),
            tuple(lax.dynamic_update_slice(x, part[None], row_start) for x, part in row_pairs),
        )

    def write_dlogits(self, tile: LogitTile, d: Float[Array, "t v"]) -> TileCache:
        """Returns the cache with a tile's dlogits in place of the tile's first array of columns."""
        first, *others = self.columns
        return self._replace(columns=(lax.dynamic_update_slice(first, d, _index(tile.first, tile.start)), *others))

    @property
    def num_columns(self) -> int:
        """The number of cached columns."""
        return self.columns[0].shape[1]


class CacheDtypes(NamedTuple):
    """The dtypes of the arrays in a `TileCache`."""

    columns: tuple[jnp.dtype, ...]  # for arrays with a value per token and column
    rows: tuple[jnp.dtype, ...]  # for arrays with a value per token and tile

    @classmethod
    def make(cls, call: Call) -> CacheDtypes:
        """Returns the dtypes of what one head caches: exponentials, and the largest x of each tile."""
        return cls((gradient_dtype(call),), (call.stat_dtype,))


def _index(*index: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in index)


def count_cached_columns(call: Call, columns: int, tile_v: int, dtypes: CacheDtypes | None = None) -> int:
    """Returns how many columns are cached: the columns of the first tiles, as many as fit in ``cache_bytes``."""
    num_tiles, rest = divmod(columns, tile_v)
    budget = call.cache_budget - (cached_tile_bytes(call, rest, dtypes) if rest else 0)
    if not call.cache_budget or budget < 0 or not _logprobs.can_cache_exponentials(call):
        return 0
    return rest + min(num_tiles, budget // max(cached_tile_bytes(call, tile_v, dtypes), 1)) * tile_v


def cached_bytes(call: Call, columns: int, tile_v: int, dtypes: CacheDtypes | None = None) -> int:
    """Returns the bytes of a cache that holds ``columns`` columns."""
    num_tiles, rest = divmod(columns, tile_v)
    remainder = cached_tile_bytes(call, rest, dtypes) if rest else 0
    return num_tiles * cached_tile_bytes(call, tile_v, dtypes) + remainder


def cached_tile_bytes(call: Call, columns: int, dtypes: CacheDtypes | None = None) -> int:
    """Returns the bytes that the cache needs for one tile of ``columns`` columns."""
    dtypes = dtypes or CacheDtypes.make(call)
    column_bytes, row_bytes = (sum(dtype.itemsize for dtype in each) for each in dtypes)
    return call.num_tokens * (column_bytes * columns + row_bytes)


def can_overwrite_cache(call: Call, cached: int, tile_t: int, has_padding: bool, adds_dweight: bool) -> bool:
    """Whether all dlogits can overwrite the cached exponentials, so that each gradient is a single product.

    They cannot if the single product would copy the full weight, to exclude padding or to cast it to float32 on a CPU.
    On a CPU, they also cannot if dweight is added to a sum; a GPU adds inside the product. If chunks of tokens overlap,
    they cannot, because the second chunk would read dlogits in place of exponentials.
    """
    widens, on_cpu = gradient_dtype(call) != call.dtype, call.device.platform == "cpu"
    every_column = cached == call.columns and not has_padding
    every_row = not call.partial_rows and call.num_tokens % tile_t == 0
    return every_column and every_row and not widens and not (on_cpu and adds_dweight)


def empty_cache(walk: Walk, shard: Shard, dtypes: CacheDtypes | None = None) -> TileCache | None:
    """Returns a cache for the forward to fill; None if nothing is cached."""
    width = walk.cached_columns
    if not width:
        return None
    dtypes, num_tokens = dtypes or CacheDtypes.make(walk.calls[0]), walk.calls[0].num_tokens
    tiles = -(-width // walk.tile_v)
    memory = jnp.zeros if _jax.has_explicit_axes(shard.tokens[0].hidden) else lax.empty  # lax.empty has no mesh
    return TileCache(
        tuple(memory((num_tokens, width), dtype) for dtype in dtypes.columns),
        tuple(memory((tiles, num_tokens), dtype) for dtype in dtypes.rows),
    )


def overwrite_cache(
    walk: Walk,
    shard: Shard,
    cache: TileCache,
    dlogits: Callable[[LogitTile, TileCache], Float[Array, "t v"]],
    dhidden_dtype: Any,
    dweight: Float[Array, "V H"] | None,
) -> Primals:
    """Computes `Walk.gradients`. All dlogits overwrite the cache, and then each gradient is a single product."""
    _, ((d, *_), _) = walk.fold_with_cache(
        shard,
        lambda _: None,
        lambda _, tile, cache: (None, cache.write_dlogits(tile, dlogits(tile, cache).astype(walk.calls[0].dtype))),
        cache,
    )
    all_columns = LogitTile(walk.calls, shard.tokens, shard.rows, 0, shard.heads, 0, None, None)
    dweight_dtype = walk.calls[0].dtype if dweight is None else dweight.dtype
    gradients = gradient_products(walk.calls[0], d, all_columns, dhidden_dtype, dweight_dtype)
    if dweight is None:
        return gradients
    return gradients._replace(weight=jax.tree.map(lambda x: dweight + x, gradients.weight))


def choose_tile_sizes(call: Call) -> tuple[int, int]:
    """Returns how many tokens and how many vocabulary columns a tile has.

    On a CPU, a tile has at most 4 Mi logits (16 MiB of float32) and 2048 columns. Wider tiles do not fit in the CPU's
    caches (50 ms instead of 28 ms forward at T 512, H 256, V 32000 on two cores), and narrower tiles make the products
    too small. XLA also copies a tile's columns of the weight. With few tokens, this copy is larger than the tile; so it
    is limited to half as many elements as the call has logits, or 128 Ki if that is more. On other devices, a tile has
    up to 64 Mi logits, which makes the products large. A tile has at most an eighth of the vocabulary, so that a small
    call never stores all its logits. If rows may be masked, a tile has a sixteenth of the tokens; on a GPU a quarter,
    because each chunk of tokens copies the weight there.
    """
    on_cpu = call.device.platform == "cpu"
    widest_t, widest_v, budget = (4096, 2048, 4 << 20) if on_cpu else (16384, 1 << 20, 64 << 20)
    tile_t = min(max(call.num_tokens, 1), widest_t)  # at least 1, because `explain` accepts a call without tokens
    if call.partial_rows:
        least, parts = (256, 16) if on_cpu else (1024, 4)
        tile_t = min(tile_t, max(least, -(-call.num_tokens // parts)))
    tile_v = max(min(budget // tile_t, widest_v, call.columns // 8) // 128 * 128, 512)
    if on_cpu:
        logits = max(call.num_tokens, 1) * call.columns
        tile_v = min(tile_v, max(max(logits // 2, 1 << 17) // call.hidden_size // 128 * 128, 128))
    return tile_t, min(call.columns, tile_v)


def plan(call: Call, name: str) -> Plan:
    """Returns the plan of a call: its tiles and its memory."""
    tile_t, tile_v = choose_tile_sizes(call)
    columns = min(call.vocab_size, call.columns)
    cached = count_cached_columns(call, columns, tile_v)
    in_place = can_overwrite_cache(call, cached, tile_t, call.vocab_size != call.columns, adds_dweight=False)
    width = min(tile_v, columns)
    shared = copied_bytes(call) + tile_bytes(call, tile_t, width) + call.candidate_bytes
    gradient_bytes = 0 if in_place else gradient_product_bytes(call, tile_t, width)
    return Plan(
        implementation=name,
        refused={},
        call=call,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=shared + product_bytes(call, tile_t, width),
        backward_bytes=shared + gradient_bytes + (0 if in_place and call.shards == 1 else sum_bytes(call)),
        kept_bytes=call.statistics_bytes + cached_bytes(call, cached, tile_v),
        logits_bytes=call.num_tokens * call.columns * call.stat_dtype.itemsize,
        notes=(
            *_cache_notes(call, cached, columns, tile_v),
            *([OVERWRITES] if in_place else []),
            *unused_notes(call),
            *candidate_notes(call),
        ),
        full_cache_bytes=cached_bytes(call, columns, tile_v) if _logprobs.can_cache_exponentials(call) else 0,
    )


def _cache_notes(call: Call, cached: int, columns: int, tile_v: int) -> tuple[str, ...]:
    """Returns the plan's note on how much of ``cache_bytes`` is used."""
    if not call.cache_budget:
        return ()
    if not _logprobs.can_cache_exponentials(call):
        return ("no tile is cached: label smoothing needs the capped logits, which exponentials do not determine",)
    tiles = -(-cached // tile_v), -(-columns // tile_v)
    return cache_notes(call, *tiles, cached_tile_bytes(call, min(tile_v, columns)))


def tile_bytes(call: Call, tile_t: int, width: int) -> int:
    """Returns the bytes of a tile of logits."""
    return min(tile_t, call.num_tokens) * width * call.stat_dtype.itemsize


def product_bytes(call: Call, tile_t: int, width: int) -> int:
    """Returns the bytes of XLA's copies on a CPU: a tile's columns of the weight, and a chunk's hidden states."""
    if call.device.platform != "cpu":
        return 0
    rows = width + (tile_t if tile_t < call.num_tokens else 0)
    return rows * (call.hidden_size + call.rank) * call.dtype.itemsize


def gradient_product_bytes(call: Call, tile_t: int, width: int) -> int:
    """Returns the bytes of the gradient products on a CPU: operands in the statistics' dtype, and a tile's dweight.

    With several chunks of tokens, the sum of dweight and the sum's next term exist at the same time.
    """
    if call.device.platform != "cpu":
        return 0
    operands = (width + min(tile_t, call.num_tokens)) * (call.hidden_size + call.rank) * call.stat_dtype.itemsize
    size = width * (call.hidden_size * call.gradients.weight + call.rank * call.gradients.adapter)
    if tile_t < call.num_tokens:
        return operands + 2 * size * call.stat_dtype.itemsize
    return operands + (0 if call.dtype == call.stat_dtype else size * call.dtype.itemsize)


def copied_bytes(call: Call) -> int:
    """Returns the bytes of hidden's copies: one if it is gathered, cast, negated or reordered; one for an adapter."""
    is_copied = call.partial_rows or call.gather_dim is not None or call.hidden_dtype != call.dtype or call.signs_hidden
    adapter = call.hidden_dtype.itemsize if call.rank else 0  # a further copy, of hidden and u
    return call.num_tokens * (call.hidden_size + call.rank) * ((call.dtype.itemsize if is_copied else 0) + adapter)


def sum_bytes(call: Call) -> int:
    """Returns the bytes of dhidden in the statistics' dtype, if it must still be rounded, scattered or reordered."""
    is_copied = call.partial_rows or call.gather_dim is not None or call.rank  # with an adapter, du is split off
    is_result = call.hidden_dtype == call.stat_dtype and not is_copied
    return 0 if is_result else call.num_tokens * (call.hidden_size + call.rank) * call.stat_dtype.itemsize
