"""Rows that ``where`` leaves out: moved behind the live ones, so that no tile of work holds only dead rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class Compaction(NamedTuple):
    """The order with the live rows first, in their own order."""

    source: Int[Array, "T"]  # row of the call at each compacted position
    position: Int[Array, "T"]  # compacted position of each row of the call
    num_rows: Int[Array, ""]  # how many are live


def compaction(where: Bool[Array, "T"]) -> Compaction:
    """The compaction of ``where``: two prefix sums and a scatter, no sort."""
    live = jnp.cumsum(where, dtype=jnp.int32)
    dead = jnp.cumsum(~where, dtype=jnp.int32)
    num_rows = jnp.sum(where, dtype=jnp.int32)
    position = jnp.where(where, live - 1, num_rows + dead - 1)
    rows = jnp.arange(where.shape[0], dtype=jnp.int32)
    source = jnp.zeros_like(rows).at[position].set(rows, unique_indices=True)
    return Compaction(source, position, num_rows)


def compact(order: Compaction, tree: Any) -> Any:
    """Every [T, ...] leaf in compacted order, dead rows zero: whatever they hold, they cannot spread it."""
    live = jnp.arange(order.source.shape[0], dtype=jnp.int32) < order.num_rows

    def gather(x: Array) -> Array:
        return jnp.where(live.reshape((-1,) + (1,) * (x.ndim - 1)), x[order.source], jnp.zeros((), x.dtype))

    return jax.tree.map(gather, tree)


def expand(order: Compaction, tree: Any) -> Any:
    """The inverse of `compact` on the live rows; what dead rows get is for the caller to overwrite."""
    return jax.tree.map(lambda x: x[order.position], tree)
