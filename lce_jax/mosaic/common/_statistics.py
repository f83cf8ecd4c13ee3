"""The forward's kernels: statistics (eqs. 1, 6) of each tile of logits straight from the accumulators.

Inside, everything is in base 2: exp2 is one instruction, and log2(e) folds into the row's scale. Each tile writes its
own statistics per token, which are merged outside (eq. 2). With a cache, a tile's exponentials leave through shared
memory, rounded, relative to the tile's own maximum, which is kept beside them. A mixture of two heads has a second
pass over the same tiles, for the sums of eq. 9.
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
from lce_jax.mosaic._operands import FLOOR, KLOperands, Prepared, Span, geometry
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common import _heads, _logits, _tiles
from lce_jax.mosaic.common._epilogue import HELD, lowest_live, rows_of, send, staging, without_padding
from lce_jax.mosaic.common._heads import (
    BLOCKS,
    STRIP,
    Hold,
    KLRefs,
    KLWhere,
    MixtureFactors,
    MixtureRatios,
    Multiply,
    along,
    block_of,
    load_mixture_factors,
    relative,
    store_references,
    strip_of,
    unless_padding,
    x_of,
)
from lce_jax.mosaic.common._logits import FOLDED, LabelBelow, extent, softcap
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
    """``parts`` with the partial statistics of the span's tiles, and the cache, if any, with their exponentials.

    ``weight`` holds the span's part at its offset, and so does ``adapter``, B of an adapter.
    """
    machine, matmul = generation.machine, _logits.logits(call, generation.tunings.of(call, "forward"))
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
    """What the epilogue reads and writes."""

    targets: Any  # [Tp]
    row_scale: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    mask: Any  # [512], or [1024] with parts
    partial: Any  # [tiles, fields, Tp]
    cache: Any  # a `Cache` of refs, or None
    floor: Any  # [Tp], or None


class StatisticsWhere(NamedTuple):
    """Where a tile of logits lies."""

    column: Any  # its first one, in the shard
    number: Any  # in the launch
    first_tile: Any  # the number in the shard of the launch's first tile
    first_slot: Any  # the same in the array of partial statistics
    edge: Any  # what tells the columns that are padding: the tile's first column, the live ones, and their masks


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
    *refs_of_case: Any,  # the floor and B, if any, and `results`
) -> None:
    has_floor, given = matmul.call.has_floor, matmul.call.has_floor + (matmul.call.rank > 0)
    floor, adapter, results = (
        refs_of_case[0] if has_floor else None,
        refs_of_case[has_floor:given],
        refs_of_case[given:],
    )
    # [tiles, fields, Tp] and the cache, if any, as they were; both as they will be, in the same places
    partial, *kept = results[len(results) // 2 :]
    cache: Any = Cache(*kept) if kept else None
    refs, span = StatisticsRefs(targets, row_scale, holds_target, mask, partial, cache, floor), Span.unpack(scalars)
    first_tile, shape = _logits.first_tile(span), geometry(matmul.call, TILING)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        number = tile.vocabulary_tile
        column = span.column + (number * TILE_N if shape.has_parts else tile.column)
        edge: Any = (column, span.num_columns, mask)
        if shape.has_parts:
            edge = _tiles.edge(shape, first_tile + number, span.num_columns, mask)
        where = StatisticsWhere(column, number, first_tile, span.slot, edge)
        write_statistics(matmul.call, refs, tile, where, multiply, slots)

    slots = None if cache is None else staging(machine, matmul, TILE_N, hidden.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *adapter)


def sums(call: Call, u: Array, e: Array) -> list[Array]:
    """The `SUMS` of a block of columns that the call has, in their order."""
    return [jnp.sum(one.term(u, e), axis=1) for name, one in SUMS.items() if name in call.statistics]


def of_sums(call: Call, found: Sequence[Array], **extremes: Array | None) -> ShardStatistics:
    """A tile's statistics from its `sums`, and what are none."""
    names = [name for name in SUMS if name in call.statistics]
    return make_statistics(extremes | dict(zip(names, found, strict=True)))


def store(refs: StatisticsRefs, where: StatisticsWhere, rows: Callable[[], Any], stats: ShardStatistics) -> None:
    """Writes a tile's statistics of these rows, whose places are computed when they are needed."""
    for i, field in enumerate(jax.tree.leaves(stats)):
        refs.partial.at[where.first_slot + where.number, i, rows()][...] = field


def as_cached(e: Array, dtype: Any) -> Array:
    """A tile's exponentials as the cache keeps them, before they are rounded."""
    return e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e


def write_statistics(
    call: Call, refs: StatisticsRefs, tile: Tile, where: StatisticsWhere, multiply: Any, slots: Any
) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics and the cache."""
    rows = functools.partial(rows_of, tile.row)  # computed where they are needed: no register holds them
    row_scale = HELD.load_rows(refs.row_scale, rows())
    target = HELD.load_rows(refs.targets, rows()) - where.column
    holds = refs.holds_target[tile.row_block, where.first_tile + where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, rows())
    z = multiply()
    if call.logit_softcap is not None:
        z = softcap(z, call.logit_softcap, call)
    lowest = lowest_live(z, *where.edge) if call.stats and floor is None else None
    z = without_padding(z, *where.edge)
    at_target = None if floor is None else _target_logit(z, target, holds)
    label = None if floor is None or at_target is None else LabelBelow.of(at_target, target, floor)
    z = HELD.reaching(z, floor)
    highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
    highest = highest if label is None else label.highest(highest)
    # With a cache the target comes first, so that z dies block by block; without one the exponentials come first.
    # The other order spills registers, in either case. With a floor the target is known already.
    if refs.cache is not None:
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
        send = functools.partial(_send_exponentials, slots, rows(), refs.cache.exponentials, where.column)
        found = _add_sums(z, row_scale, highest, call, send)
        refs.cache.max.at[where.first_tile + where.number, rows()][...] = highest
    else:
        found = _add_sums(z, row_scale, highest, call, None)
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
    support = None
    if floor is not None and call.stats:
        lowest, support = _extent(z)
    if floor is not None:  # read anew: no register holds it beside the sums
        target = HELD.load_rows(refs.targets, rows()) - where.column
    owned = (target >= 0) & (target < TILE_N)
    at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
    of_tile = of_sums(call, found, max=highest, target=at_target, min=lowest, support=support)
    store(refs, where, rows, of_tile if label is None else label.added(of_tile, row_scale))


def _extent(z: Array) -> tuple[Array, Array]:
    """The smallest logit of each row that counts, and how many do, a block of columns at a time."""
    blocks = [extent(z[:, start : start + STAGING_COLUMNS]) for start in range(0, TILE_N, STAGING_COLUMNS)]
    lowest, support = zip(*blocks, strict=True)
    return functools.reduce(jnp.minimum, lowest), functools.reduce(jnp.add, support)


def _add_sums(z: Array, row_scale: Array, highest: Array, call: Call, send: Any) -> list[Array]:
    """The `sums` of the tile, a block of columns at a time, each block's e handed to ``send``.

    u takes one instruction more than a fused multiply-add, which would not be 0 at the largest column.
    """
    found: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = z[:, start : start + STAGING_COLUMNS] - HELD.along_rows(highest, STAGING_COLUMNS)
        u = u * HELD.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = sums(call, u, e)
        found = [a + b for a, b in zip(found, parts, strict=True)] if found else parts
        if send is not None:
            send(i, e)
    return found


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    send(as_cached(e, output.dtype), i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit, unscaled, at each row's target, 0 where the tile has none; only tiles that hold some target look."""

    def look() -> Array:
        return functools.reduce(jnp.add, (jnp.where(there, x, 0.0) for there, x in HELD.by_label(z, target)))

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, FOLDED), jnp.float32), HELD.layout)

    return jnp.sum(lax.cond(holds, look, none), axis=1)


def kl_statistics(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    span: Int[Array, "fields"],
    parts: Float[Array, "n 6 Tp"],
    cache: KLCache | None,
    direction: Direction,
) -> tuple[Float[Array, "n 6 Tp"], KLCache | None]:
    """``parts`` with the `KLStatistics` of the span's tiles: the fields in order, ``cross`` in base 2.

    The cache, if any, gets what the direction's gradient needs of these tiles.

    A tile of padding alone has a maximum of `_operands.FLOOR` and sums of 0. Tiles after the span and row
    blocks without a live row are left unwritten. Cases come as the heads do, that of p first.
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
) -> Float[Array, "n 2 Tp"]:
    """``parts`` with the `MixtureSums` of the span's tiles (eq. 9), in base 2; ``factors``: `MixtureFactors`.

    A tile of padding alone has sums of 0. What is left unwritten is as with `kl_statistics`.
    """
    given, names = [*_heads.pack_operands(operands, span), factors], ("kl_mixture_sums", "lce_kl_mixture_sums")
    return _heads.update_tiles(generation, calls, write_mixture_sums, *names, given, [parts])[0]


def write_kl_statistics(
    direction: Direction, refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics."""
    rows = functools.partial(rows_of, tile.row)  # computed where they are needed: no register holds them
    p, q = refs.heads
    x = x_of(p.call, multiply[0](), refs.mask, where)
    max_p = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    held = hold(x)
    x = x_of(q.call, multiply[1](), refs.mask, where)
    max_q = jnp.maximum(jnp.max(x, axis=1), FLOOR)
    at_p = functools.reduce(jnp.maximum, [_at(held.block(i), max_p, block_of(x, i)) for i in range(BLOCKS)])
    references = max_p, max_q, at_p
    row_scales = HELD.load_rows(p.row_scale, rows()), HELD.load_rows(q.row_scale, rows())
    sums: list[Array] = []
    for column in range(0, TILE_N, STRIP):  # what is kept takes registers too
        *terms, ratio = _terms((held.strip(column), strip_of(x, column)), references, row_scales, direction)
        parts = [jnp.sum(term, axis=1) for term in terms]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if refs.cache is not None:
            _keep(refs.cache, rows, where.column + column, _kept_e(direction, *terms[:2]), ratio)
    found = KLStatistics(*references, *sums)
    _heads.store_fields(refs, where, rows, found)
    if refs.cache is not None:
        store_references(refs.cache, where, rows, found)


def _terms(
    x: tuple[Array, Array],
    references: tuple[Array, Array, Array],
    row_scales: tuple[Array, Array],
    direction: Direction,
) -> tuple[Array, Array, Array, Array]:
    """Those of the three sums, and the ratio that a `mathematics._kl.CachedRatios` has."""
    u_p = relative(x[0], references[0], row_scales[0])
    e_p = jnp.exp2(u_p)
    # Where e is 0, v may be infinite, and 0 · inf is NaN.
    to_v = u_p - relative(x[1], references[2], row_scales[1])
    cross = jnp.where(e_p > 0.0, e_p * to_v, 0.0)
    u_q = relative(x[1], references[1], row_scales[1])
    return e_p, jnp.exp2(u_q), cross, -to_v if direction == "reverse" else u_q - u_p


def _kept_e(direction: Direction, e_p: Array, e_q: Array) -> Array:
    return jnp.maximum(e_p, e_q) if direction == "forward" else e_p


def _keep(cache: KLCache, rows: Callable[[], Any], column: Any, e: Array, ratio: Array) -> None:
    """Some columns of a `mathematics._kl.CachedRatios`. Not through shared memory, as `dlogits`."""
    columns = pl.ds(multiple_of(column, STRIP), STRIP)
    for output, values in (cache.e, as_cached(e, cache.e.dtype)), (cache.ratio, ratio):
        _pallas.store(output.at[rows(), columns], values.astype(output.dtype))


def _at(x_p: Float[Array, "64 n"], max_p: Float[Array, "64"], x_q: Float[Array, "64 n"]) -> Float[Array, "64"]:
    """The x of q at the largest x of p, if this block has it."""
    return jnp.max(jnp.where(x_p == along(max_p), x_q, MASKED), axis=1)


def write_mixture_sums(refs: KLRefs, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold) -> None:
    """A warpgroup's part of a tile, from its products to the partial sums of a mixture."""
    rows = functools.partial(rows_of, tile.row)
    p, q = refs.heads
    held = hold(x_of(p.call, multiply[0](), refs.mask, where))
    x = x_of(q.call, multiply[1](), refs.mask, where)
    is_above_half = refs.factors[MixtureFactors._fields.index("is_above_half"), 0] > 0.0

    def add(column: int, apart: bool, sums: list[Array]) -> list[Array]:
        both = held.strip(column), strip_of(x, column)
        factors, row_scales = load_mixture_factors(refs, rows)
        terms = MixtureRatios.of(both, row_scales, factors).terms(factors, apart)
        return [total + jnp.sum(term, axis=1) for total, term in zip(sums, terms, strict=True)]

    def add_strip(column: int, sums: list[Array]) -> list[Array]:
        apart, together = (functools.partial(add, column, each) for each in (True, False))
        return lax.cond(is_above_half, apart, together, sums)

    zeros = jnp.zeros_like(HELD.load_rows(p.row_scale, rows()))
    sums = [zeros, zeros]
    for column in range(0, TILE_N, STRIP):
        sums = unless_padding(where, column, functools.partial(add_strip, column), lambda sums: sums, sums)
    _heads.store_fields(refs, where, rows, sums)
