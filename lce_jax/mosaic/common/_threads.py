"""What kernels with one thread per token share: a block is one warpgroup, its tokens lie side by side in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu

THREADS = 128  # of a block, a token each


def along(value: Any, dtype: Any = jnp.int32) -> Any:
    """One number for all threads."""
    return per_thread(jnp.full((THREADS,), value, dtype))


def numbered() -> Any:
    """The number of each thread."""
    return per_thread(lax.iota(jnp.int32, THREADS))


def per_thread(values: Any) -> Any:
    """``values`` [128] as each thread holds its own."""
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1))


def as_int(mask: Any) -> Any:
    """1 where a thread's own is true, else 0."""
    return jnp.where(mask, along(1), along(0))


def block_rows(block: Any) -> Any:
    """The rows of a block."""
    return pl.ds(pl.multiple_of(block * THREADS, THREADS), THREADS)


class Rows(NamedTuple):
    """The rows of a block where arrays end with the last row: their last `THREADS` rows, if its own are not all there.

    So it computes some rows that the block before it computes too.
    """

    first: Any  # of `THREADS` rows that are there
    live: Any  # whether any of its own is there
    whole: Any  # whether all of its own are

    @classmethod
    def of(cls, block: Any, count: Any) -> Rows:
        """The rows of a block where there are ``count``."""
        first = jnp.minimum(block * THREADS, jnp.maximum(count - THREADS, 0))
        return cls(first, block * THREADS < count, (block + 1) * THREADS <= count)

    @property
    def here(self) -> Any:
        """The rows of an array of one field."""
        return pl.ds(self.first, THREADS)

    def of_field(self, field: Any, stride: Any) -> Any:
        """The rows of a field of a flat array, whose fields lie one after the other, ``stride`` numbers each."""
        return pl.ds(field * stride + self.first, THREADS)
