"""The lists of live tiles: what is in them, and that PyTorch's operations make the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_jax.mosaic import _live_tiles
from lce_jax.mosaic._live_tiles import Batch, Sizes

COLUMNS = 77
LIVE = np.random.default_rng(0).random((17, 18))
SIZES = Sizes(tiles=9, blocks=5, group=2, slots=12)


def lists(live: np.ndarray, sizes: Sizes, contracted: int) -> Any:
    """By both; beside the mask there is something else."""
    beside = np.pad(live.astype(np.int32), ((0, 0), (0, 3)), constant_values=COLUMNS)
    mixed, found = np.asarray(_live_tiles.mixed(sizes.tiles), np.int32), []
    for xp, array in ((jnp, jnp.asarray), (torch, torch.from_numpy)):
        found.append(_live_tiles.lists(xp, sizes, array(mixed), array(beside), contracted, COLUMNS, True))
    of_jax, of_torch = (jax.tree.map(np.asarray, each) for each in found)
    jax.tree.map(np.testing.assert_array_equal, of_jax, of_torch)
    assert {x.dtype for x in jax.tree.leaves((of_jax, of_torch))} == {np.dtype(np.int32)}
    return of_jax


@pytest.mark.parametrize(
    ("live", "sizes", "contracted"),
    [
        pytest.param(LIVE[:9, :5] < 0, SIZES, 9, id="none"),
        pytest.param(LIVE[:9, :5] < 0.1, SIZES, 7, id="few"),
        pytest.param(LIVE[:9, :5] < 0.5, SIZES, 7, id="half"),
        pytest.param(LIVE[:9, :5] < 1, SIZES, 9, id="all"),
        pytest.param(LIVE.reshape(-1, 1)[:20] < 0.4, Sizes(20, 1, 1, 7), 20, id="one row block"),
        pytest.param(LIVE[:3, :3] < 0.5, Sizes(3, 3, 1, 100), 0, id="one batch, nothing contracted"),
    ],
)
def test_lists_hold_every_live_tile_once(live: np.ndarray, sizes: Sizes, contracted: int) -> None:
    work, batches = lists(live, sizes, contracted)
    first, counts, order = work.first, work.counts, work.order
    assert np.all(first % sizes.group == 0)
    assert sorted(order) == list(range(sizes.tiles))
    entries = {(order[r], int(work.row_blocks[first[r] + i])) for r in range(sizes.tiles) for i in range(counts[r])}
    assert entries == {(tile, block) for tile, block in np.argwhere(live)}
    for rank in range(sizes.tiles):
        assert np.all(work.tiles[first[rank] : first[rank + 1]] == order[rank])
        assert not work.row_blocks[first[rank] + counts[rank] : first[rank + 1]].any()
    for (tile, block), entry in np.ndenumerate(work.places):
        assert (work.tiles[entry], work.row_blocks[entry]) == (tile, block) if live[tile, block] else entry == -1
    seen, stop = [], 0
    for i in range(sizes.batches):
        batch, of_rows = Batch.unpack(batches.scalars, i), [x[i] for x in batches.rows]
        assert batch.rank == stop
        stop = batch.rank + batch.num_ranks
        own = batches.ranks[batch.rank : stop]
        assert sorted(own) == list(range(batch.rank, stop))
        assert np.all(np.diff(counts[own]) <= 0)
        assert (batch.entry, batch.entry + batch.num_entries) == (first[batch.rank], first[stop])
        assert batch.num_entries <= sizes.slots
        assert batch.num_columns == COLUMNS
        assert np.all(np.diff(of_rows[2]) <= 0)
        assert batch.num_row_blocks == np.sum(of_rows[2] > 0)
        for block, begin, count in zip(*of_rows, strict=True):
            for place in range(begin, begin + count):
                entry = int(work.by_row[place])
                assert batch.entry <= entry < first[stop]
                assert int(work.row_blocks[entry]) == block
                seen.append((int(work.tile_by_row[place]), int(block)))
    assert stop == sizes.tiles
    assert sorted(seen) == [(tile, block) for tile, block in np.argwhere(live) if tile < contracted]


def test_each_batch_has_its_share_of_crowded_tiles() -> None:
    """Those of a language model's frequent ids, live in all row blocks, which a batch of their own would hold alone."""
    rng, tiles, blocks, crowded = np.random.default_rng(0), 400, 32, 40
    live = rng.random((tiles, blocks)) < np.where(np.arange(tiles) < crowded, 1.0, 0.1)[:, None]
    sizes = Sizes(tiles, blocks, 2, 32 * 25)
    work, found = lists(live, sizes, tiles)
    batches = [b for b in (Batch.unpack(found.scalars, i) for i in range(sizes.batches)) if b.num_ranks]
    is_crowded = work.order < crowded
    shares = [is_crowded[b.rank : b.rank + b.num_ranks].mean() for b in batches]
    assert len(shares) >= 3
    assert np.allclose(shares, crowded / tiles, atol=0.02), shares
