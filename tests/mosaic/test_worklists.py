"""The kernels that make the lists of live tiles, against JAX's own operations, number by number; what is in the lists.

What is after the last live tile in a list may be anything, and is not compared.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax.mosaic import _threshold_backward
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._host import TRACED
from lce_jax.mosaic._live_tiles import Batch, Sizes
from lce_jax.mosaic._pallas import interpreting, plgpu
from tests import worklist_oracle
from tests.mosaic_interpreter import races_found

COLUMNS = 77
LIVE = np.random.default_rng(0).random((17, 18))
SLOW = pytest.mark.slow
SIZES = Sizes(tiles=9, blocks=5, group=2, slots=12)


def of_kernels(live: np.ndarray, sizes: Sizes, contracted: int) -> Any:
    """The lists, by the host code and the kernels of the product; beside the mask there is something else."""
    beside = np.full((sizes.tiles, -(-sizes.blocks // 128) * 128), COLUMNS, np.int32)
    beside[:, : sizes.blocks] = live
    call: Any = mock.create_autospec(KernelCall, instance=True, host=TRACED)
    call.prepared.num_columns = COLUMNS
    with (
        mock.patch.object(_threshold_backward._edge, "contracted_tiles", return_value=contracted),
        interpreting(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        return jax.jit(lambda live: _threshold_backward.lists(call, sizes, live))(beside)


@pytest.mark.parametrize(
    ("live", "sizes", "contracted"),
    [
        pytest.param(LIVE[:9, :5] < 0.4, SIZES, 6, id="some"),
        pytest.param(LIVE[:9, :5] < 0, SIZES, 9, id="none"),
        pytest.param(LIVE[:9, :5] < 1, SIZES, 9, id="all"),
        pytest.param(LIVE.reshape(-1, 1)[:20] < 0.4, Sizes(20, 1, 1, 7), 20, id="one row block"),
        pytest.param(LIVE[:3, :3] < 0.5, Sizes(3, 3, 1, 100), 0, id="one batch, nothing contracted"),
        pytest.param(LIVE < 0.3, Sizes(17, 18, 2, 60), 16, id="walks of several steps"),
        pytest.param(
            LIVE[:2].repeat(8, 1)[:, :130] < 0.5,
            Sizes(2, 130, 2, 1000),
            2,
            id="more than 128 row blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LIVE.reshape(-1, 2)[:130] < 0.3, Sizes(130, 2, 1, 40), 130, id="more than 128 tiles", marks=pytest.mark.slow
        ),
    ],
)
def test_the_numbers_of_the_oracle(live: np.ndarray, sizes: Sizes, contracted: int) -> None:
    found = of_kernels(live, sizes, contracted)
    assert not races_found()
    work, batches = jax.tree.map(np.asarray, found)
    oracle = jax.jit(lambda live: worklist_oracle.lists(live, sizes, contracted, COLUMNS))
    want, want_batches = jax.tree.map(np.asarray, oracle(jnp.asarray(live)))
    count = {"row_blocks": want.first[-1], "tiles": want.first[-1]}
    np.testing.assert_array_equal(work.places[:, : sizes.tiles], want.places)
    for name in ("order", "counts", "first", "rank_of", *count):
        expected = getattr(want, name)[: count.get(name)]
        np.testing.assert_array_equal(getattr(work, name)[: len(expected)], expected, err_msg=name)
    np.testing.assert_array_equal(batches.scalars, want_batches.scalars)
    np.testing.assert_array_equal(batches.ranks[: sizes.tiles], want_batches.ranks)
    jax.tree.map(np.testing.assert_array_equal, batches.rows, want_batches.rows)
    for name in ("by_row", "tile_by_row"):
        for first, size in zip(batches.rows.first.flat, batches.rows.counts.flat, strict=True):
            places = slice(first, first + size)
            np.testing.assert_array_equal(getattr(work, name)[places], getattr(want, name)[places], err_msg=name)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_lists_hold_every_live_tile_once(share: float) -> None:
    live, contracted = LIVE[:9, :5] < share, 7
    work, batches = jax.tree.map(np.asarray, worklist_oracle.lists(jnp.asarray(live), SIZES, contracted, COLUMNS))
    first, counts, order = work.first, work.counts, work.order
    assert np.all(first % 2 == 0)
    entries = {(order[r], int(work.row_blocks[first[r] + i])) for r in range(9) for i in range(counts[r])}
    assert entries == {(tile, block) for tile, block in np.argwhere(live)}
    for rank in range(9):
        assert np.all(work.tiles[first[rank] : first[rank + 1]] == order[rank])
    seen, stop = [], 0
    for i in range(SIZES.batches):
        batch, of_rows = Batch.unpack(batches.scalars, i), [x[i] for x in batches.rows]
        assert batch.rank == stop
        stop = batch.rank + batch.num_ranks
        own = batches.ranks[batch.rank : stop]
        assert sorted(own) == list(range(batch.rank, stop))
        assert np.all(np.diff(counts[own]) <= 0)
        assert (batch.entry, batch.entry + batch.num_entries) == (first[batch.rank], first[stop])
        assert batch.num_entries <= SIZES.slots
        assert batch.num_columns == COLUMNS
        assert np.all(np.diff(of_rows[2]) <= 0)
        assert batch.num_row_blocks == np.sum(of_rows[2] > 0)
        for block, begin, count in zip(*of_rows, strict=True):
            for place in range(begin, begin + count):
                entry = int(work.by_row[place])
                assert batch.entry <= entry < first[stop]
                assert int(work.row_blocks[entry]) == block
                seen.append((int(work.tile_by_row[place]), int(block)))
    assert stop == 9
    assert sorted(seen) == [(tile, block) for tile, block in np.argwhere(live) if tile < contracted]


def test_each_batch_has_its_share_of_crowded_tiles() -> None:
    """Those of a language model's frequent ids, live in all row blocks, which a batch of their own would hold alone."""
    rng, tiles, blocks, crowded = np.random.default_rng(0), 400, 32, 40
    live = rng.random((tiles, blocks)) < np.where(np.arange(tiles) < crowded, 1.0, 0.1)[:, None]
    sizes = Sizes(tiles, blocks, 2, 32 * 25)
    work, found = worklist_oracle.lists(jnp.asarray(live), sizes, tiles, COLUMNS)
    scalars = np.asarray(found.scalars)
    batches = [b for b in (Batch.unpack(scalars, i) for i in range(sizes.batches)) if b.num_ranks]
    is_crowded = np.asarray(work.order) < crowded
    shares = [is_crowded[b.rank : b.rank + b.num_ranks].mean() for b in batches]
    assert len(shares) >= 3
    assert np.allclose(shares, crowded / tiles, atol=0.02), shares
