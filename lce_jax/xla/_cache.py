"""The cache: exponentials of the first tiles, which the forward keeps to spare the backward their products.

The backward makes one tile's dlogits of them at a time, as it does without a cache. Where it may overwrite all of them,
dlogits take their place, and dhidden and dweight are one product each over the whole vocabulary (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax import _jax
from lce_jax._types import Case, Primals
from lce_jax.mathematics import _dlogits
from lce_jax.xla import _walk
from lce_jax.xla._walk import Shard, Tile, Walk

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


class Cache(NamedTuple):
    """What is kept of the first tiles of a walk."""

    exponentials: Float[Array, "T columns"]  # `_dlogits.to_keep`, in `_walk.gradient_dtype`
    max: Float[Array, "tiles T"]  # each tile's largest x

    def part(self, tile: Tile) -> tuple[Float[Array, "t v"], Float[Array, "t"]]:
        """The exponentials and the maxima of a tile."""
        highest = lax.dynamic_slice(self.max, _place(tile.index, tile.first), (1, tile.shape[0]))
        return lax.dynamic_slice(self.exponentials, _place(tile.first, tile.start), tile.shape), highest[0]

    def with_part(self, tile: Tile, kept: Float[Array, "t v"], highest: Float[Array, "t"]) -> Cache:
        """With those of a tile."""
        maxima = lax.dynamic_update_slice(self.max, highest[None], _place(tile.index, tile.first))
        return self.with_dlogits(tile, kept)._replace(max=maxima)

    def with_dlogits(self, tile: Tile, d: Float[Array, "t v"]) -> Cache:
        """With a tile's gradient in place of its exponentials."""
        place = _place(tile.first, tile.start)
        return self._replace(exponentials=lax.dynamic_update_slice(self.exponentials, d, place))


def _place(*first: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in first)


def kept_columns(case: Case, columns: int, tile_v: int) -> int:
    """The columns of the first tiles whose exponentials fit ``cache_bytes``, of a walk over ``columns``."""
    whole, rest = divmod(columns, tile_v)
    left = case.options.cache_bytes - num_bytes(case, rest, tile_v)
    if not case.options.cache_bytes or left < 0 or not _dlogits.keeps(case.options):
        return 0
    return rest + min(whole, left // max(tile_bytes(case, tile_v), 1)) * tile_v


def num_bytes(case: Case, columns: int, tile_v: int) -> int:
    """Of the first tiles, which have so many columns."""
    whole, rest = divmod(columns, tile_v)
    return whole * tile_bytes(case, tile_v) + (tile_bytes(case, rest) if rest else 0)


def tile_bytes(case: Case, columns: int) -> int:
    """Of one tile's exponentials, and of its maximum per token."""
    return case.num_tokens * (columns * _walk.gradient_dtype(case).itemsize + case.stat_dtype.itemsize)


def is_one_piece(case: Case, kept: int, tile_t: int, has_padding: bool, adds_dweight: bool) -> bool:
    """Whether dlogits of all tokens and columns can take the place of the exponentials.

    Not where the product with all of the weight would copy it: to leave padding out, or for a CPU's float32 operands.
    Nor on a CPU with a sum of dweight; a GPU adds to it in the product itself. And a chunk of tokens that reaches back
    into the one before would meet dlogits there.
    """
    widens, on_cpu = _walk.gradient_dtype(case) != case.dtype, case.device.platform == "cpu"
    every_column = kept == case.vocab_size and not has_padding
    every_row = not case.partial_rows and case.num_tokens % tile_t == 0
    return every_column and every_row and not widens and not (on_cpu and adds_dweight)


def empty(walk: Walk, shard: Shard) -> Cache | None:
    """Memory for the forward to fill, if anything is kept."""
    case, columns = walk.cases[0], walk.kept_columns
    if not columns:
        return None
    tiles = -(-columns // walk.tile_v)
    memory = jnp.zeros if _jax.has_explicit_axes(shard.tokens[0].hidden) else lax.empty  # which has no mesh in its type
    exponentials = memory((walk.num_tokens, columns), _walk.gradient_dtype(case))
    return Cache(exponentials, memory((tiles, walk.num_tokens), case.stat_dtype))


def gradients(
    walk: Walk,
    shard: Shard,
    cache: Cache,
    dlogits: Callable[[Tile, Cache], Float[Array, "t v"]],
    dhidden_dtype: Any,
    dweight: Float[Array, "V H"] | None,
) -> Primals:
    """`Walk.gradients` in one piece, which overwrites the cache."""
    case, hidden, head = walk.cases[0], shard.tokens[0].hidden, shard.heads[0]

    def overwrite(nothing: None, tile: Tile, cache: Cache) -> tuple[None, Cache]:
        return nothing, cache.with_dlogits(tile, dlogits(tile, cache).astype(case.dtype))

    _, (d, _) = walk.fold_keeping(shard, lambda _: None, overwrite, cache)
    dweight_dtype = case.dtype if dweight is None else dweight.dtype
    dhidden, found = _walk.gradient_products(case, d, head.weight, hidden, dhidden_dtype, dweight_dtype)
    dbias = None if head.bias is None else jnp.sum(d, axis=0, dtype=case.stat_dtype)
    return Primals(dhidden, found if dweight is None else dweight + found, dbias)
