"""The live tiles of a shard as lists, along which the kernels of a sparse backward walk.

A live tile, a row block by a vocabulary tile, is a cell of a table. An entry is a live cell, or fills up a group. A
batch is a range of entries: it fills an array of dlogits, a slot of [row block, tile] for each.

Vocabulary tiles that are live in many row blocks and those live in few are mixed in that order, so that each batch, and
each row block's part of it, has the same share of both. dhidden reads the weight's tile once for many row blocks, or
for each of the few: alone, the latter would wait for memory, while the former would leave it idle.

Every array has a static size, so other live tiles compile nothing anew. Kernels find what follows from a list by
themselves, because each of torch's operations costs more time than all that they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int


class Sizes(NamedTuple):
    """The static part of the lists."""

    tiles: int  # of the vocabulary
    blocks: int  # of rows
    group: int  # entries that are computed together, 1 or 2: those of one vocabulary tile come in whole groups
    slots: int  # for a batch's dlogits: at least those of two vocabulary tiles that are live everywhere
    row_block: int  # tokens
    tile: int  # columns

    @property
    def width(self) -> int:
        """Cells of a vocabulary tile: its row blocks, and one that is an entry where it fills up a group."""
        return self.blocks + self.group - 1

    @property
    def entries_of_tile(self) -> int:
        """The most that there may be."""
        return -(-self.blocks // self.group) * self.group

    @property
    def entries(self) -> int:
        """The most that there may be."""
        return self.tiles * self.entries_of_tile

    @property
    def share(self) -> int:
        """Entries of a batch. A vocabulary tile belongs to the batch in which it begins, and reaches beyond it."""
        return self.entries if self.entries <= self.slots else self.slots - self.entries_of_tile + self.group

    @property
    def batches(self) -> int:
        """As many as any live tiles may need.

        So no loop over them waits for the device to say how many there are. Those at the end may be empty.
        """
        return -(-self.entries // self.share)


class Worklist(NamedTuple):
    """All live tiles of a shard. A rank is the place of a vocabulary tile in their order."""

    order: Int[Array, "tiles"]  # the vocabulary tile at each rank
    sums: Int[Array, "tiles*width"]  # how many entries there are up to each cell, by rank
    cells: Int[Array, "entries"]  # of each entry; their number after the last entry
    sums_by_row: Int[Array, "blocks*tiles"]  # the same of the cells that dhidden contracts, by row block
    cells_by_row: Int[Array, "blocks*tiles"]
    ranks: Int[Array, "tiles"]  # all, by batch; in each, those with the most live row blocks come first
    row_blocks: Int[Array, "batches*blocks"]  # of each batch; those with the most entries in it come last


class Batch(NamedTuple):
    """A range of ranks, whose dlogits exist at the same time. All are numbers that are known at run time."""

    rank: Any  # the first
    num_ranks: Any
    entry: Any  # the first
    num_entries: Any

    @classmethod
    def of(cls, sizes: Sizes, number: Any, sums: Any, cells: Any) -> Batch:
        """The one of a number, by what a `Worklist` holds, in a kernel or beside it."""

        def first_rank(number: Any) -> Any:  # that after the rank of the last entry before the batch
            last = cells[jnp.clip(number * sizes.share - 1, 0, sizes.entries - 1)]
            rank = jnp.minimum(lax.div(last, jnp.int32(sizes.width)) + 1, sizes.tiles)
            return jnp.where(number == 0, 0, rank)

        first, stop = first_rank(number), first_rank(number + 1)
        entry, last = (sum_before(sums, rank * sizes.width) for rank in (first, stop))
        return cls(first, stop - first, entry, last - entry)


def find_row_block(sizes: Sizes, cell: Any) -> Any:
    """The row block of an entry; any where it fills up a group."""
    return lax.rem(lax.rem(cell, jnp.int32(sizes.width)), jnp.int32(sizes.blocks))


def sum_before(sums: Any, cell: Any) -> Any:
    """How many entries there are before a cell."""
    return jnp.where(cell > 0, sums[jnp.maximum(cell - 1, 0)], 0)


def place(
    column: Any, token: Any, numbers: Any, entry: Any = None, batch: Batch | None = None, sizes: Sizes | None = None
) -> tuple[Any, Any, Any]:
    """Whether a candidate, a token's column or -1, has a place in a part of dlogits, in which row and which column.

    Args:
        column: of the shard.
        token: its number.
        numbers: of a chunk its first column, how many live rows there are, and where its columns end.
        entry: of live tiles, how many entries there are up to its tile.
        batch: that of live tiles.
        sizes: of their lists.
    """
    if batch is None or sizes is None:
        return (column >= numbers[0]) & (column < numbers[2]), token, column - numbers[0]
    slot = entry - 1 - batch.entry
    is_there = (column >= 0) & (slot >= 0) & (slot < batch.num_entries)
    return is_there, slot * sizes.row_block + token % sizes.row_block, column % sizes.tile


def make_orders(sizes: Sizes) -> list[int]:
    """What `make_worklist` is given: four orders of as many numbers as there are vocabulary tiles.

    In the first each part has about the same share of the first as of the last: the fractional parts of multiples of
    the golden ratio are spread evenly. Then the places in it, of the last number first; the cells before these; all.
    """
    fractions = np.arange(sizes.tiles, dtype=np.uint32) * np.uint32(0x9E3779B9)  # times 2³²
    mixed = np.argsort(fractions, kind="stable")
    places = np.argsort(-mixed)
    return np.concatenate([mixed, places, np.maximum(places * sizes.width - 1, 0), np.arange(sizes.tiles)]).tolist()


def make_worklist(xp: Any, sizes: Sizes, orders: Any, live: Any, contracted: Any) -> Worklist:
    """All of a shard's lists.

    Args:
        xp: ``jax.numpy``, or a namespace like it.
        sizes: of the lists.
        orders: `make_orders` of these sizes.
        live: [tiles, blocks or more], 1 where a tile is live.
        contracted: how many of the first vocabulary tiles dhidden contracts in place: those in the lists by row block.
    """
    mixed, places, before, tiles = orders.reshape(4, -1)
    live = live[:, : sizes.blocks]
    counts = xp.sum(live, 1, dtype=xp.int32)
    order = _take(xp, xp.argsort(counts, stable=True), mixed)
    table = live if sizes.group == 1 else xp.concatenate([live, (counts & 1)[:, None]], 1)
    sums = xp.cumsum(_take(xp, table, order).reshape(-1), 0, dtype=xp.int32)
    all_contracted = isinstance(contracted, int) and contracted >= sizes.tiles
    of_rows = live if all_contracted else live * (tiles < contracted)[:, None]
    sums_by_row = xp.cumsum(_take(xp, of_rows.T, order, 1).reshape(-1), 0, dtype=xp.int32)
    numbers = xp.arange(sizes.entries, dtype=xp.int32)
    by_batch = xp.argsort(_take(xp, sums, before) // sizes.share, stable=True)
    cells = find_ones(xp, sums, numbers)
    return Worklist(
        order=xp.asarray(order, dtype=xp.int32),
        sums=sums,
        cells=cells,
        sums_by_row=sums_by_row,
        cells_by_row=find_ones(xp, sums_by_row, numbers[: len(sums_by_row)]),
        ranks=_take(xp, places, by_batch),
        row_blocks=_row_blocks(xp, sizes, live, cells, sums_by_row),
    )


def _row_blocks(xp: Any, sizes: Sizes, live: Any, cells: Any, sums_by_row: Any) -> Any:
    """Those of each batch, by how much dhidden contracts there: the longest first, all its clusters end together."""
    if sizes.batches == 1:
        counts = xp.sum(live, 0, dtype=xp.int32)[None]
    else:
        before = xp.concatenate([xp.zeros(1, dtype=xp.int32), sums_by_row])
        ends = cells[sizes.share - 1 :: sizes.share][: sizes.batches - 1] // sizes.width + 1  # ranks, as in `Batch.of`
        firsts = xp.arange(sizes.blocks, dtype=xp.int32)[:, None] * sizes.tiles
        places = xp.concatenate([firsts, firsts + xp.clip(ends, None, sizes.tiles), firsts + sizes.tiles], 1)
        sums = _take(xp, before, places.reshape(-1)).reshape(places.shape)
        counts = (sums[:, 1:] - sums[:, :-1]).T
    return xp.asarray(xp.argsort(counts, stable=True).reshape(-1), dtype=xp.int32)


def _take(xp: Any, x: Any, places: Any, dim: int = 0) -> Any:
    return xp.take(x, places, axis=dim, mode="clip") if hasattr(x, "at") else xp.index_select(x, dim, places)


def find_ones(xp: Any, sums: Any, numbers: Any) -> Any:
    """Where the ones of these numbers, 0, 1, …, lie in an array of 0 and 1, given its sums; its length for none."""
    if not hasattr(sums, "at"):
        return xp.searchsorted(sums, numbers, right=True, out_int32=True)
    places = xp.where(xp.diff(sums, prepend=0) > 0, sums - 1, len(numbers))  # XLA would search in a loop
    return xp.full_like(numbers, len(sums)).at[places].set(xp.arange(len(sums), dtype=xp.int32), mode="drop")


def held(xp: Any, columns: Any, num_rows: Any, sizes: tuple[int, int], shape: tuple[int, int]) -> Any:
    """1 where a tile holds one of these columns [T, K], -1 for none, of a row that counts.

    ``sizes`` are those of a row block and of a vocabulary tile, ``shape`` of the result, [tiles, blocks].
    """
    (row_block, tile), token, size = sizes, xp.arange(len(columns), dtype=xp.int32)[:, None], shape[0] * shape[1]
    places = columns // tile * shape[1] + token // row_block
    places = xp.where((columns >= 0) & (token < num_rows), places, size)
    found = xp.zeros(size + 1, dtype=xp.int32)  # the last one for those that have none
    if hasattr(found, "at"):
        found = found.at[places].set(1)
    else:
        found[places] = xp.ones((), dtype=xp.int32)  # for a number torch's host would wait for the GPU
    return found[:size].reshape(shape)
