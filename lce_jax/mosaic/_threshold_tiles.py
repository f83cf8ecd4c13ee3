"""The active tiles of a shard as lists, along which the kernels of a sparse backward walk.

A tile (a row block by a vocabulary tile) is a cell of a table. An entry is an active cell, or a cell that completes a
group. A batch is a range of entries whose dlogits share one array, with a slot of [row block, tile] for each entry.

The order mixes vocabulary tiles that are active in many row blocks with those that are active in few. So each batch,
and each row block's part of a batch, has the same share of both. The product for dhidden reads a tile of the weight
once, however many row blocks use the tile. A batch in which few row blocks use each tile would wait for memory, and a
batch in which many do would leave memory idle.

All arrays have static sizes, so that other active tiles need no new compilation. Kernels compute what follows from the
lists themselves, because a further operation of torch would take longer.
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

    tiles: int  # vocabulary tiles
    blocks: int  # row blocks
    group: int  # how many entries are computed together, 1 or 2; the entries of a vocabulary tile form whole groups
    slots: int  # slots for a batch's dlogits, enough for two vocabulary tiles that are active in all row blocks
    row_block: int  # tokens of a row block
    tile: int  # columns of a vocabulary tile

    @property
    def width(self) -> int:
        """How many cells a vocabulary tile has: one per row block, and one more if groups have two entries."""
        return self.blocks + self.group - 1

    @property
    def entries_of_tile(self) -> int:
        """How many entries a vocabulary tile has at most."""
        return -(-self.blocks // self.group) * self.group

    @property
    def entries(self) -> int:
        """How many entries the shard has at most."""
        return self.tiles * self.entries_of_tile

    @property
    def share(self) -> int:
        """How many entries a batch has. A vocabulary tile belongs to the batch in which it begins; it may exceed it."""
        return self.entries if self.entries <= self.slots else self.slots - self.entries_of_tile + self.group

    @property
    def batches(self) -> int:
        """How many batches are needed at most.

        The number is static, so a loop need not wait for the device. The last batches may be empty.
        """
        return -(-self.entries // self.share)


class Worklist(NamedTuple):
    """All active tiles of a shard. A rank is the place of a vocabulary tile in ``order``."""

    order: Int[Array, "tiles"]  # the vocabulary tile at each rank
    sums: Int[Array, "tiles*width"]  # the number of entries up to each cell, by rank
    cells: Int[Array, "entries"]  # the cell of each entry; after the last entry, the total number of cells
    sums_by_row: Int[Array, "blocks*tiles"]  # like ``sums``, but by row block and only of cells that dhidden contracts
    cells_by_row: Int[Array, "blocks*tiles"]  # like ``cells``, for ``sums_by_row``
    ranks: Int[Array, "tiles"]  # the ranks of each batch, those with the most active row blocks first
    row_blocks: Int[Array, "batches*blocks"]  # the row blocks of each batch, those with the most entries last


class Batch(NamedTuple):
    """A range of ranks whose dlogits exist at the same time. All fields are known only at run time."""

    rank: Any  # the first rank
    num_ranks: Any
    entry: Any  # the first entry
    num_entries: Any

    @classmethod
    def of(cls, sizes: Sizes, number: Any, sums: Any, cells: Any) -> Batch:
        """Returns the batch with this ``number``, from fields of a `Worklist`, in a kernel or in array code."""

        def first_rank(number: Any) -> Any:  # the rank after that of the last entry before the batch
            last = cells[jnp.clip(number * sizes.share - 1, 0, sizes.entries - 1)]
            rank = jnp.minimum(lax.div(last, jnp.int32(sizes.width)) + 1, sizes.tiles)
            return jnp.where(number == 0, 0, rank)

        first, stop = first_rank(number), first_rank(number + 1)
        entry, last = (sum_before(sums, rank * sizes.width) for rank in (first, stop))
        return cls(first, stop - first, entry, last - entry)


def find_row_block(sizes: Sizes, cell: Any) -> Any:
    """Returns the row block of an entry's cell. It is arbitrary for a cell that completes a group."""
    return lax.rem(lax.rem(cell, jnp.int32(sizes.width)), jnp.int32(sizes.blocks))


def sum_before(sums: Any, cell: Any) -> Any:
    """Returns the number of entries before a cell."""
    return jnp.where(cell > 0, sums[jnp.maximum(cell - 1, 0)], 0)


def place(
    column: Any, token: Any, numbers: Any, entry: Any = None, batch: Batch | None = None, sizes: Sizes | None = None
) -> tuple[Any, Any, Any]:
    """Returns whether a candidate has a place in an array of dlogits, and the row and column of the place.

    Args:
        column: the candidate's column in the shard, or -1.
        token: the number of its token.
        numbers: a chunk's first column, the number of unmasked rows, and the end of the chunk's columns.
        entry: with active tiles, the number of entries up to the candidate's tile.
        batch: with active tiles, the batch.
        sizes: with active tiles, the sizes of the lists.
    """
    if batch is None or sizes is None:
        return (column >= numbers[0]) & (column < numbers[2]), token, column - numbers[0]
    slot = entry - 1 - batch.entry
    is_there = (column >= 0) & (slot >= 0) & (slot < batch.num_entries)
    return is_there, slot * sizes.row_block + token % sizes.row_block, column % sizes.tile


def make_orders(sizes: Sizes) -> list[int]:
    """Returns the orders for `make_worklist`: four lists, one after the other, with a number for each vocabulary tile.

    - The tiles' numbers in a mixed order, in which each section has about equal shares of low and high numbers, because
      the fractional parts of multiples of the golden ratio are spread evenly.
    - The place of each tile in the mixed order, from the highest tile number to the lowest.
    - For each of these places, the number of the last cell before the tile's own cells, if each tile has ``width``
      cells in the mixed order; at least 0.
    - The tiles' numbers in ascending order.
    """
    fractions = np.arange(sizes.tiles, dtype=np.uint32) * np.uint32(0x9E3779B9)  # times 2³²
    mixed = np.argsort(fractions, kind="stable")
    places = np.argsort(-mixed)
    return np.concatenate([mixed, places, np.maximum(places * sizes.width - 1, 0), np.arange(sizes.tiles)]).tolist()


def make_worklist(xp: Any, sizes: Sizes, orders: Any, active: Any, contracted: Any) -> Worklist:
    """Makes all lists of a shard.

    Args:
        xp: ``jax.numpy``, or a namespace with the same functions.
        sizes: the sizes of the lists.
        orders: the result of `make_orders` for these sizes.
        active: [tiles, blocks or more], 1 for each active tile.
        contracted: how many vocabulary tiles dhidden contracts in place; the lists by row block have only these.
    """
    mixed, places, before, tiles = orders.reshape(4, -1)
    active = active[:, : sizes.blocks]
    counts = xp.sum(active, 1, dtype=xp.int32)
    order = _take(xp, xp.argsort(counts, stable=True), mixed)
    table = active if sizes.group == 1 else xp.concatenate([active, (counts & 1)[:, None]], 1)
    sums = xp.cumsum(_take(xp, table, order).reshape(-1), 0, dtype=xp.int32)
    all_contracted = isinstance(contracted, int) and contracted >= sizes.tiles
    of_rows = active if all_contracted else active * (tiles < contracted)[:, None]
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
        row_blocks=_row_blocks(xp, sizes, active, cells, sums_by_row),
    )


def _row_blocks(xp: Any, sizes: Sizes, active: Any, cells: Any, sums_by_row: Any) -> Any:
    """Orders each batch's row blocks by the length of their contraction, so that all clusters end together."""
    if sizes.batches == 1:
        counts = xp.sum(active, 0, dtype=xp.int32)[None]
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
    """Returns the places of the first, second, … one in an array of 0 and 1 with these running ``sums``.

    ``numbers`` are 0, 1, …. If there are fewer ones, the other places are the length of the array.
    """
    if not hasattr(sums, "at"):
        return xp.searchsorted(sums, numbers, right=True, out_int32=True)
    places = xp.where(xp.diff(sums, prepend=0) > 0, sums - 1, len(numbers))  # XLA's search is a loop
    return xp.full_like(numbers, len(sums)).at[places].set(xp.arange(len(sums), dtype=xp.int32), mode="drop")


def mark_tiles(xp: Any, columns: Any, num_rows: Any, sizes: tuple[int, int], shape: tuple[int, int]) -> Any:
    """Returns 1 for each tile that holds one of these columns [T, K] of an unmasked row; -1 is no column.

    ``sizes`` are the sizes of a row block and of a vocabulary tile. ``shape`` is that of the result, [tiles, blocks].
    """
    (row_block, tile), token, size = sizes, xp.arange(len(columns), dtype=xp.int32)[:, None], shape[0] * shape[1]
    places = columns // tile * shape[1] + token // row_block
    places = xp.where((columns >= 0) & (token < num_rows), places, size)
    marked = xp.zeros(size + 1, dtype=xp.int32)  # the last place is for columns in no tile
    if hasattr(marked, "at"):
        marked = marked.at[places].set(1)
    else:
        marked[places] = xp.ones((), dtype=xp.int32)  # with a Python number, torch's host would wait for the GPU
    return marked[:size].reshape(shape)
