"""How programs of plain XLA walk over chunks of tokens and tiles of the vocabulary, with one head or several.

A pass forward is a `fold` over the tiles of a chunk's logits, chunk by chunk. A pass backward takes the tiles of
columns in turn, and for each of them all chunks: so a tile's columns of dweight are written once. What a tile's logits
are made into is the client's: log-probabilities (`lce_jax.xla`) or a divergence. A client that keeps something of the
first tiles from one pass to the other need not ask for their products again.
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
from lce_jax.xla._loops import Chunk, keeping_by_chunks, over_chunks, over_columns

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
    """Some tokens and some columns, and what belongs to them."""

    cases: tuple[Case, ...]
    tokens: tuple[Tokens, ...]
    rows: Any
    first: Any  # the first token
    heads: tuple[Head, ...]  # this and the next ones: as `Columns` has them
    start: Any  # the first column
    live: Bool[Array, "v"] | None  # which columns are no padding; None: all
    index: Any  # its number among the tiles of `Walk.kept_columns`; None: it is none of them

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and columns."""
        return self.tokens[0].hidden.shape[0], self.heads[0].weight.shape[self.cases[0].options.vocab_dim]

    def products(self) -> tuple[Float[Array, "t v"], ...]:
        """The raw products of each model, with the bias."""
        found = []
        for case, tokens, head in zip(self.cases, self.tokens, self.heads, strict=True):
            raw = dot(tokens.hidden, head.weight, 1, case.options.hidden_dim, case.options, case.stat_dtype)
            found.append(raw if head.bias is None else raw + head.bias[None, :])
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Walk:
    """What is known when a call is traced."""

    cases: tuple[Case, ...]  # of each model; gradients are those of the first
    columns: int  # to walk over
    tile_t: int  # tokens of a chunk
    tile_v: int  # columns of a tile
    kept_columns: int = 0  # those of the first tiles, of which the client keeps something

    def fold[C](self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, Tile], C]) -> C:
        """``add`` of all tiles of a chunk to ``empty(t)``, [t, ...] each, for all chunks: [T, ...] each."""
        return self.fold_keeping(shard, empty, lambda carry, tile, kept: (add(carry, tile), kept), None)[0]

    def fold_keeping[C, K](
        self, shard: Shard, empty: Callable[[int], C], add: Callable[[C, Tile, K], tuple[C, K]], kept: K
    ) -> tuple[C, K]:
        """`fold`, where ``add`` also returns ``kept``, arrays of all tiles, with what it writes of one."""
        kept = _jax.vary_like(kept, shard)

        def of_chunk(per_token: Any, first: Any, kept: K) -> tuple[C, K]:
            tokens, rows = per_token

            def tile(start: Any, size: int, is_kept: bool, carry: tuple[C, K]) -> tuple[C, K]:
                columns = self._columns(shard, start, size, is_kept)
                return add(carry[0], Tile(self.cases, tokens, rows, first, *columns), carry[1])

            carry = _jax.vary_like(empty(tokens[0].hidden.shape[0]), shard)
            return over_columns(self.columns, self.tile_v, self.kept_columns, tile, (carry, kept))

        return keeping_by_chunks(of_chunk, (shard.tokens, shard.rows), self.tile_t, shard.num_rows, shard, kept)

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

        def tile(start: Any, size: int, is_kept: bool, carry: Primals) -> Primals:
            part = self._of_columns(shard, self._columns(shard, start, size, is_kept), dlogits, carry.hidden, dtype)
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
        return over_columns(self.columns, self.tile_v, self.kept_columns, tile, _jax.vary_like(init, shard))

    def _of_columns(
        self, shard: Shard, columns: Columns, dlogits: Callable[[Tile], Array], dhidden: Float[Array, "T H"], dtype: Any
    ) -> Primals:
        """``dhidden`` plus the part of some columns, and the gradients of these columns.

        With one chunk the product itself rounds dweight to ``dtype``; with several it is summed first.
        """
        case = self.cases[0]
        if self.tile_t == case.num_tokens:
            part = self._of_tile(Tile(self.cases, shard.tokens, shard.rows, 0, *columns), dlogits, None, dtype)
            return part._replace(hidden=dhidden + part.hidden)

        def chunk(own: Chunk, carry: Primals) -> Primals:
            tokens, rows = own.take((shard.tokens, shard.rows))
            part = self._of_tile(Tile(self.cases, tokens, rows, own.start, *columns), dlogits, own.new, case.stat_dtype)
            dhidden = own.put(carry.hidden, part.hidden + own.take(carry.hidden))
            return Primals(dhidden, carry.weight + part.weight, jax.tree.map(jnp.add, carry.bias, part.bias))

        of_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, case.stat_dtype), columns.heads[0])
        init = Primals(dhidden, *_jax.vary_like(of_columns, shard))
        return over_chunks(case.num_tokens, self.tile_t, shard.num_rows, chunk, init)

    def _of_tile(
        self, tile: Tile, dlogits: Callable[[Tile], Array], new: Bool[Array, "t"] | None, dweight_dtype: Any
    ) -> Primals:
        """Eq. 5 of one tile: the gradient of its products, and the products of that."""
        case, head = self.cases[0], tile.heads[0]
        d = dlogits(tile)
        d = d if new is None else jnp.where(new[:, None], d, 0.0)
        dbias = None if head.bias is None else jnp.sum(d, axis=0)
        weight = _columns.without_padding(head.weight, tile.live, case.options)
        d, weight, hidden = (x.astype(gradient_dtype(case)) for x in (d, weight, tile.tokens[0].hidden))
        return Primals(*gradient_products(case, d, weight, hidden, case.stat_dtype, dweight_dtype), dbias)

    def _columns(self, shard: Shard, start: Any, size: int, is_kept: bool) -> Columns:
        live = _columns.live_columns(start, size, shard.num_columns)
        index = (start + (self.tile_v - 1)) // self.tile_v if is_kept else None
        heads = []
        for case, head in zip(self.cases, shard.heads, strict=True):
            weight = lax.dynamic_slice_in_dim(head.weight, start, size, axis=case.options.vocab_dim)
            heads.append(Head(weight, None if head.bias is None else lax.dynamic_slice_in_dim(head.bias, start, size)))
        return Columns(tuple(heads), start, live, index)


class Columns(NamedTuple):
    """Some columns of the vocabulary."""

    heads: tuple[Head, ...]
    start: Any
    live: Bool[Array, "v"] | None
    index: Any


def gradient_dtype(case: Case) -> jnp.dtype:
    """Of the gradient products' operands, and of what is kept: float32 on a CPU, which rounds neither to 16 bits."""
    return case.stat_dtype if case.device.platform == "cpu" else case.dtype


def gradient_products(
    case: Case, d: Float[Array, "t v"], weight: Array, hidden: Float[Array, "t H"], *dtypes: Any
) -> tuple[Float[Array, "t H"], Array]:
    """Eq. 5 from the gradient in the raw products of some tokens with some columns; ``dtypes`` are of the results."""
    options, (of_dhidden, of_dweight) = case.options, dtypes
    dhidden = dot(d, weight, 1, options.vocab_dim, options, of_dhidden)
    left, right = (d, hidden) if options.vocab_dim == 0 else (hidden, d)
    return dhidden, dot(left, right, 0, 0, options, of_dweight)


def dot(left: Array, right: Array, left_dim: int, right_dim: int, options: Options, dtype: Any) -> Array:
    """The matrix product that sums over ``left_dim`` and ``right_dim``, summed and returned in ``dtype``."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=options.precision, preferred_element_type=dtype)
