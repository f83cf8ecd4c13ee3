"""The lists of live tiles (`lce_jax.mosaic._worklist`), as kernels.

    live [tiles, blocks]
     │ counts    live row blocks of a tile
     │ order     the tiles by count, mixed
     │ entries   a rank's row blocks, one after the other
     │ rows      a row block's entries, by rank
     │ row lists the row blocks of a batch, by count
     └ ranks     the ranks of a batch, by count

A block computes one number's place: it compares the number with all others, 128 at a time, and adds up. So no list is
sorted, and no thread writes where another number says. A list whose entries lie side by side is written by one block,
which walks along its candidates. All its threads store the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._live_tiles import Batch, Entries, Order, RowEntries, RowLists, Sizes
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._threads import THREADS, along, as_int, numbered
from lce_jax.mosaic.common._tokens import kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int

STEP = 16  # candidates that a walk loads at a time
GOLDEN = 0x9E3779B9 - (1 << 32)  # 2³² over the golden ratio, as int32 has it


def padded(size: int) -> int:
    """The length of an array that kernels load 128 numbers of at a time."""
    return -(-size // THREADS) * THREADS


def live_counts(sizes: Sizes, live: Int[Array, "tiles blocks"]) -> Int[Array, "tiles"]:
    """The live row blocks of each tile."""

    def body(live: Any, counts: Any) -> None:
        tile = lax.axis_index("tile")
        counts[tile] = _sum(sizes.blocks, lambda _, rows: live[tile, rows])

    return _run(body, [(padded(sizes.tiles),)], "lce_live_counts", {"tile": sizes.tiles})(live)[0]


def live_order(sizes: Sizes, counts: Int[Array, "tiles"]) -> Order:
    """The vocabulary tile at each rank.

    By count, and then mixed: the fractional parts of multiples of the golden ratio, in fixed point, are spread evenly.
    """

    def body(counts: Any, order: Any, ordered: Any, rank_of: Any) -> None:
        tile = lax.axis_index("tile")
        count = counts[tile]
        sorted_place = _sum(sizes.tiles, lambda n, rows: _before(counts[rows], n, count, tile))
        key = _fraction(sorted_place)
        rank = _sum(sizes.tiles, lambda n, _: as_int(_fraction(n) < key))
        order[rank] = tile
        ordered[rank] = count
        rank_of[tile] = rank

    return Order(*_run(body, [(padded(sizes.tiles),)] * 3, "lce_live_order", {"tile": sizes.tiles})(counts))


def live_entries(
    sizes: Sizes,
    live: Int[Array, "tiles blocks"],
    order: Int[Array, "ranks"],
    counts: Int[Array, "ranks"],
) -> Entries:
    """Each rank's entries."""
    lists = [(sizes.entries,)] * 2 + [(padded(sizes.tiles + 1),), (sizes.blocks, padded(sizes.tiles))]
    run = _run(functools.partial(_entries, sizes), lists, "lce_live_entries", {"rank": sizes.tiles})
    return Entries(*run(live, order, counts))


def _entries(
    sizes: Sizes,
    live: Any,
    order: Any,
    counts: Any,
    row_blocks: Any,
    tiles: Any,
    firsts: Any,
    places: Any,
) -> None:
    rank = lax.axis_index("rank")
    tile, count = order[rank], counts[rank]
    start = _sum(sizes.tiles, lambda n, rows: jnp.where(n < rank, _in_groups(sizes, counts[rows]), 0))
    end = start + _in_groups(sizes, count)
    firsts[rank] = start

    def put(entry: Any, block: Any) -> None:
        row_blocks[entry] = block
        tiles[entry] = tile

    def visit(entry: Any, block: Any, is_live: Any) -> Any:
        places[block, rank] = is_live * (entry + 1) - 1
        pl.when(is_live > 0)(lambda: put(entry, block))
        return entry + is_live

    def put_end() -> None:
        firsts[sizes.tiles] = end

    last = _walk(sizes.blocks, [lambda rows: live[tile, rows]], visit, start)
    lax.fori_loop(last, end, lambda entry, _: put(entry, jnp.int32(0)), None)
    pl.when(rank == sizes.tiles - 1)(put_end)


def live_rows(
    sizes: Sizes,
    order: Int[Array, "ranks"],
    first: Int[Array, "ranks+1"],
    places: Int[Array, "blocks ranks"],
    numbers: Int[Array, "1"],
) -> RowEntries:
    """The entries that dhidden contracts once more, by row block: a list each, in which each batch has a range.

    ``numbers``: how many of the first vocabulary tiles it contracts.
    """
    shapes = [(sizes.blocks * sizes.tiles,)] * 2 + [(sizes.batches, padded(sizes.blocks))] * 2
    run = _run(functools.partial(_rows, sizes), shapes, "lce_live_rows", {"block": sizes.blocks})
    return RowEntries(*run(order, first, places, numbers))


def _rows(
    sizes: Sizes,
    order: Any,
    firsts: Any,
    places: Any,
    numbers: Any,
    by_row: Any,
    tile_by_row: Any,
    starts: Any,
    counts: Any,
) -> None:
    block, contracted = lax.axis_index("block"), numbers[0]
    first = block * sizes.tiles

    def put(n: Any, place: Any, tile: Any) -> None:
        by_row[n] = place
        tile_by_row[n] = tile

    def visit(n: Any, _: Any, place: Any, tile: Any) -> Any:
        is_there = (place >= 0) & (tile < contracted)
        pl.when(is_there)(lambda: put(n, place, tile))
        return n + is_there.astype(jnp.int32)

    _walk(sizes.tiles, [lambda rows: places[block, rows], lambda rows: order[rows]], visit, first)

    def step(batch: Any, start: Any) -> Any:
        def is_there(_: Any, rows: Any) -> Any:
            begins = firsts[rows]
            inside = (begins >= batch * sizes.share) & (begins < (batch + 1) * sizes.share)
            return as_int(inside & (places[block, rows] >= 0) & (order[rows] < contracted))

        count = _sum(sizes.tiles, is_there)
        starts[batch, block] = start
        counts[batch, block] = count
        return start + count

    lax.fori_loop(0, sizes.batches, step, first)


def live_row_lists(
    sizes: Sizes,
    first: Int[Array, "ranks+1"],
    starts: Int[Array, "batches blocks"],
    counts: Int[Array, "batches blocks"],
    numbers: Int[Array, "1"],
) -> tuple[RowLists, Int[Array, "batches fields"]]:
    """Each batch by row block, those with the most entries first, and its numbers, a `Batch`."""
    shapes = [(sizes.batches, sizes.blocks)] * 3 + [(sizes.batches, len(Batch._fields))]
    grid = {"batch": sizes.batches, "block": sizes.blocks}
    run = _run(functools.partial(_row_lists, sizes), shapes, "lce_live_row_lists", grid)
    *lists, scalars = run(first, starts, counts, numbers)
    return RowLists(*lists), scalars


def _row_lists(
    sizes: Sizes,
    firsts: Any,
    starts: Any,
    counts: Any,
    numbers: Any,
    row_blocks: Any,
    list_firsts: Any,
    list_counts: Any,
    scalars: Any,
) -> None:
    batch, block = lax.axis_index("batch"), lax.axis_index("block")
    count = counts[batch, block]
    place = _sum(sizes.blocks, lambda n, rows: _before(-counts[batch, rows], n, -count, block))
    row_blocks[batch, place] = block
    list_firsts[batch, place] = starts[batch, block]
    list_counts[batch, place] = count

    def first_rank(entry: Any) -> Any:
        return _sum(sizes.tiles, lambda _, rows: as_int(firsts[rows] < entry))

    def put_numbers() -> None:
        begin, end = first_rank(batch * sizes.share), first_rank((batch + 1) * sizes.share)
        entry = firsts[begin]
        num_row_blocks = _sum(sizes.blocks, lambda _, rows: as_int(counts[batch, rows] > 0))
        fields = Batch(begin, end - begin, entry, firsts[end] - entry, num_row_blocks, numbers[0])
        for i, field in enumerate(fields):
            scalars[batch, i] = field

    pl.when(block == 0)(put_numbers)


def live_ranks(sizes: Sizes, first: Int[Array, "ranks+1"], counts: Int[Array, "ranks"]) -> Int[Array, "ranks"]:
    """The ranks by batch, in each those with the most live row blocks first."""

    def body(firsts: Any, counts: Any, ranks: Any) -> None:
        rank = lax.axis_index("rank")
        count, batch = counts[rank], lax.div(firsts[rank], jnp.int32(sizes.share))

        def is_before(n: Any, rows: Any) -> Any:
            begins = firsts[rows]
            same = _before(-counts[rows], n, -count, rank)
            inside = jnp.where(begins < (batch + 1) * sizes.share, same, 0)
            return jnp.where(begins < batch * sizes.share, 1, inside)

        ranks[_sum(sizes.tiles, is_before)] = rank

    return _run(body, [(padded(sizes.tiles),)], "lce_live_ranks", {"rank": sizes.tiles})(first, counts)[0]


def _run(
    body: Callable[..., None], shapes: Sequence[tuple[int, ...]], name: str, grid: dict[str, int]
) -> Callable[..., Any]:
    return kernel(body, [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes], name, grid)


def _sum(size: int, term: Callable[[Any, Any], Any]) -> Any:
    """Σ ``term(n, rows)`` over n in [0, size), which are ``rows`` of an array, 128 at a time."""

    def of(i: int) -> Any:
        n = along(i * THREADS) + numbered()
        return jnp.where(n < size, term(n, pl.ds(i * THREADS, THREADS)), 0)

    return jnp.sum(functools.reduce(jnp.add, map(of, range(-(-size // THREADS)))), dtype=jnp.int32)


def _walk(size: int, arrays: Sequence[Callable[[Any], Any]], visit: Callable[..., Any], start: Any) -> Any:
    """``carry = visit(carry, n, x[n], …)`` for n in [0, size), in turn; 128 numbers of an array x are ``x(rows)``."""

    def staged(*staging: Any) -> Any:
        for rows in (pl.ds(i * THREADS, THREADS) for i in range(padded(size) // THREADS)):
            for x, array in zip(staging, arrays, strict=True):
                x[rows] = array(rows)

        def steps(first: Any, count: int, carry: Any) -> Any:
            found = [[x[first + j] for x in staging] for j in range(count)]
            for j, values in enumerate(found):
                carry = visit(carry, first + j, *values)
            return carry

        whole, rest = divmod(size, STEP)
        carry = lax.fori_loop(0, whole, lambda i, carry: steps(i * STEP, STEP, carry), start)
        carry = steps(jnp.int32(whole * STEP), rest, carry)
        plgpu.commit_smem()  # no thread goes on before all have read: a sum writes to the same memory
        return carry

    return pl.run_scoped(staged, *(plgpu.SMEM((padded(size),), jnp.int32) for _ in arrays))


def _before(keys: Any, n: Any, key: Any, at: Any) -> Any:
    """1 where a stable sort puts ``keys``, the numbers ``n``, before ``key``, the number ``at``."""
    return jnp.where(keys == key, as_int(n < at), as_int(keys < key))


def _in_groups(sizes: Sizes, count: Any) -> Any:
    """The entries that so many row blocks take. A group is a power of two."""
    return (count + (sizes.group - 1)) & -sizes.group


def _fraction(n: Any) -> Any:
    """Ordered as the fractional parts of n over the golden ratio: 2³¹ is subtracted, so that signed numbers compare."""
    return n * jnp.int32(GOLDEN) + jnp.int32(-(1 << 31))
