"""The lists of live tiles by JAX's own operations: what `lce_jax.mosaic.common._worklists` is compared with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax.mosaic._live_tiles import Batch, Batches, RowLists, Sizes, Worklist


def lists(live: Any, sizes: Sizes, contracted: int, num_columns: int) -> tuple[Worklist, Batches]:
    """Of a mask [tiles, blocks]; dhidden contracts the first ``contracted`` tiles."""
    work, before = worklist(live, sizes.group, jnp.arange(sizes.tiles) < contracted)
    return work, batches(work, before, sizes, num_columns)


def worklist(live: Any, group: int, contracted: Any) -> tuple[Worklist, Any]:
    """The worklist, and how many tiles of a lower rank each row block contracts."""
    num_tiles, blocks = live.shape
    by_count = jnp.argsort(jnp.sum(live, axis=1, dtype=jnp.int32), stable=True).astype(jnp.int32)
    order = by_count[mixed(num_tiles)]
    live = live[order]
    counts = jnp.sum(live, axis=1, dtype=jnp.int32)
    first = sums_before(-(-counts // group) * group)
    size = num_tiles * (-(-blocks // group) * group)
    rank, block = (lax.broadcasted_iota(jnp.int32, live.shape, dim) for dim in (0, 1))
    entry = first[:-1, None] + counted(live.T).T[:, :-1]
    of_rows = live & contracted[order][:, None]
    before = counted(of_rows)

    def scattered(size: int, which: Any, places: Any, values: Any) -> Any:
        return jnp.zeros((size,), jnp.int32).at[jnp.where(which, places, size)].set(values, mode="drop")

    def tiles() -> Any:
        """Of all entries, also of those that fill up a group."""
        place = lax.broadcasted_iota(jnp.int32, (num_tiles, size // num_tiles), 1)
        inside = place < (first[1:] - first[:-1])[:, None]
        return scattered(size, inside, first[:-1, None] + place, jnp.broadcast_to(order[:, None], place.shape))

    by_row, rows = block * num_tiles + before[:-1], blocks * num_tiles
    work = Worklist(
        row_blocks=scattered(size, live, entry, block),
        tiles=tiles(),
        order=order,
        counts=counts,
        first=first,
        places=jnp.where(live, entry, -1).T,
        rank_of=jnp.argsort(order).astype(jnp.int32),
        by_row=scattered(rows, of_rows, by_row, entry),
        tile_by_row=scattered(rows, of_rows, by_row, order[rank]),
    )
    return work, before


def batches(work: Worklist, before: Any, sizes: Sizes, num_columns: int) -> Batches:
    """Of a worklist."""
    blocks = before.shape[1]
    starts = jnp.arange(sizes.batches + 1, dtype=jnp.int32) * sizes.share
    ranks = jnp.sum(work.first[None, :-1] < starts[:, None], axis=1, dtype=jnp.int32)
    entries, before = work.first[ranks], before[ranks]
    batch = jnp.sum(work.first[:-1, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
    by_count = jnp.argsort(batch * (blocks + 1) - work.counts, stable=True).astype(jnp.int32)
    counts = before[1:] - before[:-1]
    order = jnp.argsort(-counts, axis=1, stable=True).astype(jnp.int32)
    begins = jnp.arange(blocks, dtype=jnp.int32) * sizes.tiles + before[:-1]
    first, counts = (jnp.take_along_axis(x, order, axis=1) for x in (begins, counts))
    fields = Batch(
        ranks[:-1],
        ranks[1:] - ranks[:-1],
        entries[:-1],
        entries[1:] - entries[:-1],
        jnp.sum(counts > 0, axis=1, dtype=jnp.int32),
        jnp.broadcast_to(jnp.asarray(num_columns, jnp.int32), entries[1:].shape),
    )
    return Batches(jnp.stack(fields, axis=1), RowLists(order, first, counts), by_count)


def mixed(n: int) -> np.ndarray:
    """An order of n things in which each part of it has about the same share of the first as of the last."""
    return np.argsort((np.arange(n, dtype=np.uint64) * 0x9E3779B9) & 0xFFFFFFFF, kind="stable")


def sums_before(x: Any) -> Any:
    """The sum of all before each, and of all."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])


def counted(x: Any) -> Any:
    """How many are True above each, and in all."""
    return jnp.concatenate([jnp.zeros((1, x.shape[1]), jnp.int32), jnp.cumsum(x, axis=0, dtype=jnp.int32)])
