"""The forward kernel: statistics (eq. 1) of each tile of logits straight from the accumulator.

Inside, everything is in base 2: exp2 is one instruction, and log2(e) folds into the row's scale. Each tile writes its
own statistics per token, which are merged outside (eq. 2). With a cache, a tile's exponentials leave through shared
memory, rounded, relative to the tile's own maximum, which is kept beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._logprobs import FP16_SHIFT
from lce_jax.mathematics._statistics import SUMS, of_fields
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._chunks import Cache
from lce_jax.mosaic._operands import Prepared, Span, geometry
from lce_jax.mosaic.common import _logits, _tiles
from lce_jax.mosaic.common._tiles import TILE_N, TILING, Matmul, Tile
from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


def statistics(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Call,
    span: Int[Array, "fields"],
    parts: Float[Array, "tiles fields Tp"],
    cache: Cache | None,
    beside: Float[Array, "V R"] | None = None,
) -> tuple[Float[Array, "tiles fields Tp"], Cache | None]:
    """``parts`` with the partial statistics of the span's tiles, and the cache, if any, with their exponentials.

    ``weight`` holds the span's part at its offset, and so does the B of an adapter ``beside`` it.
    """
    machine, matmul = generation.machine, _logits.logits(case, generation.tunings.of(case, "forward"))
    updated = [parts, *jax.tree.leaves(cache)]
    operands = [
        prepared.hidden, weight, prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, span,
    ]  # fmt: skip
    operands += [x for x in (prepared.floor, beside) if x is not None]
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
    scale: Any  # [Tp]
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
    scale: Any,
    holds_target: Any,
    mask: Any,
    scalars: Any,  # a `Span`
    *refs_of_case: Any,  # the floor and B, if any, and `results`
) -> None:
    has_floor, given = matmul.case.has_floor, matmul.case.has_floor + (matmul.case.rank > 0)
    floor, beside, results = refs_of_case[0] if has_floor else None, refs_of_case[has_floor:given], refs_of_case[given:]
    # [tiles, fields, Tp] and the cache, if any, as they were; both as they will be, in the same places
    partial, *kept = results[len(results) // 2 :]
    cache: Any = Cache(*kept) if kept else None
    refs, span = StatisticsRefs(targets, scale, holds_target, mask, partial, cache, floor), Span.unpack(scalars)
    first_tile, shape = _logits.first_tile(span), geometry(matmul.case, TILING)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        number = tile.vocabulary_tile
        column = span.column + (number * TILE_N if shape.has_parts else tile.column)
        edge: Any = (column, span.num_columns, mask)
        if shape.has_parts:
            edge = _tiles.edge(shape, first_tile + number, span.num_columns, mask)
        where = StatisticsWhere(column, number, first_tile, span.slot, edge)
        machine.statistics(matmul.case, refs, tile, where, multiply, slots)

    slots = None if cache is None else machine.staging(matmul, TILE_N, hidden.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *beside)


def sums(case: Call, u: Array, e: Array) -> list[Array]:
    """The `SUMS` of a block of columns that the call has, in their order."""
    return [jnp.sum(one.term(u, e), axis=1) for name, one in SUMS.items() if name in case.statistics]


def of_sums(case: Call, found: Sequence[Array], **extremes: Array | None) -> ShardStatistics:
    """A tile's statistics from its `sums`, and what are none."""
    names = [name for name in SUMS if name in case.statistics]
    return of_fields(extremes | dict(zip(names, found, strict=True)))


def store(refs: StatisticsRefs, where: StatisticsWhere, rows: Callable[[], Any], stats: ShardStatistics) -> None:
    """Writes a tile's statistics of these rows, whose places are computed when they are needed."""
    for i, field in enumerate(jax.tree.leaves(stats)):
        refs.partial.at[where.first_slot + where.number, i, rows()][...] = field


def as_cached(e: Array, dtype: Any) -> Array:
    """A tile's exponentials as the cache keeps them, before they are rounded."""
    return e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e
