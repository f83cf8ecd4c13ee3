"""The lists of active tiles: what is in them, and that PyTorch's operations make the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_jax.mosaic import _threshold_tiles
from lce_jax.mosaic._threshold_tiles import Batch, Sizes, Worklist

LIVE = np.random.default_rng(0).random((17, 18))
SIZES = Sizes(tiles=9, blocks=5, group=2, slots=12, row_block=128, tile=256)


def make_worklist(active: np.ndarray, sizes: Sizes, contracted: int) -> tuple[Worklist, list[Batch]]:
    """By both; beside the mask there is something else."""
    given = [np.array(x, np.int32) for x in (_threshold_tiles.make_orders(sizes), np.c_[active, 77 + active])]
    found = [jax.jit(lambda *x: _threshold_tiles.make_worklist(jnp, sizes, *x, contracted))(*given)]
    found.append(_threshold_tiles.make_worklist(torch, sizes, *map(torch.from_numpy, given), contracted))
    of_jax, of_torch = (jax.tree.map(np.asarray, each) for each in found)
    jax.tree.map(np.testing.assert_array_equal, of_jax, of_torch)
    assert {x.dtype for x in jax.tree.leaves((of_jax, of_torch))} == {np.dtype(np.int32)}
    numbers = [Batch.of(sizes, i, *map(jnp.asarray, of_jax[1:3])) for i in range(sizes.batches)]
    return of_jax, [Batch(*map(int, batch)) for batch in numbers]


@pytest.mark.fast("half", "one row block")
@pytest.mark.parametrize(
    ("active", "sizes", "contracted"),
    [
        pytest.param(LIVE[:9, :5] < 0, SIZES, 9, id="none"),
        pytest.param(LIVE[:9, :5] < 0.1, SIZES, 7, id="few"),
        pytest.param(LIVE[:9, :5] < 0.5, SIZES, 7, id="half"),
        pytest.param(LIVE[:9, :5] < 1, SIZES, 9, id="all"),
        pytest.param(LIVE.reshape(-1, 1)[:20] < 0.4, Sizes(20, 1, 1, 7, 128, 256), 20, id="one row block"),
        pytest.param(LIVE[:3, :3] < 0.5, Sizes(3, 3, 1, 100, 128, 256), 0, id="one batch, nothing contracted"),
    ],
)
def test_lists_hold_every_active_tile_once(active: np.ndarray, sizes: Sizes, contracted: int) -> None:
    (work, batches), cells, by_row, first = make_worklist(active, sizes, contracted), [], [], [0]
    assert sorted(work.order) == list(range(sizes.tiles))
    for rank, tile in enumerate(work.order):
        blocks = [*np.flatnonzero(active[tile]), *[sizes.blocks] * (active[tile].sum() % sizes.group)]
        cells += [rank * sizes.width + block for block in blocks]
        first.append(len(cells))
        by_row += [block * sizes.tiles + rank for block in blocks if block < sizes.blocks and tile < contracted]
    pairs = (cells, work.sums, work.cells), (sorted(by_row), work.sums_by_row, work.cells_by_row)
    for of_cells, sums, found in pairs:
        assert found.tolist() == [*of_cells, *[len(sums)] * (len(found) - len(of_cells))]
        np.testing.assert_array_equal(sums, np.searchsorted(of_cells, np.arange(len(sums)), side="right"))
    of_batches = work.row_blocks.reshape(sizes.batches, sizes.blocks)
    known = active & (np.arange(sizes.tiles) < (sizes.tiles if sizes.batches == 1 else contracted))[:, None]
    for batch, row_blocks in zip(batches, of_batches, strict=True):
        assert sorted(row_blocks) == list(range(sizes.blocks))
        own = known[work.order[batch.rank : batch.rank + batch.num_ranks]].sum(0)
        assert np.all(np.diff(own[row_blocks]) >= 0)
    stop, counts = 0, active[work.order].sum(1)
    for batch in batches:
        assert batch.rank == stop
        stop = batch.rank + batch.num_ranks
        own = work.ranks[batch.rank : stop]
        assert sorted(own) == list(range(batch.rank, stop))
        assert np.all(np.diff(counts[own]) <= 0)
        assert (batch.entry, batch.entry + batch.num_entries) == (first[batch.rank], first[stop])
        assert batch.num_entries <= sizes.slots
    assert stop == sizes.tiles


@pytest.mark.slow
def test_each_batch_has_its_share_of_crowded_tiles() -> None:
    """Tiles of frequent ids are active in all row blocks, so that one batch could hold nothing else."""
    rng, tiles, blocks, crowded = np.random.default_rng(0), 400, 32, 40
    active = rng.random((tiles, blocks)) < np.where(np.arange(tiles) < crowded, 1.0, 0.1)[:, None]
    sizes = Sizes(tiles, blocks, 2, 32 * 25, 128, 256)
    work, batches = make_worklist(active, sizes, tiles)
    is_crowded = work.order < crowded
    shares = [is_crowded[b.rank : b.rank + b.num_ranks].mean() for b in batches if b.num_ranks]
    assert len(shares) >= 3
    assert np.allclose(shares, crowded / tiles, atol=0.02), shares
