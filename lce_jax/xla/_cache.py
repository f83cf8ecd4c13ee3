"""The cache: what the forward keeps of the first tiles to spare the backward their products.

Of one head these are exponentials (`mathematics._dlogits`), of two heads two numbers of each column
(`mathematics._kept_ratios`).

The backward makes one tile's dlogits of them at a time, as it does without a cache. Where it may overwrite all of them,
dlogits take their place, and dhidden and dweight are one product each over the whole vocabulary (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    columns: tuple[Float[Array, "T columns"], ...]  # the first in `_walk.gradient_dtype`
    rows: tuple[Float[Array, "tiles T"], ...]  # what the tile's columns are relative to

    def part(self, tile: Tile) -> tuple[list[Float[Array, "t v"]], list[Float[Array, "t"]]]:
        """Those of a tile."""
        columns = [lax.dynamic_slice(x, _place(tile.first, tile.start), tile.shape) for x in self.columns]
        shape, place = (1, tile.shape[0]), _place(tile.index, tile.first)
        return columns, [lax.dynamic_slice(x, place, shape)[0] for x in self.rows]

    def with_part(self, tile: Tile, columns: Sequence[Float[Array, "t v"]], rows: Sequence[Float[Array, "t"]]) -> Cache:
        """With those of a tile."""
        place, of_columns = _place(tile.index, tile.first), _place(tile.first, tile.start)
        of_rows = zip(self.rows, rows, strict=True)
        return Cache(
            tuple(lax.dynamic_update_slice(x, part, of_columns) for x, part in zip(self.columns, columns, strict=True)),
            tuple(lax.dynamic_update_slice(x, part[None], place) for x, part in of_rows),
        )

    def with_dlogits(self, tile: Tile, d: Float[Array, "t v"]) -> Cache:
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
    def of_one_head(cls, case: Case) -> PerTile:
        """An exponential, and the tile's largest x."""
        return cls((_walk.gradient_dtype(case),), (case.stat_dtype,))


def _place(*first: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in first)


def kept_columns(case: Case, columns: int, tile_v: int, each: PerTile | None = None) -> int:
    """The columns of the first tiles that fit ``cache_bytes``, of a walk over ``columns``."""
    whole, rest = divmod(columns, tile_v)
    left = case.options.cache_bytes - num_bytes(case, rest, tile_v, each)
    if not case.options.cache_bytes or left < 0 or not _dlogits.keeps(case.options):
        return 0
    return rest + min(whole, left // max(tile_bytes(case, tile_v, each), 1)) * tile_v


def num_bytes(case: Case, columns: int, tile_v: int, each: PerTile | None = None) -> int:
    """Of the first tiles, which have so many columns."""
    whole, rest = divmod(columns, tile_v)
    return whole * tile_bytes(case, tile_v, each) + (tile_bytes(case, rest, each) if rest else 0)


def tile_bytes(case: Case, columns: int, each: PerTile | None = None) -> int:
    """Of one tile: its columns, and what they are relative to."""
    of_columns, of_rows = (sum(dtype.itemsize for dtype in own) for own in each or PerTile.of_one_head(case))
    return case.num_tokens * (of_columns * columns + of_rows)


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


def empty(walk: Walk, shard: Shard, each: PerTile | None = None) -> Cache | None:
    """Memory for the forward to fill, if anything is kept."""
    width = walk.kept_columns
    if not width:
        return None
    each, num_tokens = each or PerTile.of_one_head(walk.cases[0]), walk.cases[0].num_tokens
    tiles = -(-width // walk.tile_v)
    memory = jnp.zeros if _jax.has_explicit_axes(shard.tokens[0].hidden) else lax.empty  # which has no mesh in its type
    return Cache(
        tuple(memory((num_tokens, width), dtype) for dtype in each.columns),
        tuple(memory((tiles, num_tokens), dtype) for dtype in each.rows),
    )


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
    _, ((d, *_), _) = walk.fold_keeping(
        shard,
        lambda _: None,
        lambda _, tile, cache: (None, cache.with_dlogits(tile, dlogits(tile, cache).astype(case.dtype))),
        cache,
    )
    dweight_dtype = case.dtype if dweight is None else dweight.dtype
    dhidden, found = _walk.gradient_products(case, d, head.weight, hidden, dhidden_dtype, dweight_dtype)
    dbias = None if head.bias is None else jnp.sum(d, axis=0, dtype=case.stat_dtype)
    return Primals(dhidden, found if dweight is None else dweight + found, dbias)
