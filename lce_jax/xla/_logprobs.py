"""The implementation for every device: plain XLA, one tile of logits at a time.

For each tile (a chunk of tokens times some columns), the forward computes a matrix product and the statistics (eq. 1),
and merges these (eq. 2). The backward recomputes the product, turns it into dlogits (eqs. 4, 5), and computes the two
gradient products. The loops are in `_walk`; exactly one tile of logits exists at a time. With ``cache_bytes``, the
forward caches the exponentials of the first tiles. From these, the backward computes dlogits without recomputing the
product.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._statistics import Running
from lce_jax.types._types import Call, Operands, Plan, Primals, RowCoefficients, ShardStatistics
from lce_jax.xla import _topk, _walk
from lce_jax.xla._walk import Head, HeadTokens, LogitTile, Shard, TileCache, Walk

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

NAME = "xla"


def supports(call: Call) -> str | None:
    """Returns None, because this implementation serves every call."""
    del call
    return None


def plan(call: Call) -> Plan:
    """Returns the plan of a call: its tiles and its memory."""
    if call.top_k:
        return _topk.plan(call, NAME)
    return _walk.plan(call, NAME)


class _Rows(NamedTuple):
    """The per-token operands that are not in `HeadTokens`, for some tokens."""

    targets: Int[Array, "t"]
    candidates: Int[Array, "t K"] | None
    floor: Float[Array, "t"] | None
    coefficients: RowCoefficients | None = None  # None in the forward

    def shift(self, start: Int[Array, ""] | int) -> tuple[Array, Array | None, Array | None]:
        """Returns targets and candidates relative to the column ``start``, and the floor unchanged.

        Ids in the tile that begins at ``start`` become indices in [0, size); all others lie outside.
        """
        return self.targets - start, None if self.candidates is None else self.candidates - start, self.floor


def statistics(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, TileCache | None]:
    """Computes the statistics of the shard (eq. 1), [T] each, and caches as many tiles as fit in ``cache_bytes``."""
    (walk, shard), cache = _make_walk(operands, call), None
    if keep_cache and call.cache_budget:
        walk = dataclasses.replace(walk, cached_columns=_walk.count_cached_columns(call, walk.columns, walk.tile_v))
        cache = _walk.empty_cache(walk, shard)

    def add(running: Running, tile: LogitTile, cache: TileCache | None) -> tuple[Running, TileCache | None]:
        (x, row_scale), (targets, *more) = _logits(call, tile), tile.rows.shift(tile.start)
        stats, e = _logprobs.tile_statistics(x, row_scale, targets, tile.unpadded, call, *more)
        if cache is not None and tile.index is not None:
            cache = cache.write(tile, [_logprobs.encode_exponentials(e, _walk.gradient_dtype(call))], [stats.max])
        return running.add(stats, row_scale), cache

    running, cache = walk.fold_with_cache(
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
    """Computes the gradients (eq. 5) in the statistics' dtype, because the caller sums and then rounds them once.

    There are two exceptions. dweight is in the weight's dtype, or is added to the sum ``dweight``. With
    ``may_round_dhidden``, dhidden is in the weight's dtype if dlogits overwrite the cache.
    """
    del adds_dweight  # dweight is always added to the sum

    def dlogits(tile: LogitTile, cache: TileCache | None) -> Float[Array, "t v"]:
        rows = tile.rows.coefficients
        if cache is None or tile.index is None:
            (x, row_scale), (targets, *more) = _logits(call, tile), tile.rows.shift(tile.start)
            return _logprobs.dlogits_from_logits(x, row_scale, rows, targets, tile.unpadded, call, *more)
        ((e,), (highest,)), (targets, candidates, _) = cache.read(tile), tile.rows.shift(tile.start)
        row_scale = _logprobs.compute_row_scale(call, tile.tokens[0].inverse_temperature)
        return _logprobs.dlogits_from_exponentials(
            e, highest, row_scale, rows, targets, tile.unpadded, call, candidates
        )

    if operands.candidates is not None and rows.candidates is not None:
        operands, rows = _logprobs.merge_repeated_candidates(operands, rows)
    walk, shard = _make_walk(operands, call, rows)
    if cache is None:
        return walk.gradients(shard, functools.partial(dlogits, cache=None), dweight)
    walk = dataclasses.replace(walk, cached_columns=cache.num_columns)
    adds, has_padding = dweight is not None, operands.num_columns is not None
    if may_overwrite_cache and _walk.can_overwrite_cache(call, walk.cached_columns, walk.tile_t, has_padding, adds):
        dhidden_dtype = call.dtype if may_round_dhidden else call.stat_dtype
        return _walk.overwrite_cache(walk, shard, cache, dlogits, dhidden_dtype, dweight)
    return walk.gradients(shard, functools.partial(dlogits, cache=cache), dweight)


def _logits(call: Call, tile: LogitTile) -> tuple[Float[Array, "t v"], Float[Array, "t"] | float]:
    """Computes the x and the k (eq. 0) of a tile."""
    (raw,), (tokens,) = tile.products(), tile.tokens
    x = _logprobs.unscaled_logits(raw, call, tokens.raw_scale)
    return x, _logprobs.compute_row_scale(call, tokens.inverse_temperature)


def _make_walk(operands: Operands, call: Call, coefficients: RowCoefficients | None = None) -> tuple[Walk, Shard]:
    """Returns the loop over all columns, or over the unpadded ones if their count is static; and the loop's arrays."""
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
    return Walk((call,), columns, *_walk.choose_tile_sizes(call)), shard
