"""How programs of plain XLA walk over chunks of tokens and tiles of the vocabulary, with one head or several.

Both loops are here, once. A pass forward is a `fold` over the tiles of a chunk's logits, chunk by chunk. A pass
backward takes the tiles of columns in turn, and for each of them all chunks: so a tile's columns of dweight are written
once. What a tile's logits are made into is the client's: log-probabilities (`lce_jax.xla`) or a divergence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _jax
from lce_jax._types import Case, Options, Primals
from lce_jax.mathematics import _columns

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """What some tokens have of one model."""

    hidden: Float[Array, "t H"]  # in the weight's dtype
    inverse_temperature: Float[Array, "t"] | None  # as in `Operands`
    raw_scale: Float[Array, "t"] | None


class Head(NamedTuple):
    """What some columns of the vocabulary have of one model."""

    weight: Float[Array, "v H"]  # or [H, v]: Options.weight_layout
    bias: Float[Array, "v"] | None  # in the statistics' dtype


class Shard(NamedTuple):
    """The arrays of a shard, those of each model in turn. The rows that count come first."""

    tokens: tuple[Tokens, ...]
    heads: tuple[Head, ...]
    rows: Any  # the client's own arrays, [T, ...] each
    num_rows: Int[Array, ""] | None  # how many rows count; None: all
    num_columns: Int[Array, ""] | None  # columns from there on are padding; None: those of the walk are all true


class Tile(NamedTuple):
    """The raw products of some tokens with some columns, and what belongs to these."""

    tokens: tuple[Tokens, ...]
    rows: Any
    heads: tuple[Head, ...]
    raw: tuple[Float[Array, "t v"], ...]  # with the bias
    start: Any  # the first column
    live: Bool[Array, "v"] | None  # which columns are no padding; None: all


@dataclasses.dataclass(frozen=True)
class Walk:
    """What is known when a call is traced."""

    cases: tuple[Case, ...]  # of each model; gradients are those of the first
    columns: int  # to walk over
    tile_t: int  # tokens of a chunk
    tile_v: int  # columns of a tile

    @property
    def num_tokens(self) -> int:
        """All tokens of the call."""
        return self.cases[0].num_tokens

    def fold[C](self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, Tile], C]) -> C:
        """``add`` of all tiles of a chunk to ``empty(t)``, [t, ...] each, for all chunks: [T, ...] each."""

        def of_chunk(per_token: Any) -> C:
            def tile(start: Any, size: int, carry: C) -> C:
                return add(carry, self._tile(per_token, self._columns(shard, start, size)))

            carry = _jax.vary_like(empty(per_token[0][0].hidden.shape[0]), shard)
            return over_columns(self.columns, self.tile_v, tile, carry)

        return by_chunks(of_chunk, (shard.tokens, shard.rows), self.tile_t, shard.num_rows, shard)

    def gradients(
        self, shard: Shard, dlogits: Callable[[Tile], Float[Array, "t v"]], dweight: Float[Array, "V H"] | None = None
    ) -> Primals:
        """Eq. 5, ``dlogits`` being the gradient in the first model's raw products: dhidden, dweight and dbias.

        dweight is rounded, or added to the sum ``dweight``; the others are in the statistics' dtype.
        """
        # The barrier puts all this after the forward's results. Otherwise XLA keeps what both passes compute, and
        # allocates the gradients from the start, although the forward's tiles could use their memory.
        shard, zero = lax.optimization_barrier((shard, jnp.float32(0)))
        (case, *_), head, vocab_dim = self.cases, shard.heads[0], self.cases[0].options.vocab_dim
        dtype = case.dtype if dweight is None else dweight.dtype

        def tile(start: Any, size: int, carry: Primals) -> Primals:
            part = self._of_columns(shard, self._columns(shard, start, size), dlogits, carry.hidden, dtype)
            dcolumns = part.weight.astype(dtype)
            if dweight is not None:
                dcolumns += lax.dynamic_slice_in_dim(carry.weight, start, size, vocab_dim)
            put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
            return Primals(
                part.hidden,
                lax.dynamic_update_slice_in_dim(carry.weight, dcolumns, start, vocab_dim),
                jax.tree.map(put, carry.bias, part.bias),
            )

        init = Primals(
            jnp.full(shard.tokens[0].hidden.shape, zero.astype(case.stat_dtype)),
            jnp.full(head.weight.shape, zero.astype(case.dtype)) if dweight is None else dweight,
            jax.tree.map(jnp.zeros_like, head.bias),
        )
        return over_columns(self.columns, self.tile_v, tile, _jax.vary_like(init, shard))

    def _of_columns(
        self, shard: Shard, columns: Columns, dlogits: Callable[[Tile], Array], dhidden: Float[Array, "T H"], dtype: Any
    ) -> Primals:
        """``dhidden`` plus the part of some columns, and the gradients of these columns.

        With one chunk the product itself rounds dweight to ``dtype``; with several it is summed first.
        """
        case, per_token = self.cases[0], (shard.tokens, shard.rows)
        if self.tile_t == self.num_tokens:
            part = self._of_tile(self._tile(per_token, columns), dlogits, None, dtype)
            return part._replace(hidden=dhidden + part.hidden)

        def chunk(own: Chunk, carry: Primals) -> Primals:
            part = self._of_tile(self._tile(own.take(per_token), columns), dlogits, own.new, case.stat_dtype)
            dhidden = own.put(carry.hidden, part.hidden + own.take(carry.hidden))
            return Primals(dhidden, carry.weight + part.weight, jax.tree.map(jnp.add, carry.bias, part.bias))

        of_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, case.stat_dtype), columns.heads[0])
        init = Primals(dhidden, *_jax.vary_like(of_columns, shard))
        return over_chunks(self.num_tokens, self.tile_t, shard.num_rows, chunk, init)

    def _of_tile(
        self, tile: Tile, dlogits: Callable[[Tile], Array], new: Bool[Array, "t"] | None, dweight_dtype: Any
    ) -> Primals:
        """Eq. 5 of one tile: recomputed products, their gradient, and its products."""
        case, head, hidden = self.cases[0], tile.heads[0], tile.tokens[0].hidden
        options, d = case.options, dlogits(tile)
        d = d if new is None else jnp.where(new[:, None], d, 0.0)
        dbias = None if head.bias is None else jnp.sum(d, axis=0)
        weight = _columns.without_padding(head.weight, tile.live, options)
        d, weight, hidden = (x.astype(gradient_dtype(case)) for x in (d, weight, hidden))
        dhidden = dot(d, weight, 1, options.vocab_dim, options, case.stat_dtype)
        left, right = (d, hidden) if options.vocab_dim == 0 else (hidden, d)
        return Primals(dhidden, dot(left, right, 0, 0, options, dweight_dtype), dbias)

    def _columns(self, shard: Shard, start: Any, size: int) -> Columns:
        def of_model(case: Case, head: Head) -> Head:
            weight = lax.dynamic_slice_in_dim(head.weight, start, size, axis=case.options.vocab_dim)
            return Head(weight, None if head.bias is None else lax.dynamic_slice_in_dim(head.bias, start, size))

        live = _columns.live_columns(start, size, shard.num_columns)
        return Columns(tuple(map(of_model, self.cases, shard.heads)), start, live)

    def _tile(self, per_token: tuple[tuple[Tokens, ...], Any], columns: Columns) -> Tile:
        (tokens, rows), (heads, start, live) = per_token, columns
        return Tile(tokens, rows, heads, tuple(map(_raw, self.cases, tokens, heads)), start, live)


class Columns(NamedTuple):
    """Some columns of the vocabulary."""

    heads: tuple[Head, ...]
    start: Any
    live: Bool[Array, "v"] | None


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
    num_tokens = jax.tree.leaves(per_token)[0].shape[0]
    if size >= num_tokens:
        return function(per_token)

    def chunk(own: Chunk, results: R) -> R:
        return own.put(results, function(own.take(per_token)))

    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[:size], per_token)))
    empty = jax.tree.map(lambda x: jnp.zeros((num_tokens, *x.shape[1:]), x.dtype), shapes)
    return over_chunks(num_tokens, size, num_rows, chunk, _jax.vary_like(empty, (per_token, like)))


def over_columns[C](columns: int, tile_v: int, body: Callable[[Any, int, C], C], carry: C) -> C:
    """``carry = body(start, size, carry)`` over the vocabulary: first the remainder, then whole tiles in a loop.

    The loop depends on the remainder. The other way round, XLA could start the remainder early and hold its tile.
    """
    whole, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, carry)
    return lax.fori_loop(0, whole, lambda i, c: body(rest + i * tile_v, tile_v, c), carry) if whole else carry


def gradient_dtype(case: Case) -> jnp.dtype:
    """The dtype of the gradient products' operands: float32 on a CPU, where dlogits are never rounded to 16 bits."""
    return case.stat_dtype if case.device.platform == "cpu" else case.dtype


def _raw(case: Case, tokens: Tokens, head: Head) -> Float[Array, "t v"]:
    raw = dot(tokens.hidden, head.weight, 1, case.options.hidden_dim, case.options, case.stat_dtype)
    return raw if head.bias is None else raw + head.bias[None, :]


def dot(left: Array, right: Array, left_dim: int, right_dim: int, options: Options, dtype: Any) -> Array:
    """The matrix product that sums over ``left_dim`` and ``right_dim``, summed and returned in ``dtype``."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=options.precision, preferred_element_type=dtype)
