"""Sums over shards and splits are added in one order, in every process.

XLA times several versions of a reduction on a GPU, and two processes can choose versions that round differently. An
addition of two arrays has one result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax.mathematics import _kl, _statistics
from lce_jax.mathematics._kl import KLStatistics, MixtureSums
from lce_jax.mosaic import _chunks
from lce_jax.run import _topk
from lce_jax.types._types import Call, ShardStatistics

SHARDS, TOKENS, COLUMNS = 4, 3, 5
EACH, STACKED = jnp.ones((SHARDS, TOKENS)), jnp.ones((SHARDS, TOKENS, COLUMNS))


def merge_statistics(x: jax.Array) -> Any:
    return _statistics.merge(ShardStatistics(*[x] * 7, candidates=STACKED, support=x), 1.0)


def merge_divergences(x: jax.Array) -> Any:
    return _kl.merge(KLStatistics(*[x] * 6), (1.0, 1.0))


def merge_mixtures(x: jax.Array) -> Any:
    return MixtureSums.merge(jnp.stack([x, x], axis=1))


def merge_largest(x: jax.Array) -> Any:
    ids = jnp.zeros(STACKED.shape, jnp.int32)
    largest = _topk.Largest(STACKED * x[..., None], ids, None, x)
    return _topk._merge(Call(top_k=2), largest, jnp.ones((1, 1)))


def sum_splits(x: jax.Array) -> Any:
    return _chunks.sum_dhidden(x[..., None] * STACKED, Call(num_tokens=TOKENS, hidden_size=COLUMNS))


@pytest.mark.parametrize("add", [merge_statistics, merge_divergences, merge_mixtures, merge_largest, sum_splits])
def test_xla_chooses_no_order(add: Any) -> None:
    program = str(jax.make_jaxpr(add)(EACH))
    assert " add " in program
    assert not [name for name in ("reduce_sum", "dot_general", "cumsum") if name in program]


def test_parts_are_added_from_the_first() -> None:
    parts = jnp.array([[2.0**24], [1.0], [-(2.0**24)], [1.0]])  # in float32, 2^24 + 1 is 2^24
    assert jax.jit(_statistics.sum_in_order)(parts) == 1.0
    assert jax.jit(_statistics.sum_in_order)(parts[jnp.array([0, 2, 1, 3])]) == 2.0
