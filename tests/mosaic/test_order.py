"""The orders in which the kernels take tiles: each tile once, and lists of unequal length dealt evenly."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax.mosaic.common._tiles import Tuning, longest_first_index, snake_index, turning_snake_index
from lce_jax.mosaic.sm90._tuning import BY_KERNEL


def taken(order: Any, lists: int, tiles: int) -> np.ndarray:
    """The (list, tile) of each index."""

    def run(lists: Any, tiles: Any) -> Any:  # numbers that are known at run time, as in a kernel
        return jax.vmap(lambda i: jnp.stack(order(i, lists, tiles)))(jnp.arange(count, dtype=jnp.int32))

    count = lists * tiles
    return np.asarray(jax.jit(run)(jnp.int32(lists), jnp.int32(tiles)))


@pytest.mark.parametrize(("lists", "tiles"), [(1, 1), (64, 8), (65, 8), (7, 3), (300, 2), (5, 40)])
@pytest.mark.parametrize("clusters", [66, 132])
def test_each_tile_once(lists: int, tiles: int, clusters: int) -> None:
    orders = [
        functools.partial(longest_first_index, clusters),
        *(functools.partial(turning_snake_index, Tuning(tile_k=64, stages=4, snake=n), clusters) for n in (16, 128)),
    ]
    for order in orders:
        assert sorted(map(tuple, taken(order, lists, tiles))) == [(i, j) for i in range(lists) for j in range(tiles)]


@pytest.mark.parametrize(
    ("lists", "tiles", "order", "most"),
    [
        (64, 8, functools.partial(turning_snake_index, BY_KERNEL["active_dhidden"], 66), 1.06),
        (228, 16, functools.partial(longest_first_index, 66), 1.02),
    ],
    ids=["dhidden", "dweight"],
)
def test_lists_of_unequal_length_are_dealt_evenly(lists: int, tiles: int, order: Any, most: float) -> None:
    """On 66 clusters, of lists between 150 and 100 long. 64 · 8 tiles are 7.76 waves: 8 take 1.03 of the mean."""
    lengths = np.linspace(150, 100, lists)

    def slowest(order: Any) -> float:
        steps = np.zeros(-(-lists * tiles // 66) * 66)
        steps[: lists * tiles] = lengths[taken(order, lists, tiles)[:, 0]]
        loads = steps.reshape(-1, 66).sum(0)
        return float(loads.max() / loads.mean())

    plain = functools.partial(snake_index, Tuning(tile_k=64, stages=4, cluster=2, snake=128))
    assert slowest(order) < most < slowest(plain)
