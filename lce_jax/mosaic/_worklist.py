"""The live tiles of a shard as lists, along which the kernels of a sparse backward walk.

A live tile, a row block by a vocabulary tile, is an entry of one list, by vocabulary tile. A batch is a range of that
list: it fills an array of dlogits, a slot of [row block, tile] for each entry.

Vocabulary tiles that are live in many row blocks and those live in few are mixed in that order, so that each batch, and
each row block's part of it, has the same share of both. dhidden reads the weight's tile once for many row blocks, or
for each of the few: alone, the latter would wait for memory, while the former would leave it idle.

Every array has a static size, so other live tiles compile nothing anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class Worklist(NamedTuple):
    """All live tiles of a shard. A rank is the place of a vocabulary tile in their order."""

    row_blocks: Int[Array, "entries"]  # of each entry
    tiles: Int[Array, "entries"]
    order: Int[Array, "ranks"]  # the vocabulary tile at each rank
    counts: Int[Array, "ranks"]  # its live row blocks
    first: Int[Array, "ranks+1"]  # its first entry
    by_row: Int[Array, "entries"]  # the entries once more, by row block and then by rank
    tile_by_row: Int[Array, "entries"]  # the vocabulary tile of each of these
    row_first: Int[Array, "blocks"]  # where a row block begins in both
    before: Int[Array, "ranks+1 blocks"]  # its live tiles of a lower rank

    @classmethod
    def of(cls, live: Bool[Array, "tiles blocks"], group: int, contracted: Bool[Array, "tiles"] | None) -> Worklist:
        """The live tiles, those of one vocabulary tile in whole groups, the last one filled up with row block 0.

        A cluster of kernel blocks takes a group, which shares a tile of the weight. The lists by row block have only
        vocabulary tiles that dhidden contracts; None: all.
        """
        num_tiles, blocks = live.shape
        by_count = jnp.argsort(jnp.sum(live, axis=1, dtype=jnp.int32), stable=True).astype(jnp.int32)
        order = by_count[_mixed(num_tiles)]
        live = live[order]
        counts = jnp.sum(live, axis=1, dtype=jnp.int32)
        first = _sums_before(-(-counts // group) * group)
        size = num_tiles * (-(-blocks // group) * group)
        rank, block = (lax.broadcasted_iota(jnp.int32, live.shape, dim) for dim in (0, 1))
        outside = size + rank * blocks + block
        entry = first[:-1, None] + _counted(live.T).T[:, :-1]
        of_rows = live if contracted is None else live & contracted[order][:, None]
        before = _counted(of_rows)
        row_first = _sums_before(before[-1])[:-1]

        def scattered(which: Array, places: Array, values: Array) -> Array:
            places = jnp.where(which, places, outside)
            return jnp.zeros((size,), jnp.int32).at[places].set(values, mode="drop", unique_indices=True)

        def tiles() -> Array:
            """Of all entries, also of those that fill up a group."""
            rank, place = (lax.broadcasted_iota(jnp.int32, (num_tiles, size // num_tiles), dim) for dim in (0, 1))
            places = jnp.where(place < (first[1:] - first[:-1])[:, None], first[:-1, None] + place, size + rank + place)
            empty = jnp.zeros((size,), jnp.int32)
            return empty.at[places].set(jnp.broadcast_to(order[:, None], places.shape), mode="drop")

        by_row = row_first[None, :] + before[:-1]
        tile = jnp.broadcast_to(order[:, None], live.shape)
        return cls(
            row_blocks=scattered(live, entry, block),
            tiles=tiles(),
            order=order,
            counts=counts,
            first=first,
            by_row=scattered(of_rows, by_row, entry),
            tile_by_row=scattered(of_rows, by_row, tile),
            row_first=row_first,
            before=before,
        )


class Batch(NamedTuple):
    """A range of ranks, whose dlogits exist at the same time. All are numbers that are known at run time."""

    rank: Any  # the first
    num_ranks: Any
    entry: Any  # the first
    num_entries: Any
    num_row_blocks: Any  # those with an entry that dhidden contracts
    num_columns: Any  # live columns of the shard

    @classmethod
    def unpack(cls, scalars: Any) -> Batch:
        """In a kernel."""
        return cls(*(scalars[i] for i in range(len(cls._fields))))


class RowLists(NamedTuple):
    """A batch by row block: which entries each contracts. Those with the most come first."""

    row_blocks: Int[Array, "blocks"]
    first: Int[Array, "blocks"]  # in `Worklist.by_row`
    counts: Int[Array, "blocks"]


class Batches(NamedTuple):
    """All batches of a shard, in turn.

    As many as any live tiles may need, so that no loop over them waits for the device to say how many there are. Those
    at the end may be empty.
    """

    scalars: Int[Array, "batches fields"]  # a `Batch` each
    rows: RowLists  # [batches, blocks]
    ranks: Int[Array, "ranks"]  # all, by batch; in each, those with the most live row blocks come first

    def at(self, i: Any) -> tuple[Int[Array, "fields"], RowLists]:
        """The numbers and the lists of one batch."""

        def of_batch(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, i, keepdims=False)

        return of_batch(self.scalars), RowLists(*map(of_batch, self.rows))

    @classmethod
    def of(cls, work: Worklist, slots: int, group: int, num_columns: Any) -> Batches:
        """Batches of at most ``slots`` entries, at least those of one full vocabulary tile."""
        num_tiles, size = work.order.shape[0], work.row_blocks.shape[0]
        # A vocabulary tile belongs to the batch in whose share it begins, and reaches beyond it.
        share = size if size <= slots else slots - size // num_tiles + group
        starts = jnp.arange(-(-size // share) + 1, dtype=jnp.int32) * share
        ranks = jnp.sum(work.first[None, :-1] < starts[:, None], axis=1, dtype=jnp.int32)
        entries, before = work.first[ranks], work.before[ranks]
        batch = jnp.sum(work.first[:-1, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
        by_count = jnp.argsort(batch * (work.row_first.shape[0] + 1) - work.counts, stable=True).astype(jnp.int32)
        counts = before[1:] - before[:-1]
        order = jnp.argsort(-counts, axis=1, stable=True).astype(jnp.int32)
        first, counts = (jnp.take_along_axis(x, order, axis=1) for x in (work.row_first + before[:-1], counts))
        fields = Batch(
            ranks[:-1],
            ranks[1:] - ranks[:-1],
            entries[:-1],
            entries[1:] - entries[:-1],
            jnp.sum(counts > 0, axis=1, dtype=jnp.int32),
            jnp.broadcast_to(jnp.asarray(num_columns, jnp.int32), entries[1:].shape),
        )
        return cls(jnp.stack(fields, axis=1), RowLists(order, first, counts), by_count)


def _mixed(n: int) -> Int[np.ndarray, "n"]:
    """An order of n things in which each part of it has about the same share of the first as of the last.

    The fractional parts of multiples of the golden ratio, in fixed point, are spread evenly.

    Example:
        >>> from lce_jax.mosaic._worklist import _mixed
        >>> _mixed(8).tolist()
        [0, 5, 2, 7, 4, 1, 6, 3]
    """
    return np.argsort((np.arange(n, dtype=np.uint64) * 0x9E3779B9) & 0xFFFFFFFF, kind="stable")


def _sums_before(x: Int[Array, "n"]) -> Int[Array, "n+1"]:
    """The sum of all before each, and of all, in one fused kernel on a GPU."""
    return jnp.sum(jnp.where(_earlier(x.shape[0]), x[None, :], 0), axis=1, dtype=jnp.int32)


def _counted(x: Bool[Array, "n m"]) -> Int[Array, "n+1 m"]:
    """How many are True above each, and in all. The product is exact: float32 holds these counts."""
    earlier = _earlier(x.shape[0]).astype(jnp.float32)
    return jnp.matmul(earlier, x.astype(jnp.float32), precision="highest").astype(jnp.int32)


def _earlier(n: int) -> Bool[Array, "n+1 n"]:
    rows, columns = (lax.broadcasted_iota(jnp.int32, (n + 1, n), dim) for dim in (0, 1))
    return columns < rows
