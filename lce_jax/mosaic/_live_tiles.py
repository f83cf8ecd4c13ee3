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
    places: Int[Array, "blocks ranks"]  # the entry of a row block in each, -1 where it is not live
    rank_of: Int[Array, "tiles"]  # each vocabulary tile's rank
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


class Order(NamedTuple):
    """The order of the vocabulary tiles, in both directions."""

    tiles: Int[Array, "ranks"]  # the vocabulary tile at each rank
    counts: Int[Array, "ranks"]  # its live row blocks
    rank_of: Int[Array, "tiles"]  # each vocabulary tile's rank


class Entries(NamedTuple):
    """What each rank adds to a `Worklist`."""

    row_blocks: Int[Array, "entries"]
    tiles: Int[Array, "entries"]
    first: Int[Array, "ranks+1"]
    places: Int[Array, "blocks ranks"]  # the entry of a row block, -1 where it has none


class RowEntries(NamedTuple):
    """What each row block adds."""

    by_row: Int[Array, "blocks*tiles"]
    tile_by_row: Int[Array, "blocks*tiles"]
    starts: Int[Array, "batches blocks"]  # of its list in each batch
    counts: Int[Array, "batches blocks"]
