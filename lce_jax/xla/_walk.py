"""The walk over tiles of a vocabulary that every function of "xla" takes: its loops, its cache, its plan."""

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
    """Some of the tokens."""

    start: Any
    size: int
    new: Bool[Array, "t"]  # which of them no earlier chunk had

    def take[A](self, tree: A) -> A:
        """Their part of [T, ...] arrays."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start, self.size), tree)

    def put[A](self, whole: A, part: A) -> A:
        """``whole`` with their part written."""
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, self.start, 0), whole, part)


def over_chunks[C](num_tokens: int, size: int, num_rows: Any, body: Callable[[Chunk, C], C], carry: C) -> C:
    """``carry = body(chunk, carry)`` over chunks of ``size`` tokens, as far as ``num_rows`` reaches; None: over all.

    The last chunk reaches back into the one before, to stay whole: one body serves all, and none has so few tokens that
    XLA would compute its products otherwise.
    """
    rows = num_tokens if num_rows is None else num_rows

    def step(i: Array, carry: C) -> C:
        start = jnp.minimum(i * size, num_tokens - size)
        return body(Chunk(start, size, start + jnp.arange(size, dtype=jnp.int32) >= i * size), carry)

    return lax.fori_loop(0, (rows + size - 1) // size, step, carry)


def by_chunks[R](function: Callable[[Any], R], per_token: Any, size: int, num_rows: Any, like: Any) -> R:
    """``function(per_token)`` of [T, ...] arrays, computed by `over_chunks`; 0 where no chunk has been.

    ``like`` varies over the axes that the results do.
    """
    return keeping_by_chunks(lambda own, _, kept: (function(own), kept), per_token, size, num_rows, like, None)[0]


def keeping_by_chunks[R, K](
    function: Callable[[Any, Any, K], tuple[R, K]], per_token: Any, size: int, num_rows: Any, like: Any, kept: K
) -> tuple[R, K]:
    """`by_chunks` of ``function(per_token, first, kept)``, which also returns ``kept`` with what it writes.

    ``first`` is the chunk's first token.
    """
    num_tokens = jax.tree.leaves(per_token)[0].shape[0]
    if size >= num_tokens:
        return function(per_token, 0, kept)

    def chunk(own: Chunk, carry: tuple[R, K]) -> tuple[R, K]:
        results, kept = carry
        part, kept = function(own.take(per_token), own.start, kept)
        return own.put(results, part), kept

    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[:size], per_token), 0, kept)[0])
    empty = jax.tree.map(lambda x: jnp.zeros((num_tokens, *x.shape[1:]), x.dtype), shapes)
    return over_chunks(num_tokens, size, num_rows, chunk, (_jax.vary_like(empty, (per_token, like)), kept))


def over_columns[C](columns: int, tile_v: int, kept: int, body: Callable[[Any, int, bool, C], C], carry: C) -> C:
    """``carry = body(start, size, is_kept, carry)`` over the vocabulary: the remainder, then whole tiles in loops.

    A loop depends on the remainder. The other way round, XLA could start the remainder early and hold its tile. The
    tiles of the first ``kept`` columns are kept.
    """
    whole, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, kept > 0, carry)
    last_kept = max(kept - rest, 0) // tile_v
    for first, last, is_kept in ((0, last_kept, True), (last_kept, whole, False)):
        if first < last:
            carry = lax.fori_loop(first, last, lambda i, c, own=is_kept: body(rest + i * tile_v, tile_v, own, c), carry)
    return carry


class HeadTokens(NamedTuple):
    """What some tokens have of one model."""

    hidden: Float[Array, "t H"]  # in the weight's dtype
    inverse_temperature: Float[Array, "t"] | None  # as in `Operands`
    raw_scale: Float[Array, "t"] | None


class Head(NamedTuple):
    """What some columns of the vocabulary have of one model."""

    weight: Float[Array, "v H"]  # or [H, v]: Call.weight_layout
    bias: Float[Array, "v"] | None  # in the statistics' dtype
    adapter: Float[Array, "v R"] | None = None  # in the weight's dtype


class Shard(NamedTuple):
    """The arrays of a shard, those of each model in turn. The rows that count come first."""

    tokens: tuple[HeadTokens, ...]
    heads: tuple[Head, ...]
    rows: Any  # the client's own arrays, [T, ...] each
    num_rows: Int[Array, ""] | None  # how many rows count; None: all
    num_columns: Int[Array, ""] | None  # columns from there on are padding; None: those of the walk are all true


class XTile(NamedTuple):
    """Some tokens and some columns, and what belongs to them."""

    calls: tuple[Call, ...]
    tokens: tuple[HeadTokens, ...]
    rows: Any
    first: Any  # the first token
    heads: tuple[Head, ...]
    start: Any  # the first column
    live: Bool[Array, "v"] | None  # which columns are no padding; None: all
    index: Any  # its number among the tiles of `Walk.kept_columns`; None: it is none of them

    def products(self) -> tuple[Float[Array, "t v"], ...]:
        """The raw products of each model: h·Wᵀ, with the bias, or with the adapter's u·Bᵀ."""
        found = []
        for call, tokens, head in zip(self.calls, self.tokens, self.heads, strict=True):
            hidden, u = call.split(tokens.hidden)
            raw = dot(hidden, head.weight, 1, call.hidden_dim, call, call.stat_dtype)
            if head.bias is not None:
                raw = raw + head.bias[None, :]
            if head.adapter is not None:
                raw = raw + dot(u, head.adapter, 1, 1, call, call.stat_dtype)
            found.append(raw)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Walk:
    """What is known when a call is traced."""

    calls: tuple[Call, ...]  # of each model; gradients are those of the first
    columns: int  # to walk over
    tile_t: int  # tokens of a chunk
    tile_v: int  # columns of a tile
    kept_columns: int = 0  # those of the first tiles, of which the client keeps something

    def fold[C](self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, XTile], C]) -> C:
        """``add`` of all tiles of a chunk to ``empty(t)``, [t, ...] each, for all chunks: [T, ...] each."""
        return self.fold_keeping(shard, empty, lambda carry, tile, kept: (add(carry, tile), kept), None)[0]

    def fold_keeping[C, K](
        self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, XTile, K], tuple[C, K]], kept: K
    ) -> tuple[C, K]:
        """`fold`, where ``add`` also returns ``kept``, arrays of all tiles, with what it writes of one."""
        kept = _jax.vary_like(kept, shard)

        def of_chunk(per_token: Any, first: Any, kept: K) -> tuple[C, K]:
            tokens, rows = per_token

            def tile(start: Any, size: int, is_kept: bool, carry: tuple[C, K]) -> tuple[C, K]:
                own = self._tile(shard, start, size, is_kept)._replace(tokens=tokens, rows=rows, first=first)
                return add(carry[0], own, carry[1])

            carry = _jax.vary_like(empty(tokens[0].hidden.shape[0]), shard)
            return over_columns(self.columns, self.tile_v, self.kept_columns, tile, (carry, kept))

        return keeping_by_chunks(of_chunk, (shard.tokens, shard.rows), self.tile_t, shard.num_rows, shard, kept)

    def gradients(
        self, shard: Shard, dlogits: Callable[[XTile], Float[Array, "t v"]], dweight: Float[Array, "V H"] | None = None
    ) -> Primals:
        """Eq. 5, ``dlogits`` being the gradient in the first model's raw products: those of `Primals`.

        dweight is rounded, or added to the sum ``dweight``; the others are in the statistics' dtype. None of what is
        not in `Call.gradients`.
        """
        # The barrier puts all this after the forward's results. Otherwise XLA keeps what both passes compute, and
        # allocates the gradients from the start, although the forward's tiles could use their memory.
        shard, zero = lax.optimization_barrier((shard, jnp.float32(0)))
        (call, *_), head, vocab_dim = self.calls, shard.heads[0], self.calls[0].vocab_dim
        dtype = call.dtype if dweight is None else dweight.dtype

        def tile(start: Any, size: int, is_kept: bool, carry: Primals) -> Primals:
            part = self._of_columns(shard, self._tile(shard, start, size, is_kept), dlogits, carry.hidden, dtype)

            def put(whole: Array, columns: Array, dim: int, adds: bool = False) -> Array:
                columns = columns.astype(whole.dtype)
                columns += lax.dynamic_slice_in_dim(whole, start, size, dim) if adds else 0
                return lax.dynamic_update_slice_in_dim(whole, columns, start, dim)

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
        return over_columns(self.columns, self.tile_v, self.kept_columns, tile, _jax.vary_like(init, shard))

    def _of_columns(
        self, shard: Shard, tile: XTile, dlogits: Callable[..., Array], dhidden: Float[Array, "T H"], dtype: Any
    ) -> Primals:
        """``dhidden`` plus the part of a tile of all tokens, and the gradients of its columns.

        With one chunk the product itself rounds dweight to ``dtype``; with several it is summed first.
        """
        call = self.calls[0]
        if self.tile_t == call.num_tokens:
            part = gradient_products(call, dlogits(tile), tile, call.stat_dtype, dtype)
            return part._replace(hidden=jax.tree.map(jnp.add, dhidden, part.hidden))

        def chunk(own: Chunk, carry: Primals) -> Primals:
            tokens, rows = own.take((shard.tokens, shard.rows))
            of_chunk = tile._replace(tokens=tokens, rows=rows, first=own.start)
            d = dlogits(of_chunk)
            d = jnp.where(own.new[:, None], d, 0.0)  # a token's gradient counts in one chunk
            part = gradient_products(call, d, of_chunk, call.stat_dtype, call.stat_dtype)
            dhidden = jax.tree.map(lambda whole, x: own.put(whole, x + own.take(whole)), carry.hidden, part.hidden)
            return Primals(dhidden, *jax.tree.map(jnp.add, carry[1:], part[1:]))

        of_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, call.stat_dtype), tile.heads[0])
        init = Primals(dhidden, *_jax.vary_like(of_columns, shard)).select(call.gradients)
        return over_chunks(call.num_tokens, self.tile_t, shard.num_rows, chunk, init)

    def _tile(self, shard: Shard, start: Any, size: int, is_kept: bool) -> XTile:
        """All tokens and some columns."""
        live = _logprobs.unpadded_columns(start, size, shard.num_columns)
        index = (start + (self.tile_v - 1)) // self.tile_v if is_kept else None
        heads = []
        for call, head in zip(self.calls, shard.heads, strict=True):
            weight = lax.dynamic_slice_in_dim(head.weight, start, size, axis=call.vocab_dim)
            others = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), head[1:])
            heads.append(Head(weight, *others))
        return XTile(self.calls, shard.tokens, shard.rows, 0, tuple(heads), start, live, index)


def gradient_dtype(call: Call) -> jnp.dtype:
    """Of the gradient products' operands, and of what is kept: float32 on a CPU, which rounds neither to 16 bits."""
    return call.stat_dtype if call.device.platform == "cpu" else call.dtype


def gradient_products(
    call: Call, d: Float[Array, "t v"], tile: XTile, dhidden_dtype: Any, dweight_dtype: Any
) -> Primals:
    """Eq. 5 of a tile, from ``d``, the gradient in its raw products.

    The gradients of a bias and of an adapter are in the statistics' dtype.
    """
    head, dhidden, dweight, dbias, dadapter = tile.heads[0], None, None, None, None
    if head.bias is not None and call.gradients.bias:
        dbias = jnp.sum(d, axis=0, dtype=call.stat_dtype)
    head = head._replace(weight=_logprobs.zero_padding(head.weight, tile.live, call))
    if head.adapter is not None and tile.live is not None:
        head = head._replace(adapter=jnp.where(tile.live[:, None], head.adapter, jnp.zeros((), call.dtype)))
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
    """The matrix product that sums over ``left_dim`` and ``right_dim``, summed and returned in ``dtype``."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=call.precision, preferred_element_type=dtype)


class TileCache(NamedTuple):
    """What is kept of the first tiles of a walk."""

    columns: tuple[Float[Array, "T columns"], ...]  # the first in `_walk.gradient_dtype`
    rows: tuple[Float[Array, "tiles T"], ...]  # what the tile's columns are relative to

    def part(self, tile: XTile) -> tuple[list[Float[Array, "t v"]], list[Float[Array, "t"]]]:
        """Those of a tile."""
        t, v = tile.tokens[0].hidden.shape[0], tile.heads[0].weight.shape[tile.calls[0].vocab_dim]
        columns = [lax.dynamic_slice(x, _place(tile.first, tile.start), (t, v)) for x in self.columns]
        return columns, [lax.dynamic_slice(x, _place(tile.index, tile.first), (1, t))[0] for x in self.rows]

    def with_part(self, tile: XTile, columns: Sequence[Array], rows: Sequence[Array]) -> TileCache:
        """With those of a tile."""
        place, of_columns = _place(tile.index, tile.first), _place(tile.first, tile.start)
        of_rows = zip(self.rows, rows, strict=True)
        return TileCache(
            tuple(lax.dynamic_update_slice(x, part, of_columns) for x, part in zip(self.columns, columns, strict=True)),
            tuple(lax.dynamic_update_slice(x, part[None], place) for x, part in of_rows),
        )

    def with_dlogits(self, tile: XTile, d: Float[Array, "t v"]) -> TileCache:
        """With a tile's gradient in place of the first number of each of its columns."""
        first, *others = self.columns
        return self._replace(columns=(lax.dynamic_update_slice(first, d, _place(tile.first, tile.start)), *others))

    @property
    def num_columns(self) -> int:
        """Of all tiles that are kept."""
        return self.columns[0].shape[1]


class PerTile(NamedTuple):
    """What is kept of a tile."""

    columns: tuple[jnp.dtype, ...]  # dtypes of the numbers of each token and column
    rows: tuple[jnp.dtype, ...]  # of those of each token

    @classmethod
    def of_one_head(cls, call: Call) -> PerTile:
        """An exponential, and the tile's largest x."""
        return cls((gradient_dtype(call),), (call.stat_dtype,))


def _place(*first: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in first)


def kept_columns(call: Call, columns: int, tile_v: int, each: PerTile | None = None) -> int:
    """The columns of the first tiles that fit ``cache_bytes``, of a walk over ``columns``."""
    whole, rest = divmod(columns, tile_v)
    left = call.cache_budget - (kept_bytes_of_tile(call, rest, each) if rest else 0)
    if not call.cache_budget or left < 0 or not _logprobs.can_cache_exponentials(call):
        return 0
    return rest + min(whole, left // max(kept_bytes_of_tile(call, tile_v, each), 1)) * tile_v


def num_bytes(call: Call, columns: int, tile_v: int, each: PerTile | None = None) -> int:
    """Of the first tiles, which have so many columns."""
    whole, rest = divmod(columns, tile_v)
    return whole * kept_bytes_of_tile(call, tile_v, each) + (kept_bytes_of_tile(call, rest, each) if rest else 0)


def kept_bytes_of_tile(call: Call, columns: int, each: PerTile | None = None) -> int:
    """Of one tile: its columns, and what they are relative to."""
    of_columns, of_rows = (sum(dtype.itemsize for dtype in own) for own in each or PerTile.of_one_head(call))
    return call.num_tokens * (of_columns * columns + of_rows)


def is_one_piece(call: Call, kept: int, tile_t: int, has_padding: bool, adds_dweight: bool) -> bool:
    """Whether dlogits of all tokens and columns can take the place of the exponentials.

    Not where the product with all of the weight would copy it: to leave padding out, or for a CPU's float32 operands.
    Nor on a CPU with a sum of dweight; a GPU adds to it in the product itself. And a chunk of tokens that reaches back
    into the one before would meet dlogits there.
    """
    widens, on_cpu = gradient_dtype(call) != call.dtype, call.device.platform == "cpu"
    every_column = kept == call.columns and not has_padding
    every_row = not call.partial_rows and call.num_tokens % tile_t == 0
    return every_column and every_row and not widens and not (on_cpu and adds_dweight)


def empty_cache(walk: Walk, shard: Shard, each: PerTile | None = None) -> TileCache | None:
    """Memory for the forward to fill, if anything is kept."""
    width = walk.kept_columns
    if not width:
        return None
    each, num_tokens = each or PerTile.of_one_head(walk.calls[0]), walk.calls[0].num_tokens
    tiles = -(-width // walk.tile_v)
    memory = jnp.zeros if _jax.has_explicit_axes(shard.tokens[0].hidden) else lax.empty  # which has no mesh in its type
    return TileCache(
        tuple(memory((num_tokens, width), dtype) for dtype in each.columns),
        tuple(memory((tiles, num_tokens), dtype) for dtype in each.rows),
    )


def gradients_with_cache(
    walk: Walk,
    shard: Shard,
    cache: TileCache,
    dlogits: Callable[[XTile, TileCache], Float[Array, "t v"]],
    dhidden_dtype: Any,
    dweight: Float[Array, "V H"] | None,
) -> Primals:
    """`Walk.gradients` in one piece, which overwrites the cache."""
    _, ((d, *_), _) = walk.fold_keeping(
        shard,
        lambda _: None,
        lambda _, tile, cache: (None, cache.with_dlogits(tile, dlogits(tile, cache).astype(walk.calls[0].dtype))),
        cache,
    )
    whole = XTile(walk.calls, shard.tokens, shard.rows, 0, shard.heads, 0, None, None)
    dweight_dtype = walk.calls[0].dtype if dweight is None else dweight.dtype
    found = gradient_products(walk.calls[0], d, whole, dhidden_dtype, dweight_dtype)
    return found._replace(weight=jax.tree.map(lambda x: x if dweight is None else dweight + x, found.weight))


def tile_sizes(call: Call) -> tuple[int, int]:
    """Tokens and vocabulary columns per tile.

    On CPU a tile has at most 4 Mi logits (16 MiB of float32) and 2048 columns. Wider tiles do not fit the caches (50 ms
    against 28 ms forward at T 512, H 256, V 32000 on two cores); narrower ones make the products too small. XLA copies
    a tile's columns of the weight too. With few tokens this copy is the larger part, so it has at most half as many
    numbers as the call's logits, or 128 Ki if that is more. Elsewhere 64 Mi logits keep a GPU's products large. A tile
    has at most an eighth of the vocabulary, so that a small call does not hold all its logits. If rows may be left out,
    a tile has a sixteenth of the tokens; off the CPU, where every token tile copies the weight, a quarter.
    """
    on_cpu = call.device.platform == "cpu"
    widest_t, widest_v, budget = (4096, 2048, 4 << 20) if on_cpu else (16384, 1 << 20, 64 << 20)
    tile_t = min(max(call.num_tokens, 1), widest_t)  # `explain` takes a call without tokens too
    if call.partial_rows:
        least, parts = (256, 16) if on_cpu else (1024, 4)
        tile_t = min(tile_t, max(least, -(-call.num_tokens // parts)))
    tile_v = max(min(budget // tile_t, widest_v, call.columns // 8) // 128 * 128, 512)
    if on_cpu:
        logits = max(call.num_tokens, 1) * call.columns
        tile_v = min(tile_v, max(max(logits // 2, 1 << 17) // call.hidden_size // 128 * 128, 128))
    return tile_t, min(call.columns, tile_v)


def plan(call: Call, name: str) -> Plan:
    """Tiles and bytes."""
    tile_t, tile_v = tile_sizes(call)
    columns = min(call.vocab_size, call.columns)
    kept = kept_columns(call, columns, tile_v)
    in_place = is_one_piece(call, kept, tile_t, call.vocab_size != call.columns, adds_dweight=False)
    width = min(tile_v, columns)
    held = copied_bytes(call) + tile_bytes(call, tile_t, width) + call.candidate_bytes
    of_backward = 0 if in_place else bytes_of_gradient_products(call, tile_t, width)
    return Plan(
        implementation=name,
        refused={},
        call=call,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=held + bytes_of_products(call, tile_t, width),
        backward_bytes=held + of_backward + (0 if in_place and call.shards == 1 else sum_bytes(call)),
        kept_bytes=call.statistics_bytes + num_bytes(call, kept, tile_v),
        logits_bytes=call.num_tokens * call.columns * call.stat_dtype.itemsize,
        notes=(
            *_cache_notes(call, kept, columns, tile_v),
            *([OVERWRITES] if in_place else []),
            *unused_notes(call),
            *candidate_notes(call),
        ),
        full_cache_bytes=num_bytes(call, columns, tile_v) if _logprobs.can_cache_exponentials(call) else 0,
    )


def _cache_notes(call: Call, kept: int, columns: int, tile_v: int) -> tuple[str, ...]:
    """What of ``cache_bytes`` is used."""
    if not call.cache_budget:
        return ()
    if not _logprobs.can_cache_exponentials(call):
        return ("no tile is kept: label smoothing needs capped logits that no exponential shows",)
    tiles = -(-kept // tile_v), -(-columns // tile_v)
    return cache_notes(call, *tiles, kept_bytes_of_tile(call, min(tile_v, columns)))


def tile_bytes(call: Call, tile_t: int, width: int) -> int:
    """Of a tile of logits."""
    return min(tile_t, call.num_tokens) * width * call.stat_dtype.itemsize


def bytes_of_products(call: Call, tile_t: int, width: int) -> int:
    """Of a tile's columns of the weight, and a chunk's tokens of several, which XLA copies on a CPU."""
    if call.device.platform != "cpu":
        return 0
    rows = width + (tile_t if tile_t < call.num_tokens else 0)
    return rows * (call.hidden_size + call.rank) * call.dtype.itemsize


def bytes_of_gradient_products(call: Call, tile_t: int, width: int) -> int:
    """Of the same in `gradient_dtype`, and of a tile's dweight before it is written, which a CPU holds.

    With several chunks of tokens it is a sum and its next term.
    """
    if call.device.platform != "cpu":
        return 0
    read = (width + min(tile_t, call.num_tokens)) * (call.hidden_size + call.rank) * call.stat_dtype.itemsize
    size = width * (call.hidden_size * call.gradients.weight + call.rank * call.gradients.adapter)
    if tile_t < call.num_tokens:
        return read + 2 * size * call.stat_dtype.itemsize
    return read + (0 if call.dtype == call.stat_dtype else size * call.dtype.itemsize)


def copied_bytes(call: Call) -> int:
    """Of a copy of hidden: it is gathered, cast or multiplied by a sign, or its rows are moved."""
    own = call.partial_rows or call.gather_dim is not None or call.hidden_dtype != call.dtype or call.signs_hidden
    beside = call.hidden_dtype.itemsize if call.rank else 0  # u beside hidden, in another copy
    return call.num_tokens * (call.hidden_size + call.rank) * ((call.dtype.itemsize if own else 0) + beside)


def sum_bytes(call: Call) -> int:
    """Of dhidden in the statistics' dtype, before it is rounded, scattered or its rows are put back."""
    moved = call.partial_rows or call.gather_dim is not None or call.rank  # with that of u, which is cut off
    is_result = call.hidden_dtype == call.stat_dtype and not moved
    return 0 if is_result else call.num_tokens * (call.hidden_size + call.rank) * call.stat_dtype.itemsize
