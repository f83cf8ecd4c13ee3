"""The implementation for every device: plain XLA, one [tile_t, tile_v] tile of logits at a time.

For each token tile and vocabulary tile: one matrix product, its statistics (eq. 1), a merge (eq. 2). The backward
recomputes the product, turns it into dlogits (eqs. 4, 5) and feeds the two gradient products. Both walk the tiles in
`lax.fori_loop`, so exactly one tile of logits exists at a time, whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math, _statistics, _xla_plan
from lce_jax._types import ALONE, Case, Operands, Options, Plan, RowCoefficients, ShardStatistics, Surroundings

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

NAME = "xla"
type _Gradients = tuple[Array, Array, Array | None]  # of hidden, weight (or some columns of it) and bias


def supports(case: Case) -> str | None:
    """Why this implementation cannot serve ``case``: never, it serves everything."""
    del case
    return None


def plan(case: Case, around: Surroundings = ALONE) -> Plan:
    """Tiles and bytes."""
    return _xla_plan.plan(case, NAME, around)


def statistics(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, None]:
    """Eq. 1 of the whole shard, [T] each; nothing is cached."""
    del keep_cache
    options = case.options
    tile_t, tile_v = _xla_plan.tile_sizes(case)

    def token_tile(
        hidden: Array, targets: Array, inverse_temperature: Array | None, raw_scale: Array | None
    ) -> ShardStatistics:
        scale = _math.row_scale(options, inverse_temperature)

        def vocab_tile(start: Any, size: int, running: _statistics.Running) -> _statistics.Running:
            bias = _bias_columns(operands.bias, start, size)
            raw = _raw(hidden, _columns(operands.weight, start, size, options), bias, case)
            x = _math.unscaled_logits(raw, options, raw_scale)
            live = _live(start, size, operands.num_columns)
            return running.add(_math.tile_statistics(x, scale, targets - start, live, options), scale)

        empty = _statistics.empty(hidden.shape[0], case.stat_dtype, options)
        running = _compat.vary_like(_statistics.Running.start(empty), (hidden, operands))
        return _statistics.to_logits(_walk_vocabulary(case, operands, tile_v, vocab_tile, running).finish(), scale)

    per_token = (operands.hidden, operands.targets, operands.inverse_temperature, operands.raw_scale)
    if tile_t == case.num_tokens:
        return token_tile(*per_token), None

    def body(i: Array, stats: ShardStatistics) -> ShardStatistics:
        start, _ = _token_start(i, tile_t, case.num_tokens)
        tile = token_tile(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, tile_t), per_token))
        return jax.tree.map(lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), stats, tile)

    empty = _compat.vary_like(_statistics.empty(case.num_tokens, case.stat_dtype, options), operands)
    return lax.fori_loop(0, _num_token_tiles(operands.num_rows, tile_t, case.num_tokens), body, empty), None


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: None = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"], Float[Array, "V"] | None]:
    """Eq. 5: dhidden in the statistics' dtype, for the caller to reduce and round once, and dweight in the weight's.

    And dbias, where there is a bias, in the statistics' dtype.
    """
    del cache, may_round_dhidden, may_overwrite_cache
    # After the forward's results, or XLA would hold what both passes compute in between, and the gradients' memory,
    # where the forward's tiles can lie, from the start.
    hidden, weight, rows, zero = lax.optimization_barrier((operands.hidden, operands.weight, rows, jnp.float32(0)))
    operands = operands._replace(hidden=hidden, weight=weight)
    options = case.options
    tile_t, tile_v = _xla_plan.tile_sizes(case)
    one_token_tile = tile_t == case.num_tokens
    # With one token tile dweight is rounded by the product itself; with several it is summed first.
    dweight_dtype = case.dtype if one_token_tile else case.stat_dtype

    def tile(
        start_v: Any,
        weight: Array,
        hidden: Array,
        targets: Array,
        inverse_temperature: Array | None,
        raw_scale: Array | None,
        rows: RowCoefficients,
    ) -> tuple[Array, Array, Array | None]:
        size = weight.shape[options.vocab_dim]
        raw = _raw(hidden, weight, _bias_columns(operands.bias, start_v, size), case)
        z, dcap = _math.transform_logits(raw, options, inverse_temperature, raw_scale)
        live = _live(start_v, size, operands.num_columns)
        weight = _math.without_padding(weight, live, options)
        d = _math.dlogits(z, dcap, rows, targets - start_v, live)
        dbias = None if operands.bias is None else jnp.sum(d, axis=0)
        d, weight, hidden = (x.astype(_gradient_dtype(case)) for x in (d, weight, hidden))
        dhidden = _dot(d, weight, 1, options.vocab_dim, case, case.stat_dtype)
        left, right = (d, hidden) if options.vocab_dim == 0 else (hidden, d)
        return dhidden, _dot(left, right, 0, 0, case, dweight_dtype), dbias

    def vocab_tile(start_v: Any, size: int, carry: _Gradients) -> _Gradients:
        dhidden, dweight, dbias = carry
        weight = _columns(operands.weight, start_v, size, options)
        per_token = (operands.hidden, operands.targets, operands.inverse_temperature, operands.raw_scale, rows)
        if one_token_tile:
            part, dcolumns, dbias_part = tile(start_v, weight, *per_token)
            dhidden = dhidden + part
        else:

            def body(i: Array, carry: _Gradients) -> _Gradients:
                dhidden, dcolumns, dbias_part = carry
                start, first = _token_start(i, tile_t, case.num_tokens)
                hidden, targets, inverse_temperature, raw_scale, part_rows = jax.tree.map(
                    lambda x: lax.dynamic_slice_in_dim(x, start, tile_t), per_token
                )
                part_rows = _drop_leading(part_rows, first)
                part, dpart, more = tile(start_v, weight, hidden, targets, inverse_temperature, raw_scale, part_rows)
                part = part + lax.dynamic_slice_in_dim(dhidden, start, tile_t)
                dhidden = lax.dynamic_update_slice_in_dim(dhidden, part, start, 0)
                return dhidden, dcolumns + dpart, jax.tree.map(jnp.add, dbias_part, more)

            zeros = (jnp.zeros(weight.shape, dweight_dtype), None if dbias is None else jnp.zeros(size, dbias.dtype))
            zeros = _compat.vary_like(zeros, (operands, rows))
            count = _num_token_tiles(operands.num_rows, tile_t, case.num_tokens)
            dhidden, dcolumns, dbias_part = lax.fori_loop(0, count, body, (dhidden, *zeros))
        dcolumns = dcolumns.astype(case.dtype)
        dweight = lax.dynamic_update_slice_in_dim(dweight, dcolumns, start_v, options.vocab_dim)
        if dbias is not None and dbias_part is not None:
            dbias = lax.dynamic_update_slice_in_dim(dbias, dbias_part, start_v, 0)
        return dhidden, dweight, dbias

    init = (
        jnp.full(hidden.shape, zero.astype(case.stat_dtype)),
        jnp.full(weight.shape, zero.astype(case.dtype)),
        None if operands.bias is None else jnp.zeros(operands.bias.shape, case.stat_dtype),
    )
    return _walk_vocabulary(case, operands, tile_v, vocab_tile, _compat.vary_like(init, (operands, rows)))


def _gradient_dtype(case: Case) -> jnp.dtype:
    """Of the gradient products' operands. A CPU affords float32, and so never rounds dlogits to 16 bits at all."""
    return case.stat_dtype if case.device.platform == "cpu" else case.dtype


def _raw(
    hidden: Float[Array, "t H"], weight: Float[Array, "v H"], bias: Float[Array, "v"] | None, case: Case
) -> Float[Array, "t v"]:
    raw = _dot(hidden, weight, 1, case.options.hidden_dim, case, case.stat_dtype)
    return raw if bias is None else raw + bias[None, :]


def _dot(left: Array, right: Array, left_dim: int, right_dim: int, case: Case, dtype: jnp.dtype) -> Array:
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=case.options.precision, preferred_element_type=dtype)


def _columns(weight: Array, start: Any, size: int, options: Options) -> Array:
    return lax.dynamic_slice_in_dim(weight, start, size, axis=options.vocab_dim)


def _bias_columns(bias: Array | None, start: Any, size: int) -> Array | None:
    return None if bias is None else lax.dynamic_slice_in_dim(bias, start, size)


def _live(start: Any, size: int, num_columns: Int[Array, ""] | int | None) -> Array | None:
    """The mask of a tile's true columns; None where the walk itself stops at the last one."""
    return None if isinstance(num_columns, int) else _math.live_columns(start, size, num_columns)


def _walk_vocabulary[C](case: Case, operands: Operands, tile_v: int, body: Callable[[Any, int, C], C], carry: C) -> C:
    """``carry = body(start, size, carry)`` over the vocabulary: what whole tiles leave, then these in a loop.

    In this order, because the loop needs the carry: XLA could begin what comes after it before, and hold it all along.
    """
    columns = operands.num_columns if isinstance(operands.num_columns, int) else case.vocab_size
    whole, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, carry)
    return lax.fori_loop(0, whole, lambda i, c: body(rest + i * tile_v, tile_v, c), carry) if whole else carry


def _num_token_tiles(num_rows: Int[Array, ""] | None, tile_t: int, num_tokens: int) -> Any:
    rows = num_tokens if num_rows is None else num_rows
    return (rows + tile_t - 1) // tile_t


def _token_start(i: Array, tile_t: int, num_tokens: int) -> tuple[Array, Array]:
    """Where tile ``i`` starts, and its first row that no earlier tile had: the last tile reaches back to stay whole."""
    start = jnp.minimum(i * tile_t, num_tokens - tile_t)
    return start, i * tile_t - start


def _drop_leading(rows: RowCoefficients, first: Array) -> RowCoefficients:
    """Zero coefficients before row ``first``, so that rows of two tiles count once.

    The shift stays: without it the exponentials that they multiply would overflow.
    """
    keep = jnp.arange(rows.shift.shape[0], dtype=jnp.int32) >= first
    return jax.tree.map(lambda x: jnp.where(keep, x, 0.0), rows)._replace(shift=rows.shift)
