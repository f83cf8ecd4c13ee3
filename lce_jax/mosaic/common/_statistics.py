"""The forward's kernels: the statistics of each tile of logits, of one head (eq. 1) or two (eq. 6).

Statistics are computed in base 2, because exp2 is one instruction; log2(e) is a factor of the row's scale. Each tile
stores its own statistics per token, which `_join` merges (eq. 2). With a cache, a tile's exponentials are rounded and
stored through shared memory. They are relative to the tile's own maximum, which is cached too. A mixture of two heads
has a second pass over the same tiles, for the sums of eq. 9 or 11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import Direction, KLStatistics
from lce_jax.mathematics._logprobs import FP16_SHIFT
from lce_jax.mathematics._statistics import MASKED, SUMS, make_statistics
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import Cache, KLCache
from lce_jax.mosaic._operands import FLOOR, KLOperands, Prepared, Span, make_geometry
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common import _heads, _logits, _tiles
from lce_jax.mosaic.common._epilogue_steps import (
    ACCUMULATOR,
    TokenRows,
    make_staging,
    mask_padding,
    min_unpadded,
    send,
    warpgroup_rows,
)
from lce_jax.mosaic.common._heads import (
    BLOCKS,
    RATIOS,
    STRIP,
    Hold,
    KLRefs,
    KLWhere,
    MixtureFactors,
    MixtureRows,
    Multiply,
    along,
    compute_x,
    scale_difference,
    skip_padding,
    store_references,
    take_block,
    take_strip,
)
from lce_jax.mosaic.common._logits import FOLDED, PADDING, apply_softcap
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS, TILE_N, TILING, WARPGROUP_ROWS, Matmul, Tile, multiple_of
from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


def statistics(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    call: Call,
    span: Int[Array, "fields"],
    parts: Float[Array, "tiles fields Tp"],
    cache: Cache | None,
    adapter: Float[Array, "V R"] | None = None,
) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
    """Writes the statistics of the span's tiles to ``parts``, and their exponentials to the cache, if any.

    ``weight``, and the B of an ``adapter``, hold the span's columns from its offset on.
    """
    machine, matmul = generation.machine, _logits.make_matmul(call, generation.tunings.of(call, "forward"))
    updated = [parts, *jax.tree.leaves(cache)]
    operands = [
        prepared.hidden, weight, prepared.targets, prepared.row_scale, prepared.holds_target, prepared.mask, span,
    ]  # fmt: skip
    operands += [x for x in (prepared.floor, adapter) if x is not None]
    run = machine.kernel(
        matmul,
        functools.partial(_kernel, machine, matmul),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        "lce_statistics" if cache is None else "lce_statistics_cached",
        updated={len(operands) + i: i for i in range(len(updated))},
    )
    parts, *updated_cache = run(*operands, *updated)
    return parts, Cache(*updated_cache) if updated_cache else None


class StatisticsRefs(NamedTuple):
    """The arrays that the epilogue reads and writes."""

    targets: Any  # [Tp]
    row_scale: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    mask: Any  # [512], or [1024] if the vocabulary has parts
    partial: Any  # [tiles, fields, Tp]
    cache: Any  # a `Cache` of refs, or None
    floor: Any  # [Tp], or None


class StatisticsWhere(NamedTuple):
    """The place of a tile of logits."""

    column: Any  # the tile's first column in the shard
    launched: Any  # the tile's number in the launch
    first_tile: Any  # the number of the launch's first tile in the shard
    first_slot: Any  # the place of the launch's first tile in the array of partial statistics
    edge: Any  # the arguments of `mask_padding`: the tile's first column, the number of unpadded columns, the mask

    @property
    def number(self) -> Any:
        """The tile's number in the shard."""
        return self.first_tile + self.launched

    @property
    def slot(self) -> Any:
        """The tile's place in the array of partial statistics."""
        return self.first_slot + self.launched


def _kernel(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,
    row_scale: Any,
    holds_target: Any,
    mask: Any,
    scalars: Any,  # a `Span`
    *refs: Any,  # the floor and B, each if any; then the results, as inputs and as outputs
) -> None:
    has_floor, num_operands = matmul.call.has_floor, matmul.call.has_floor + (matmul.call.rank > 0)
    floor, adapter, results = (
        refs[0] if has_floor else None,
        refs[has_floor:num_operands],
        refs[num_operands:],
    )
    # Updated inputs alias the outputs: [tiles, fields, Tp] and the cache, if any.
    partial, *cached = results[len(results) // 2 :]
    cache: Any = Cache(*cached) if cached else None
    tile_refs, span = (
        StatisticsRefs(targets, row_scale, holds_target, mask, partial, cache, floor),
        Span.unpack(scalars),
    )
    first_tile, shape = _logits.first_tile(span), make_geometry(matmul.call, TILING)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        number = tile.vocabulary_tile
        column = span.column + (number * TILE_N if shape.has_parts else tile.column)
        edge: Any = (column, span.num_columns, mask)
        if shape.has_parts:
            edge = _tiles.edge(shape, first_tile + number, span.num_columns, mask)
        where = StatisticsWhere(column, number, first_tile, span.slot, edge)
        write_statistics(matmul.call, tile_refs, tile, where, multiply, slots)

    slots = None if cache is None else make_staging(machine, matmul, TILE_N, hidden.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *adapter)


def sum_block(call: Call, u: Array, e: Array) -> list[Array]:
    """Computes a block's `SUMS`, those that the call has, in their order."""
    return [jnp.sum(one.term(u, e), axis=1) for name, one in SUMS.items() if name in call.statistics]


def collect_sums(call: Call, sums: Sequence[Array], **fields: Array | None) -> ShardStatistics:
    """Returns a tile's statistics from its `SUMS` and the other fields."""
    names = [name for name in SUMS if name in call.statistics]
    return make_statistics(fields | dict(zip(names, sums, strict=True)))


def store_statistics(
    refs: StatisticsRefs, where: StatisticsWhere, rows: Callable[[], Any], stats: ShardStatistics
) -> None:
    """Stores a tile's statistics of these rows. ``rows()`` computes where they are, at each use."""
    for i, field in enumerate(jax.tree.leaves(stats)):
        refs.partial.at[where.slot, i, rows()][...] = field


def shift_exponentials(e: Array, dtype: Any) -> Array:
    """Scales a tile's exponentials for the cache. In float16 they are multiplied by a power of 2 to use its range."""
    return e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e


def write_statistics(
    call: Call, refs: StatisticsRefs, tile: Tile, where: StatisticsWhere, multiply: Any, slots: Any
) -> None:
    """Computes eq. 1 on a warpgroup's part of a tile from its products, and stores the statistics and the cache."""
    rows = TokenRows(refs, tile, where)
    row_scale, target, holds, floor = rows.load_scale(), rows.load_target(), rows.holds_target(), rows.load_floor()
    x = apply_softcap(call, multiply())
    lowest = _find_min(call, x, where, floor)
    x = mask_padding(x, *where.edge)
    label = _find_label_below_floor(x, target, holds, floor)
    x = ACCUMULATOR.apply_floor(x, floor)
    highest = _find_max(x, label)
    # With a cache, the target's logit is read before the exponentials, so that x is freed block by block. Without a
    # cache it is read after them. In either case, the opposite order would spill registers.
    if refs.cache is None:
        sums = _sum_tile(call, x, row_scale, highest)
        at_target = _find_target(x, target, holds, label)
    else:
        at_target = _find_target(x, target, holds, label)
        output = refs.cache.exponentials
        send = functools.partial(_send_exponentials, slots, rows.place(), output, where.column)
        sums = _sum_tile(call, x, row_scale, highest, send)
        refs.cache.max.at[where.number, rows.place()][...] = highest
    lowest, support = _measure_support(call, x, floor, lowest)
    if floor is not None:  # the target is loaded again, so that no register holds it during the sums
        target = rows.load_target()
    at_target = jnp.where(_is_in_tile(target), (at_target - highest) * row_scale, -jnp.inf)
    stats = collect_sums(call, sums, max=highest, target=at_target, min=lowest, support=support)
    store_statistics(refs, where, rows.place, stats if label is None else label.add_to(stats, row_scale))


def _find_min(
    call: Call, x: Float[Array, "64 256"], where: StatisticsWhere, floor: Float[Array, "64"] | None
) -> Float[Array, "64"] | None:
    """Returns the smallest logit of each row, if ``stats`` requests it and `_measure_support` does not compute it."""
    return min_unpadded(x, *where.edge) if call.stats and floor is None else None


def _find_max(x: Float[Array, "64 256"], label: LabelBelowFloor | None) -> Float[Array, "64"]:
    """Returns the largest logit of each row (the m of eq. 1), labels below the floor included."""
    highest = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    return highest if label is None else jnp.maximum(highest, label.or_else(FLOOR))


def _find_target(
    x: Float[Array, "64 256"], target: Float[Array, "64"], holds: Any, label: LabelBelowFloor | None
) -> Float[Array, "64"]:
    """Returns the unscaled logit at each row's target. With a floor, it is that of `_find_label_below_floor`."""
    return _select_target(x, target, holds) if label is None else label.x


def _select_target(x: Float[Array, "64 256"], target: Float[Array, "64"], holds: Any) -> Float[Array, "64"]:
    """Returns the unscaled logit at each row's target; 0 in rows without one. Tiles without any target skip this."""

    def select() -> Array:
        return functools.reduce(
            jnp.add, (jnp.where(there, x, 0.0) for there, x in ACCUMULATOR.compare_labels(x, target))
        )

    def skip() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, FOLDED), jnp.float32), ACCUMULATOR.layout)

    return jnp.sum(lax.cond(holds, select, skip), axis=1)


def _is_in_tile(target: Float[Array, "64"]) -> Bool[Array, "64"]:
    return (target >= 0) & (target < TILE_N)


class LabelBelowFloor(NamedTuple):
    """The labels of a tile that are below their row's floor. Each is one more column than those that reach it."""

    there: Bool[Array, "64"]  # whether the row has such a label
    x: Float[Array, "64"]  # the x of all labels in the tile; arbitrary in rows without a label there

    def or_else(self, value: float) -> Float[Array, "64"]:
        """Returns the label's x, or ``value`` in rows without such a label."""
        return jnp.where(self.there, self.x, value)

    def add_to(self, stats: ShardStatistics, row_scale: Float[Array, "64"]) -> ShardStatistics:
        """Adds the label to statistics of the columns that reach the floor. ``stats.max`` already includes it."""
        u = (self.x - stats.max) * row_scale
        e = jnp.where(self.there, jnp.exp2(u), 0.0)
        there = {name: getattr(stats, name) for name in SUMS}
        sums: Any = {name: None if x is None else x + SUMS[name].term(u, e) for name, x in there.items()}
        return stats._replace(
            **sums,
            min=None if stats.min is None else jnp.minimum(stats.min, self.or_else(-PADDING)),
            support=None if stats.support is None else stats.support + jnp.where(self.there, 1.0, 0.0),
        )


def _find_label_below_floor(
    x: Float[Array, "64 256"], target: Float[Array, "64"], holds: Any, floor: Float[Array, "64"] | None
) -> LabelBelowFloor | None:
    """Returns the labels below ``floor``; None without a floor."""
    if floor is None:
        return None
    at_target = _select_target(x, target, holds)
    return LabelBelowFloor(_is_in_tile(target) & (at_target < floor), at_target)


def _measure_support(
    call: Call, x: Float[Array, "64 256"], floor: Float[Array, "64"] | None, lowest: Float[Array, "64"] | None
) -> tuple[Float[Array, "64"] | None, Float[Array, "64"] | None]:
    """Returns, per row, the smallest logit at or above the floor, and their number; ``lowest`` without a floor."""
    if floor is None or not call.stats:
        return lowest, None
    blocks = [_measure_block(x[:, start : start + STAGING_COLUMNS]) for start in range(0, TILE_N, STAGING_COLUMNS)]
    minima, counts = zip(*blocks, strict=True)
    return functools.reduce(jnp.minimum, minima), functools.reduce(jnp.add, counts)


def _measure_block(x: Float[Array, "64 n"]) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """Returns the smallest logit and the number of logits in each row of a block, both without `PADDING`."""
    reaches = x > 0.5 * PADDING
    lowest = jnp.min(jnp.where(reaches, x, -PADDING), axis=1)
    return lowest, jnp.sum(jnp.where(reaches, 1.0, 0.0), axis=1)


def _sum_tile(call: Call, x: Array, row_scale: Array, highest: Array, send: Any = None) -> list[Array]:
    """Computes the `SUMS` of a tile, block by block, and passes each block's exponentials to ``send``, if any.

    u is computed by a subtraction and a product. One fused multiply-add would be faster, but not exactly 0 at the
    largest x.
    """
    sums: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = x[:, start : start + STAGING_COLUMNS] - ACCUMULATOR.along_rows(highest, STAGING_COLUMNS)
        u = u * ACCUMULATOR.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = sum_block(call, u, e)
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if send is not None:
            send(i, e)
    return sums


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    send(shift_exponentials(e, output.dtype), i, slots, rows, output, column + i * STAGING_COLUMNS)


def kl_statistics(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    span: Int[Array, "fields"],
    parts: Float[Array, "n 6 Tp"],
    cache: KLCache | None,
    direction: Direction,
) -> tuple[Float[Array, "n 6 Tp"], KLCache | None]:
    """Writes the `KLStatistics` of the span's tiles to ``parts``, with ``cross`` in base 2. Fills the cache, if any.

    A tile that is only padding gets a maximum of `_operands.FLOOR` and sums of 0. Tiles after the span, and row blocks
    without an unmasked row, are not written. The first of ``calls`` is that of p.
    """
    inputs, updated = _heads.pack_operands(operands, span), [parts, *jax.tree.leaves(cache)]
    names = "kl_statistics", "lce_kl_statistics" if cache is None else "lce_kl_statistics_cached"
    epilogue = functools.partial(write_kl_statistics, direction)
    parts, *updated_cache = _heads.update_tiles(generation, calls, epilogue, *names, inputs, updated)
    return parts, KLCache(*updated_cache) if updated_cache else None


def kl_mixture_sums(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "14 Tp"],
    span: Int[Array, "fields"],
    parts: Float[Array, "n 2 Tp"],
    direction: Direction,
) -> Float[Array, "n 2 Tp"]:
    """Writes the `MixtureSums` of the span's tiles to ``parts``, in base 2. ``factors`` are the `MixtureFactors`.

    A tile that is only padding gets sums of 0. Tiles after the span, and row blocks without an unmasked row, are not
    written.
    """
    inputs, names = [*_heads.pack_operands(operands, span), factors], ("kl_mixture_sums", "lce_kl_mixture_sums")
    epilogue = functools.partial(write_mixture_sums, direction)
    return _heads.update_tiles(generation, calls, epilogue, *names, inputs, [parts])[0]


def write_kl_statistics(
    direction: Direction, refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """Computes both heads' statistics of a warpgroup's part of a tile from its products, and stores them."""
    rows = functools.partial(warpgroup_rows, tile.row)  # computed at each use, so that no register holds it
    p, q = refs.heads
    x = compute_x(p.call, multiply[0](), refs.mask, where)
    max_p = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    held = hold(x)
    x = compute_x(q.call, multiply[1](), refs.mask, where)
    max_q = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    at_p = functools.reduce(jnp.maximum, [_x_at_max(held.block(i), max_p, take_block(x, i)) for i in range(BLOCKS)])
    references = max_p, max_q, at_p
    row_scales = ACCUMULATOR.load_rows(p.row_scale, rows()), ACCUMULATOR.load_rows(q.row_scale, rows())
    sums: list[Array] = []
    for column in range(0, TILE_N, STRIP):  # narrow strips, because the cached values need registers too
        *terms, ratio = _terms((held.strip(column), take_strip(x, column)), references, row_scales, direction)
        parts = [jnp.sum(term, axis=1) for term in terms]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if refs.cache is not None:
            _cache_strip(refs.cache, rows, where.column + column, _cached_exponential(direction, *terms[:2]), ratio)
    stats = KLStatistics(*references, *sums)
    _heads.store_fields(refs, where, rows, stats)
    if refs.cache is not None:
        store_references(refs.cache, where, rows, stats)


def _terms(
    x: tuple[Array, Array],
    references: tuple[Array, Array, Array],
    row_scales: tuple[Array, Array],
    direction: Direction,
) -> tuple[Array, Array, Array, Array]:
    """Returns the terms of the three sums, and the ratio to cache (`mathematics._kl.CachedRatios`)."""
    u_p = scale_difference(x[0], references[0], row_scales[0])
    e_p = jnp.exp2(u_p)
    # If e is 0, v may be infinite, and 0 · inf is NaN.
    to_v = u_p - scale_difference(x[1], references[2], row_scales[1])
    cross = jnp.where(e_p > 0.0, e_p * to_v, 0.0)
    u_q = scale_difference(x[1], references[1], row_scales[1])
    return e_p, jnp.exp2(u_q), cross, -to_v if direction == "reverse" else u_q - u_p


def _cached_exponential(direction: Direction, e_p: Array, e_q: Array) -> Array:
    return jnp.maximum(e_p, e_q) if direction == "forward" else e_p


def _cache_strip(cache: KLCache, rows: Callable[[], Any], column: Any, e: Array, ratio: Array) -> None:
    """Stores a strip of `mathematics._kl.CachedRatios` directly from registers, not through shared memory."""
    columns = pl.ds(multiple_of(column, STRIP), STRIP)
    for output, values in (cache.e, shift_exponentials(e, cache.e.dtype)), (cache.ratio, ratio):
        _pallas.store(output.at[rows(), columns], values.astype(output.dtype))


def _x_at_max(x_p: Float[Array, "64 n"], max_p: Float[Array, "64"], x_q: Float[Array, "64 n"]) -> Float[Array, "64"]:
    """Returns the x of q in the column where x of p is ``max_p``, if this block has that column."""
    return jnp.max(jnp.where(x_p == along(max_p), x_q, MASKED), axis=1)


def write_mixture_sums(
    direction: Direction, refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """Computes the sums of a mixture over a warpgroup's part of a tile from its products, and stores them."""
    rows = functools.partial(warpgroup_rows, tile.row)
    p, q = refs.heads
    held = hold(compute_x(p.call, multiply[0](), refs.mask, where))
    x = compute_x(q.call, multiply[1](), refs.mask, where)
    is_above_half = refs.factors[MixtureFactors._fields.index("is_above_half"), 0] > 0.0

    def add_strip(column: int, sums: list[Array]) -> list[Array]:
        strip_rows = MixtureRows(refs, rows)
        ratios = RATIOS[direction].of((held.strip(column), take_strip(x, column)), strip_rows)
        terms = ratios.terms(strip_rows, is_above_half)
        return [total + jnp.sum(term, axis=1) for total, term in zip(sums, terms, strict=True)]

    zeros = jnp.zeros_like(ACCUMULATOR.load_rows(p.row_scale, rows()))
    sums = [zeros, zeros]
    for column in range(0, TILE_N, STRIP):
        sums = skip_padding(where, column, functools.partial(add_strip, column), lambda sums: sums, sums)
    _heads.store_fields(refs, where, rows, sums)
