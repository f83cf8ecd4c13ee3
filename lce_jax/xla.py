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

from lce_jax import _compat, _math
from lce_jax._types import Case, Operands, Options, Plan, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

NAME = "xla"
type _Gradients = tuple[Array, Array, Array | None]  # of hidden, weight (or some columns of it) and bias


def supports(case: Case) -> str | None:
    """Why this implementation cannot serve ``case``: never, it serves everything."""
    del case
    return None


def tile_sizes(case: Case) -> tuple[int, int]:
    """Tokens and vocabulary columns per tile.

    On CPU a tile has at most 4 Mi logits, 16 MiB of float32, and 2048 columns: wider ones leave the caches (50 ms
    against 28 ms forward at T 512, H 256, V 32000 on two cores), narrower ones cut the products short. Its columns of
    the weight are copied too: at few tokens, where these are the larger part, they are half of what the call's logits
    would be, at most, or half a MiB of float32. Elsewhere 64 Mi logits keep a GPU's products large. An eighth of the
    vocabulary is the most, lest a small call hold all its logits. Rows that may be left out are walked in sixteenths;
    off the CPU, where each walk copies the weight, in quarters.
    """
    on_cpu = case.platform == "cpu"
    widest_t, widest_v, budget = (4096, 2048, 4 << 20) if on_cpu else (16384, 1 << 20, 64 << 20)
    tile_t = min(max(case.num_tokens, 1), widest_t)  # a call without tokens is still explained
    if case.compacted:
        least, parts = (256, 16) if on_cpu else (1024, 4)
        tile_t = min(tile_t, max(least, -(-case.num_tokens // parts)))
    tile_v = max(min(budget // tile_t, widest_v, case.vocab_size // 8) // 128 * 128, 512)
    if on_cpu:
        logits = max(case.num_tokens, 1) * case.vocab_size
        tile_v = min(tile_v, max(max(logits // 2, 1 << 17) // case.hidden_size // 128 * 128, 128))
    return tile_t, min(case.vocab_size, tile_v)


def plan(case: Case) -> Plan:
    """Tiles and bytes."""
    tile_t, tile_v = tile_sizes(case)
    return Plan(
        implementation=NAME,
        refused={},
        case=case,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=_forward_bytes(case) if case.num_tokens else 0,
        backward_bytes=_backward_bytes(case) if case.num_tokens else 0,
        kept_bytes=case.statistics_bytes,
        logits_bytes=case.num_tokens * case.vocab_size * case.stat_dtype.itemsize,
        notes=case.options.unused_cache_notes,
    )


def _forward_bytes(case: Case) -> int:
    """What XLA holds at once on CPU: copied columns and a tile of logits, or this tile and its exponentials."""
    tile_t, width, stat = *_widest_tile(case), case.stat_dtype.itemsize
    logits = tile_t * width * stat
    rows = 0 if tile_t == case.num_tokens else tile_t * case.hidden_size * case.dtype.itemsize
    if _widens_operands(case):
        rows += tile_t * case.hidden_size * stat
    for_entropy = logits if case.options.entropy else 0
    vectors = 16 * case.num_tokens * stat  # statistics of all rows, of a tile, and what joins them
    return _own_hidden_bytes(case) + rows + logits + max(_copied_columns_bytes(case), for_entropy) + vectors


def _backward_bytes(case: Case) -> int:
    """What XLA holds at once on CPU, in a backward or in a program of both passes: see `gradients`.

    The gradients' products have operands in the statistics' dtype. An array that fits dhidden's memory lies there.
    """
    tile_t, width, stat = *_widest_tile(case), case.stat_dtype.itemsize
    hidden, part, logits = case.num_tokens * case.hidden_size, tile_t * case.hidden_size * stat, tile_t * width * stat
    columns, copied, own = width * case.hidden_size * stat, _copied_columns_bytes(case), _own_hidden_bytes(case)
    narrow, dweight = case.dtype != case.stat_dtype, case.vocab_size * case.hidden_size
    in_dweight = logits if dweight * case.dtype.itemsize >= logits else 0  # a tile, until dweight is written
    total = logits + 8 * case.num_tokens * stat
    if case.gathers_hidden or own > hidden * case.hidden_dtype.itemsize:
        total += own
    if own or narrow:
        total += hidden * stat  # dhidden, before it is rounded or its rows are put back
    if tile_t < case.num_tokens:  # a tile of hidden and one of dhidden; columns of weight and dweight, and an addend
        total += 2 * part + 3 * columns + (copied if narrow else 0)
    elif narrow and width == case.vocab_size:  # hidden and the weight once more, while dlogits lie in dweight's memory
        total += 2 * part + columns - in_dweight
    elif narrow:  # hidden and the columns once more
        total += part + columns + max(copied, part)
    else:
        total += copied + (part if copied or not own else 0)
    if case.sums_dweight:  # over devices, in the end: until then a tile lies in the memory of the sum
        total += dweight * case.dtype.itemsize - min(dweight * case.dtype.itemsize, max(logits, columns))
        if narrow and case.platform == "cpu":  # where XLA adds 16-bit numbers in float32
            total = max(total, 2 * dweight * stat + own)
    return max(total, _forward_bytes(case) - in_dweight)


def _widest_tile(case: Case) -> tuple[int, int]:
    tile_t, tile_v = tile_sizes(case)
    return tile_t, min(tile_v, case.true_columns or case.vocab_size)


def _own_hidden_bytes(case: Case) -> int:
    """Hidden once more, where it is gathered, cast or multiplied by a sign, or its rows are moved."""
    own = case.compacted or case.gathers_hidden or case.hidden_dtype != case.dtype or case.options.signs_hidden
    return case.num_tokens * case.hidden_size * case.dtype.itemsize if own else 0


def _copied_columns_bytes(case: Case) -> int:
    """A tile's columns of the weight, unless the tile has them all and they need no widening."""
    _, width = _widest_tile(case)
    if _widens_operands(case):
        return width * case.hidden_size * case.stat_dtype.itemsize
    return width * case.hidden_size * case.dtype.itemsize if width < case.vocab_size else 0


def _widens_operands(case: Case) -> bool:
    """Whether XLA multiplies the operands in float32: float16 on CPU. It has products of bfloat16."""
    return case.platform == "cpu" and case.dtype == jnp.float16


def statistics(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, None]:
    """Eq. 1 of the whole shard, [T] each; nothing is cached."""
    del keep_cache
    options = case.options
    tile_t, tile_v = tile_sizes(case)

    def token_tile(
        hidden: Array, targets: Array, inverse_temperature: Array | None, raw_scale: Array | None
    ) -> ShardStatistics:
        scale = _math.row_scale(options, inverse_temperature)

        def vocab_tile(start: Any, size: int, running: _math.Running) -> _math.Running:
            bias = _bias_columns(operands.bias, start, size)
            raw = _raw(hidden, _columns(operands.weight, start, size, options), bias, case)
            x = _math.unscaled_logits(raw, options, raw_scale)
            live = _live(start, size, operands.num_columns)
            return running.add(_math.tile_statistics(x, scale, targets - start, live, options), scale)

        empty = _math.empty_statistics(hidden.shape[0], case.stat_dtype, options)
        running = _compat.vary_like(_math.Running.start(empty), (hidden, operands))
        return _math.to_logits(_walk_vocabulary(case, operands, tile_v, vocab_tile, running).finish(), scale)

    per_token = (operands.hidden, operands.targets, operands.inverse_temperature, operands.raw_scale)
    if tile_t == case.num_tokens:
        return token_tile(*per_token), None

    def body(i: Array, stats: ShardStatistics) -> ShardStatistics:
        start, _ = _token_start(i, tile_t, case.num_tokens)
        tile = token_tile(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, tile_t), per_token))
        return jax.tree.map(lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), stats, tile)

    empty = _compat.vary_like(_math.empty_statistics(case.num_tokens, case.stat_dtype, options), operands)
    return lax.fori_loop(0, _num_token_tiles(operands.num_rows, tile_t, case.num_tokens), body, empty), None


def gradients(
    operands: Operands, case: Case, rows: RowCoefficients, cache: None = None
) -> tuple[Float[Array, "T H"], Float[Array, "V H"], Float[Array, "V"] | None]:
    """Eq. 5: dhidden in the statistics' dtype, for the caller to reduce and round once, and dweight in the weight's.

    And dbias, where there is a bias, in the statistics' dtype.
    """
    del cache
    # After the forward's results, or XLA would hold what both passes compute in between, and the gradients' memory,
    # where the forward's tiles can lie, from the start.
    hidden, weight, rows, zero = lax.optimization_barrier((operands.hidden, operands.weight, rows, jnp.float32(0)))
    operands = operands._replace(hidden=hidden, weight=weight)
    options = case.options
    tile_t, tile_v = tile_sizes(case)
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
    return case.stat_dtype if case.platform == "cpu" else case.dtype


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
