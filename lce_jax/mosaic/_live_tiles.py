"""The live tiles of a shard as lists, along which the kernels of a sparse backward walk.

A live tile, a row block by a vocabulary tile, is an entry of one list, by vocabulary tile. A batch is a range of that
list: it fills an array of dlogits, a slot of [row block, tile] for each entry.

Vocabulary tiles that are live in many row blocks and those live in few are mixed in that order, so that each batch, and
each row block's part of it, has the same share of both. dhidden reads the weight's tile once for many row blocks, or
for each of the few: alone, the latter would wait for memory, while the former would leave it idle.

Every array has a static size, so other live tiles compile nothing anew. What is after the last live tile in a list may
be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int


class Sizes(NamedTuple):
    """The static part of the lists."""

    tiles: int  # of the vocabulary
    blocks: int  # of rows
    group: int  # entries that are computed together: those of one vocabulary tile come in whole groups
    slots: int  # for a batch's dlogits: at least those of two vocabulary tiles that are live everywhere

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

    row_blocks: Int[Array, "entries"]  # of each entry; 0 where it fills up a group
    tiles: Int[Array, "entries"]
    order: Int[Array, "ranks"]  # the vocabulary tile at each rank
    counts: Int[Array, "ranks"]  # its live row blocks
    first: Int[Array, "ranks+1"]  # its first entry
    places: Int[Array, "tiles blocks"] | None  # the entry of each tile, -1 where it is not live, if that was asked for
    by_row: Int[Array, "blocks*tiles"]  # the entries that dhidden contracts, once more, by row block and then by rank
    tile_by_row: Int[Array, "blocks*tiles"]  # the vocabulary tile of each of these


class Batch(NamedTuple):
    """A range of ranks, whose dlogits exist at the same time. All are numbers that are known at run time."""

    rank: Any  # the first
    num_ranks: Any
    entry: Any  # the first
    num_entries: Any
    num_row_blocks: Any  # those with an entry that dhidden contracts
    num_columns: Any  # live columns of the shard

    @classmethod
    def unpack(cls, scalars: Any, batch: Any) -> Batch:
        """In a kernel."""
        return cls(*(scalars[batch, i] for i in range(len(cls._fields))))


class RowLists(NamedTuple):
    """Batches by row block: which entries each contracts. In a batch those with the most come first."""

    row_blocks: Int[Array, "batches blocks"]
    first: Int[Array, "batches blocks"]  # in `Worklist.by_row`
    counts: Int[Array, "batches blocks"]


class Batches(NamedTuple):
    """All batches of a shard, in turn."""

    scalars: Int[Array, "batches fields"]  # a `Batch` each
    rows: RowLists
    ranks: Int[Array, "ranks"]  # all, by batch; in each, those with the most live row blocks come first


def mixed(n: int) -> list[int]:
    """An order of n things in which each part of it has about the same share of the first as of the last.

    The fractional parts of multiples of the golden ratio are spread evenly.
    """
    fractions = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9)  # times 2³²
    return np.argsort(fractions, kind="stable").tolist()


def lists(
    xp: Any, sizes: Sizes, mixed: Any, live: Any, contracted: Any, num_columns: Any, has_places: bool
) -> tuple[Worklist, Batches]:
    """All of a shard's lists.

    Args:
        xp: ``jax.numpy``, or a namespace like it.
        sizes: of the lists.
        mixed: `mixed` of the vocabulary tiles.
        live: [tiles, blocks or more], 1 where a tile is live.
        contracted: how many of the first vocabulary tiles dhidden contracts in place: those in the lists by row block.
        num_columns: live columns of the shard.
        has_places: whether `Worklist.places` is asked for.
    """
    live = live[:, : sizes.blocks]
    order = _argsort(xp, xp.sum(live, 1, dtype=xp.int32))[mixed]
    live = live[order]
    counts, block = xp.sum(live, 1, dtype=xp.int32), xp.arange(sizes.blocks, dtype=xp.int32)
    first = _sums_before(xp, (counts + (sizes.group - 1)) & -sizes.group)
    entry = first[:-1, None] + xp.cumsum(live, 1, dtype=xp.int32) - live
    in_tile = xp.arange(sizes.entries_of_tile, dtype=xp.int32)
    of_rows = live * (order < contracted)[:, None]
    before = _sums_before(xp, of_rows)  # the entries of each row block that dhidden contracts and that have lower ranks
    places = xp.where(of_rows > 0, block * sizes.tiles + before[:-1], sizes.blocks * sizes.tiles)
    in_entries = xp.where(live > 0, entry, sizes.entries)
    whole_groups = xp.where(in_tile < (first[1:] - first[:-1])[:, None], first[:-1, None] + in_tile, sizes.entries)
    tiles = put(xp, sizes.entries, whole_groups, order[:, None])
    by_row = put(xp, sizes.blocks * sizes.tiles, places, entry)
    of_tiles = None
    if has_places:
        rank_of = put(xp, sizes.tiles, order, xp.arange(sizes.tiles, dtype=xp.int32))
        of_tiles = xp.where(live > 0, entry, -1)[rank_of]
    work = Worklist(
        row_blocks=put(xp, sizes.entries, in_entries, block[None]),
        tiles=tiles,
        order=order,
        counts=counts,
        first=first,
        places=of_tiles,
        by_row=by_row,
        tile_by_row=tiles[by_row],
    )
    return work, _batches(xp, sizes, work, before, num_columns)


def _batches(xp: Any, sizes: Sizes, work: Worklist, before: Any, num_columns: Any) -> Batches:
    starts = xp.arange(sizes.batches + 1, dtype=xp.int32) * sizes.share
    ranks = xp.sum(work.first[:-1] < starts[:, None], 1, dtype=xp.int32)
    entries, before, batch = work.first[ranks], before[ranks], work.first[:-1] // sizes.share
    counts = before[1:] - before[:-1]
    order = _argsort(xp, -counts)
    which = xp.arange(sizes.batches, dtype=xp.int32)[:, None], order
    begins = xp.arange(sizes.blocks, dtype=xp.int32) * sizes.tiles + before[:-1]
    fields = Batch(
        ranks[:-1],
        ranks[1:] - ranks[:-1],
        entries[:-1],
        entries[1:] - entries[:-1],
        xp.sum(counts > 0, 1, dtype=xp.int32),
        xp.zeros_like(entries[1:]) + num_columns,
    )
    by_count = _argsort(xp, batch * (sizes.blocks + 1) - work.counts)
    return Batches(xp.stack(fields, 1), RowLists(order, begins[which], counts[which]), by_count)


def _argsort(xp: Any, keys: Any) -> Any:
    """Along the last dimension; what is equal stays in its order."""
    return xp.asarray(xp.argsort(keys, stable=True), dtype=xp.int32)


def _sums_before(xp: Any, x: Any) -> Any:
    """The sum of all that come before each along the first dimension, and of all."""
    return xp.concatenate([xp.zeros_like(x[:1]), xp.cumsum(x, 0, dtype=xp.int32)])


def held(xp: Any, columns: Any, num_rows: Any, sizes: tuple[int, int], shape: tuple[int, int]) -> Any:
    """1 where a tile holds one of these columns [T, K], -1 for none, of a row that counts.

    ``sizes`` are those of a row block and of a vocabulary tile, ``shape`` of the result, [tiles, blocks].
    """
    (row_block, tile), token = sizes, xp.arange(len(columns), dtype=xp.int32)[:, None]
    places = columns // tile * shape[1] + token // row_block
    places = xp.where((columns >= 0) & (token < num_rows), places, shape[0] * shape[1])
    return put(xp, shape[0] * shape[1], places, xp.ones_like(places)).reshape(shape)


def put(xp: Any, size: int, places: Any, values: Any) -> Any:
    """``size`` numbers with the values at their places, and 0 elsewhere. Place ``size`` is nowhere."""
    values, padded = xp.broadcast_to(values, places.shape), xp.zeros(size + 1, dtype=xp.int32)
    put = padded.at[places].set if hasattr(padded, "at") else lambda values: padded.index_put_((places,), values)
    return put(values)[:size]
