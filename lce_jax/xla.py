"""The implementation for every device: plain XLA, one [tile_t, tile_v] tile of logits at a time.

For each token tile and vocabulary tile: one matrix product, its statistics (eq. 1), a merge (eq. 2). The backward
recomputes the product, turns it into dlogits (eqs. 4, 5) and feeds the two gradient products. Both walk the tiles in
`lax.fori_loop`, so exactly one tile of logits exists at a time, whatever the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math, _repeats, _statistics, _xla_plan, _xla_tiles, _xla_topk
from lce_jax._one_part import merged as merged
from lce_jax._one_part import per_token as per_token
from lce_jax._one_part import selected as selected
from lce_jax._plans import ALONE, Plan, Surroundings
from lce_jax._statistics import Parts, along
from lce_jax._types import Case, Operands, Options, Primals, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

NAME = "xla"


def supports(case: Case) -> str | None:
    """Why this implementation cannot serve ``case``: never, it serves everything."""
    del case
    return None


def unproven(case: Case) -> str | None:
    """None: it is plain JAX."""
    del case
    return None


def plan(case: Case, around: Surroundings = ALONE) -> Plan:
    """Tiles and bytes."""
    if case.options.top_k:
        return _xla_topk.plan(case, NAME, around)
    return _xla_plan.plan(case, NAME, around)


class _Tokens(NamedTuple):
    """The operands of some tokens."""

    hidden: Float[Array, "t H"]
    targets: Int[Array, "t"]
    inverse_temperature: Float[Array, "t"] | None
    raw_scale: Float[Array, "t"] | None
    candidates: Int[Array, "t K"] | None
    rows: Any = None  # `RowCoefficients`, in the backward


class _Columns(NamedTuple):
    """Some columns of the vocabulary."""

    start: Any  # the first of them
    weight: Float[Array, "v H"]
    bias: Float[Array, "v"] | None
    live: Bool[Array, "v"] | None  # which of them are not padding; None: all


def statistics(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, None]:
    """Eq. 1 of the whole shard, [T] each; nothing is cached."""
    del keep_cache
    tile_t, _ = _xla_plan.tile_sizes(case)
    tokens = _tokens(operands)
    if tile_t == case.num_tokens:
        return _token_tile_statistics(operands, case, tokens), None

    def body(i: Array, stats: ShardStatistics) -> ShardStatistics:
        start, _ = _xla_tiles.token_start(i, tile_t, case.num_tokens)
        tile = _token_tile_statistics(operands, case, _slice(tokens, start, tile_t))
        return jax.tree.map(lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), stats, tile)

    empty = _compat.vary_like(_statistics.empty(case.num_tokens, case.stat_dtype, case.options), operands)
    return lax.fori_loop(0, _xla_tiles.num_token_tiles(operands.num_rows, tile_t, case.num_tokens), body, empty), None


def _token_tile_statistics(operands: Operands, case: Case, tokens: _Tokens) -> ShardStatistics:
    """Eq. 1 of some tokens, over one tile of the vocabulary after the other."""
    options, scale = case.options, _math.row_scale(case.options, tokens.inverse_temperature)

    def vocab_tile(start: Any, size: int, running: _statistics.Running) -> _statistics.Running:
        columns = _columns(operands, start, size, options)
        x = _math.unscaled_logits(_raw(tokens, columns, case), options, tokens.raw_scale)
        ids = _relative(tokens, start)
        tile = _math.tile_statistics(x, scale, ids.targets, columns.live, options, ids.candidates)
        return running.add(tile, scale)

    empty = _statistics.empty(tokens.hidden.shape[0], case.stat_dtype, options)
    running = _compat.vary_like(_statistics.Running.start(empty), (tokens.hidden, operands))
    return _walk_vocabulary(case, operands, vocab_tile, running).finish()


def in_parts(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[Parts, None]:
    """One part."""
    return _statistics.as_parts(statistics(operands, case, keep_cache)[0]), None


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: None = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Float[Array, "V H"] | None = None,
) -> Primals:
    """Eq. 5: dhidden and dbias in the statistics' dtype, which the caller sums and rounds once.

    dweight is rounded, or added to the sum ``dweight``.
    """
    del cache, may_round_dhidden, may_overwrite_cache
    # The barrier puts all this after the forward's results. Otherwise XLA keeps what both passes compute, and allocates
    # the gradients from the start, although the forward's tiles could use their memory.
    hidden, weight, rows, zero = lax.optimization_barrier((operands.hidden, operands.weight, rows, jnp.float32(0)))
    operands, rows = _repeats.each_once(operands._replace(hidden=hidden, weight=weight), rows)
    options = case.options
    tokens = _tokens(operands)._replace(rows=rows)
    dtype = case.dtype if dweight is None else dweight.dtype

    def vocab_tile(start: Any, size: int, carry: Primals) -> Primals:
        columns = _columns(operands, start, size, options)
        part = _columns_gradients(operands, case, tokens, columns, carry.hidden, dtype)
        dcolumns = part.weight.astype(dtype)
        if dweight is not None:
            dcolumns += lax.dynamic_slice_in_dim(carry.weight, start, size, options.vocab_dim)
        written = lax.dynamic_update_slice_in_dim(carry.weight, dcolumns, start, options.vocab_dim)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return Primals(part.hidden, written, jax.tree.map(put, carry.bias, part.bias))

    init = Primals(
        jnp.full(hidden.shape, zero.astype(case.stat_dtype)),
        jnp.full(weight.shape, zero.astype(case.dtype)) if dweight is None else dweight,
        None if operands.bias is None else jnp.zeros(operands.bias.shape, case.stat_dtype),
    )
    return _walk_vocabulary(case, operands, vocab_tile, _compat.vary_like(init, (operands, rows)))


def _columns_gradients(
    operands: Operands,
    case: Case,
    tokens: _Tokens,
    columns: _Columns,
    dhidden: Float[Array, "T H"],
    dweight_dtype: jnp.dtype,
) -> Primals:
    """``dhidden`` plus the part of some columns, and the gradients of these columns.

    With one token tile the product itself rounds dweight; with several it is summed first.
    """
    tile_t, _ = _xla_plan.tile_sizes(case)
    if tile_t == case.num_tokens:
        part = _tile_gradients(case, tokens, columns, dweight_dtype)
        return part._replace(hidden=dhidden + part.hidden)

    def body(i: Array, carry: Primals) -> Primals:
        start, first = _xla_tiles.token_start(i, tile_t, case.num_tokens)
        tile = _slice(tokens, start, tile_t)
        part = _tile_gradients(case, tile._replace(rows=_drop_leading(tile.rows, first)), columns, case.stat_dtype)
        dhidden = part.hidden + lax.dynamic_slice_in_dim(carry.hidden, start, tile_t)
        dhidden = lax.dynamic_update_slice_in_dim(carry.hidden, dhidden, start, 0)
        return Primals(dhidden, carry.weight + part.weight, jax.tree.map(jnp.add, carry.bias, part.bias))

    of_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, case.stat_dtype), (columns.weight, columns.bias))
    init = Primals(dhidden, *_compat.vary_like(of_columns, (operands, tokens.rows)))
    return lax.fori_loop(0, _xla_tiles.num_token_tiles(operands.num_rows, tile_t, case.num_tokens), body, init)


def _tile_gradients(case: Case, tokens: _Tokens, columns: _Columns, dweight_dtype: jnp.dtype) -> Primals:
    """Eq. 5 of one tile: recomputed logits, their gradient, and its products."""
    options = case.options
    x = _math.unscaled_logits(_raw(tokens, columns, case), options, tokens.raw_scale)
    scale = _math.row_scale(options, tokens.inverse_temperature)
    weight = _math.without_padding(columns.weight, columns.live, options)
    ids = _relative(tokens, columns.start)
    d = _math.dlogits(x, scale, tokens.rows, ids.targets, columns.live, options, ids.candidates)
    dbias = None if columns.bias is None else jnp.sum(d, axis=0)
    d, weight, hidden = (x.astype(_xla_tiles.gradient_dtype(case)) for x in (d, weight, tokens.hidden))
    dhidden = _xla_tiles.dot(d, weight, 1, options.vocab_dim, options.precision, case.stat_dtype)
    left, right = (d, hidden) if options.vocab_dim == 0 else (hidden, d)
    return Primals(dhidden, _xla_tiles.dot(left, right, 0, 0, options.precision, dweight_dtype), dbias)


def _raw(tokens: _Tokens, columns: _Columns, case: Case) -> Float[Array, "t v"]:
    options = case.options
    raw = _xla_tiles.dot(tokens.hidden, columns.weight, 1, options.hidden_dim, options.precision, case.stat_dtype)
    return raw if columns.bias is None else raw + columns.bias[None, :]


def _tokens(operands: Operands) -> _Tokens:
    return _Tokens(
        operands.hidden, operands.targets, operands.inverse_temperature, operands.raw_scale, operands.candidates
    )


def _relative(tokens: _Tokens, start: Any) -> _Tokens:
    """The tokens with ids that count from column ``start``: those of its tile lie in [0, size), the others outside."""
    candidates = None if tokens.candidates is None else tokens.candidates - start
    return tokens._replace(targets=tokens.targets - start, candidates=candidates)


def _slice(tokens: _Tokens, start: Any, size: int) -> _Tokens:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tokens)


def _columns(operands: Operands, start: Any, size: int, options: Options) -> _Columns:
    """``size`` columns from ``start`` on, without a mask if the walk itself stops at the last true one."""
    weight = lax.dynamic_slice_in_dim(operands.weight, start, size, axis=options.vocab_dim)
    bias = None if operands.bias is None else lax.dynamic_slice_in_dim(operands.bias, start, size)
    masked = not isinstance(operands.num_columns, int)
    return _Columns(start, weight, bias, _math.live_columns(start, size, operands.num_columns) if masked else None)


def _walk_vocabulary[C](case: Case, operands: Operands, body: Callable[[Any, int, C], C], carry: C) -> C:
    _, tile_v = _xla_plan.tile_sizes(case)
    columns = operands.num_columns if isinstance(operands.num_columns, int) else case.vocab_size
    return _xla_tiles.walk_vocabulary(columns, tile_v, body, carry)


def _drop_leading(rows: RowCoefficients, first: Array) -> RowCoefficients:
    """Zero coefficients before row ``first``, so that rows of two tiles count once."""
    keep = jnp.arange(rows.max.shape[0], dtype=jnp.int32) >= first
    return jax.tree.map(lambda x: jnp.where(along(keep, x), x, 0.0), rows)
