"""The two loops of `lce_jax.xla._walk`: what they visit, and what they write."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax.xla import _walk


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
@pytest.mark.parametrize("num_rows", [None, 0, 1, 7, 10])
def test_chunks_of_tokens(size: int, num_rows: int | None) -> None:
    """Each row that counts has its own result. Rows in no chunk are 0; those after ``num_rows`` may hold anything."""
    x, scale = jnp.arange(1.0, 11.0), jnp.float32(2.0)
    rows = None if num_rows is None else jnp.int32(num_rows)

    def function(per_token: Any) -> Any:
        own, beside = per_token
        return own * scale, jnp.stack([own, beside], 1)

    doubled, pairs = jax.jit(lambda x: _walk.by_chunks(function, (x, x + 0.5), size, rows, scale))(x)
    live = 10 if num_rows is None else num_rows
    np.testing.assert_array_equal(doubled[:live], 2 * x[:live])
    np.testing.assert_array_equal(pairs[:live], jnp.stack([x, x + 0.5], 1)[:live])
    visited = 10 if size >= 10 else min(-(-live // size) * size, 10)
    assert not np.any(doubled[visited:])


@pytest.mark.parametrize("size", [3, 4, 10])
def test_every_row_is_new_in_one_chunk(size: int) -> None:
    def add(chunk: _walk.Chunk, count: Any) -> Any:
        return chunk.put(count, chunk.take(count) + chunk.new)

    count = jax.jit(lambda: _walk.over_chunks(10, size, None, add, jnp.zeros(10, jnp.int32)))()
    np.testing.assert_array_equal(count, 1)


@pytest.mark.parametrize(("columns", "tile"), [(10, 10), (10, 3), (12, 4), (5, 7)])
def test_tiles_of_columns(columns: int, tile: int) -> None:
    sizes = []

    def body(start: Any, size: int, is_kept: bool, count: Any) -> Any:
        assert not is_kept
        sizes.append(size)
        return jax.lax.dynamic_update_slice(count, jax.lax.dynamic_slice(count, (start,), (size,)) + 1, (start,))

    count = jax.jit(lambda: _walk.over_columns(columns, tile, 0, body, jnp.zeros(columns, jnp.int32)))()
    np.testing.assert_array_equal(count, 1)
    assert set(sizes) == {size for size in (columns % tile, tile) if 0 < size <= columns}
