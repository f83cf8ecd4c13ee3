"""The implementation for every device: plain XLA, one tile of logits at a time.

For each chunk of tokens and tile of the vocabulary: one matrix product, its statistics (eq. 1), a merge (eq. 2). The
backward recomputes the product, turns it into dlogits (eqs. 4, 5) and feeds the two gradient products. `_walk` goes
over the tiles, so exactly one tile of logits exists at a time, whatever the vocabulary. With ``cache_bytes`` the
forward keeps the exponentials of the first tiles, of which the backward makes dlogits without a product.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._statistics import Running
from lce_jax.types._types import Call, Operands, Plan, Primals, RowCoefficients, ShardStatistics
from lce_jax.xla import _topk, _walk
from lce_jax.xla._walk import Head, HeadTokens, Shard, TileCache, Walk, XTile

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

NAME = "xla"


def supports(call: Call) -> str | None:
    """Why this implementation cannot serve ``call``: never, it serves everything."""
    del call
    return None


def plan(call: Call) -> Plan:
    """Tiles and bytes."""
    if call.top_k:
        return _topk.plan(call, NAME)
    return _walk.plan(call, NAME)


class _Rows(NamedTuple):
    """What some tokens have beside their hidden states."""

    targets: Int[Array, "t"]
    candidates: Int[Array, "t K"] | None
    floor: Float[Array, "t"] | None
    coefficients: RowCoefficients | None = None  # in the backward

    def relative_to(self, start: Int[Array, ""] | int) -> tuple[Array, Array | None, Array | None]:
        """The ids from column ``start`` on: those of its tile lie in [0, size), the others outside. And the floor."""
        return self.targets - start, None if self.candidates is None else self.candidates - start, self.floor


def statistics(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, TileCache | None]:
    """Eq. 1 of the whole shard, [T] each, and the exponentials of the first tiles, as many as ``cache_bytes`` hold."""
    (walk, shard), cache = _walk_of(operands, call), None
    if keep_cache and call.cache_budget:
        walk = dataclasses.replace(walk, kept_columns=_walk.kept_columns(call, walk.columns, walk.tile_v))
        cache = _walk.empty_cache(walk, shard)

    def add(running: Running, tile: XTile, cache: TileCache | None) -> tuple[Running, TileCache | None]:
        (x, row_scale), (targets, *more) = _logits(call, tile), tile.rows.relative_to(tile.start)
        stats, e = _logprobs.tile_statistics(x, row_scale, targets, tile.live, call, *more)
        if cache is not None and tile.index is not None:
            cache = cache.with_part(tile, [_logprobs.encode_exponentials(e, _walk.gradient_dtype(call))], [stats.max])
        return running.add(stats, row_scale), cache

    running, cache = walk.fold_keeping(
        shard, lambda tokens: Running.start(_statistics.empty_statistics(tokens, call.stat_dtype, call)), add, cache
    )
    return running.finish(), cache


def gradients(
    operands: Operands,
    call: Call,
    rows: RowCoefficients,
    cache: TileCache | None = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Float[Array, "V H"] | None = None,
    adds_dweight: Any = True,
) -> Primals:
    """Eq. 5: dhidden and dbias in the statistics' dtype, which the caller sums and rounds once.

    dweight is rounded, or added to the sum ``dweight``. Where all of a cache is overwritten, dhidden may be rounded.
    """
    del adds_dweight  # always

    def dlogits(tile: XTile, cache: TileCache | None) -> Float[Array, "t v"]:
        rows = tile.rows.coefficients
        if cache is None or tile.index is None:
            (x, row_scale), (targets, *more) = _logits(call, tile), tile.rows.relative_to(tile.start)
            return _logprobs.dlogits_from_logits(x, row_scale, rows, targets, tile.live, call, *more)
        ((kept,), (highest,)), (targets, candidates, _) = cache.part(tile), tile.rows.relative_to(tile.start)
        row_scale = _logprobs.compute_row_scale(call, tile.tokens[0].inverse_temperature)
        return _logprobs.dlogits_from_exponentials(kept, highest, row_scale, rows, targets, tile.live, call, candidates)

    if operands.candidates is not None and rows.candidates is not None:
        operands, rows = _logprobs.merge_repeated_candidates(operands, rows)
    walk, shard = _walk_of(operands, call, rows)
    if cache is None:
        return walk.gradients(shard, functools.partial(dlogits, cache=None), dweight)
    walk = dataclasses.replace(walk, kept_columns=cache.num_columns)
    adds, has_padding = dweight is not None, operands.num_columns is not None
    if may_overwrite_cache and _walk.is_one_piece(call, walk.kept_columns, walk.tile_t, has_padding, adds):
        dhidden_dtype = call.dtype if may_round_dhidden else call.stat_dtype
        return _walk.gradients_with_cache(walk, shard, cache, dlogits, dhidden_dtype, dweight)
    return walk.gradients(shard, functools.partial(dlogits, cache=cache), dweight)


def _logits(call: Call, tile: XTile) -> tuple[Float[Array, "t v"], Float[Array, "t"] | float]:
    """The x and the k of eq. 0."""
    (raw,), (tokens,) = tile.products(), tile.tokens
    x = _logprobs.unscaled_logits(raw, call, tokens.raw_scale)
    return x, _logprobs.compute_row_scale(call, tokens.inverse_temperature)


def _walk_of(operands: Operands, call: Call, coefficients: RowCoefficients | None = None) -> tuple[Walk, Shard]:
    """Over all columns, or over the true ones if their number is known; and the arrays."""
    x, columns, padded_from = operands, call.columns, operands.num_columns
    if isinstance(padded_from, int):
        columns, padded_from = padded_from, None
    shard = Shard(
        tokens=(HeadTokens(x.hidden, x.inverse_temperature, x.raw_scale),),
        heads=(Head(x.weight, x.bias, x.adapter),),
        rows=_Rows(x.targets, x.candidates, x.floor, coefficients),
        num_rows=x.num_rows,
        num_columns=padded_from,
    )
    return Walk((call,), columns, *_walk.tile_sizes(call)), shard
