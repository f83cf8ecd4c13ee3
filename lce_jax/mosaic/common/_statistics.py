"""The forward's kernels: the statistics of each tile of logits, of one head (eq. 1) or two (eq. 6).

They are computed from the accumulators in base 2: exp2 is one instruction, and log2(e) is a factor of the row's scale.
Each tile stores its own statistics per token, which `_join` merges (eq. 2). With a cache, a tile's exponentials are
rounded and stored through shared memory. They are relative to the tile's own maximum, which is cached too. A mixture of
two heads has a second pass over the same tiles, for the sums of eq. 9 or 11.
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
from lce_jax.mosaic.common._epilogue import ACCUMULATOR, make_staging, mask_padding, min_unpadded, send, warpgroup_rows
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
from lce_jax.mosaic.common._logits import FOLDED, LabelBelowFloor, measure_support, softcap
from lce_jax.mosaic.common._tiles import STAGING_COLUMNS, TILE_N, TILING, WARPGROUP_ROWS, Matmul, Tile, multiple_of
from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


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

    ``weight`` and ``adapter``, B of an adapter, hold the span's columns at its offset.
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
    parts, *kept = run(*operands, *updated)
    return parts, Cache(*kept) if kept else None


class StatisticsRefs(NamedTuple):
    """The arrays that the epilogue reads and writes."""

    targets: Any  # [Tp]
    row_scale: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    mask: Any  # [512], or [1024] with parts
    partial: Any  # [tiles, fields, Tp]
    cache: Any  # a `Cache` of refs, or None
    floor: Any  # [Tp], or None


class StatisticsWhere(NamedTuple):
    """The place of a tile of logits."""

    column: Any  # the tile's first column in the shard
    number: Any  # the tile's number in the launch
    first_tile: Any  # the number of the launch's first tile in the shard
    first_slot: Any  # the place of the launch's first tile in the array of partial statistics
    edge: Any  # the arguments of `mask_padding`: the tile's first column, the number of unpadded columns, the mask


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
    *refs: Any,  # the floor and B, if any, and the results
) -> None:
    has_floor, num_operands = matmul.call.has_floor, matmul.call.has_floor + (matmul.call.rank > 0)
    floor, adapter, results = (
        refs[0] if has_floor else None,
        refs[has_floor:num_operands],
        refs[num_operands:],
    )
    # Updated inputs alias the outputs: [tiles, fields, Tp] and the cache, if any.
    partial, *kept = results[len(results) // 2 :]
    cache: Any = Cache(*kept) if kept else None
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
    """Computes those `SUMS` of a block of columns that the call has, in their order."""
    return [jnp.sum(one.term(u, e), axis=1) for name, one in SUMS.items() if name in call.statistics]


def collect_sums(call: Call, sums: Sequence[Array], **fields: Array | None) -> ShardStatistics:
    """Returns a tile's statistics from its `SUMS` and the other fields."""
    names = [name for name in SUMS if name in call.statistics]
    return make_statistics(fields | dict(zip(names, sums, strict=True)))


def store_statistics(
    refs: StatisticsRefs, where: StatisticsWhere, rows: Callable[[], Any], stats: ShardStatistics
) -> None:
    """Stores a tile's statistics of these rows. ``rows()`` computes the places at each use."""
    for i, field in enumerate(jax.tree.leaves(stats)):
        refs.partial.at[where.first_slot + where.number, i, rows()][...] = field


def shift_exponentials(e: Array, dtype: Any) -> Array:
    """Scales a tile's exponentials as the cache holds them: in float16 they are shifted to use its range."""
    return e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e


def write_statistics(
    call: Call, refs: StatisticsRefs, tile: Tile, where: StatisticsWhere, multiply: Any, slots: Any
) -> None:
    """Computes the statistics of a warpgroup's part of a tile from its products, and stores them and the cache."""
    rows = functools.partial(warpgroup_rows, tile.row)  # computed at each use, so that no register holds it
    row_scale = ACCUMULATOR.load_rows(refs.row_scale, rows())
    target = ACCUMULATOR.load_rows(refs.targets, rows()) - where.column
    holds = refs.holds_target[tile.row_block, where.first_tile + where.number] > 0
    floor = None if refs.floor is None else ACCUMULATOR.load_rows(refs.floor, rows())
    z = multiply()
    if call.logit_softcap is not None:
        z = softcap(z, call.logit_softcap, call)
    lowest = min_unpadded(z, *where.edge) if call.stats and floor is None else None
    z = mask_padding(z, *where.edge)
    at_target, label = None, None
    if floor is not None:
        at_target = _target_logit(z, target, holds)
        label = LabelBelowFloor.of(at_target, target, floor)
        z = ACCUMULATOR.apply_floor(z, floor)
    highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
    highest = highest if label is None else label.include_in_max(highest)
    # With a cache, the target's logit comes before the exponentials, so that z is freed block by block. Without a cache
    # it comes after them. The other order spills registers, with and without a cache. With a floor it is known already.
    if refs.cache is not None:
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
        send = functools.partial(_send_exponentials, slots, rows(), refs.cache.exponentials, where.column)
        sums = _sum_tile(z, row_scale, highest, call, send)
        refs.cache.max.at[where.first_tile + where.number, rows()][...] = highest
    else:
        sums = _sum_tile(z, row_scale, highest, call, None)
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
    support = None
    if floor is not None and call.stats:
        lowest, support = _measure_support(z)
    if floor is not None:  # the target is loaded again, so that no register holds it during the sums
        target = ACCUMULATOR.load_rows(refs.targets, rows()) - where.column
    owned = (target >= 0) & (target < TILE_N)
    at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
    stats = collect_sums(call, sums, max=highest, target=at_target, min=lowest, support=support)
    store_statistics(refs, where, rows, stats if label is None else label.add_to(stats, row_scale))


def _measure_support(z: Array) -> tuple[Array, Array]:
    """Returns the smallest logit of each row that reaches the floor, and how many logits do, block by block."""
    blocks = [measure_support(z[:, start : start + STAGING_COLUMNS]) for start in range(0, TILE_N, STAGING_COLUMNS)]
    lowest, support = zip(*blocks, strict=True)
    return functools.reduce(jnp.minimum, lowest), functools.reduce(jnp.add, support)


def _sum_tile(z: Array, row_scale: Array, highest: Array, call: Call, send: Any) -> list[Array]:
    """Computes the `SUMS` of a tile, block by block, and passes each block's exponentials to ``send``.

    u needs one instruction more than a fused multiply-add, whose result would not be 0 at the largest column.
    """
    sums: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = z[:, start : start + STAGING_COLUMNS] - ACCUMULATOR.along_rows(highest, STAGING_COLUMNS)
        u = u * ACCUMULATOR.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = sum_block(call, u, e)
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if send is not None:
            send(i, e)
    return sums


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    send(shift_exponentials(e, output.dtype), i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """Returns the unscaled logit at each row's target, 0 if the tile has none. Tiles without any target skip this."""

    def select() -> Array:
        return functools.reduce(
            jnp.add, (jnp.where(there, x, 0.0) for there, x in ACCUMULATOR.compare_labels(z, target))
        )

    def skip() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, FOLDED), jnp.float32), ACCUMULATOR.layout)

    return jnp.sum(lax.cond(holds, select, skip), axis=1)


def kl_statistics(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    span: Int[Array, "fields"],
    parts: Float[Array, "n 6 Tp"],
    cache: KLCache | None,
    direction: Direction,
) -> tuple[Float[Array, "n 6 Tp"], KLCache | None]:
    """Writes the `KLStatistics` of the span's tiles to ``parts``, ``cross`` in base 2, and fills the cache, if any.

    A tile that is only padding gets a maximum of `_operands.FLOOR` and sums of 0. Tiles after the span, and row blocks
    without an unmasked row, are not written. ``calls`` are in the order of the heads, that of p first.
    """
    given, updated = _heads.pack_operands(operands, span), [parts, *jax.tree.leaves(cache)]
    names = "kl_statistics", "lce_kl_statistics" if cache is None else "lce_kl_statistics_cached"
    epilogue = functools.partial(write_kl_statistics, direction)
    parts, *kept = _heads.update_tiles(generation, calls, epilogue, *names, given, updated)
    return parts, KLCache(*kept) if kept else None


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

    A tile that is only padding gets sums of 0. As in `kl_statistics`, some tiles and row blocks are not written.
    """
    given, names = [*_heads.pack_operands(operands, span), factors], ("kl_mixture_sums", "lce_kl_mixture_sums")
    epilogue = functools.partial(write_mixture_sums, direction)
    return _heads.update_tiles(generation, calls, epilogue, *names, given, [parts])[0]


def write_kl_statistics(
    direction: Direction, refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """Computes the statistics of both heads of a warpgroup's part of a tile from its products, and stores them."""
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
    """Returns the terms of the three sums, and the ratio of a `mathematics._kl.CachedRatios`."""
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
    """Stores a strip of a `mathematics._kl.CachedRatios`, from registers and not through shared memory."""
    columns = pl.ds(multiple_of(column, STRIP), STRIP)
    for output, values in (cache.e, shift_exponentials(e, cache.e.dtype)), (cache.ratio, ratio):
        _pallas.store(output.at[rows(), columns], values.astype(output.dtype))


def _x_at_max(x_p: Float[Array, "64 n"], max_p: Float[Array, "64"], x_q: Float[Array, "64 n"]) -> Float[Array, "64"]:
    """Returns the x of q at the largest x of p, if this block has it."""
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
