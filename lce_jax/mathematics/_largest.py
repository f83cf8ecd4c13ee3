"""Selects the exact k largest values of each row. The largest comes first; equal values are in the order of columns.

A row is cut into groups of neighbouring columns. The k groups with the largest maxima contain the k largest values,
because the maximum of each of these groups is at least as large as every value in other groups. If groups have equal
maxima, the first ones are chosen, so equal values keep their order. The k largest maxima are selected by the same
method. So a few selections from about a thousand values replace one selection from the whole row.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._statistics import clip_to_finite

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

WIDTHS = (2, 4, 8, 16, 32, 64, 128)  # the possible widths of a group
SELECTION = 256  # the fixed cost of a selection: it equals the cost of this many values to select from
MAXIMA = 16  # to write and read this many maxima costs as much as one value to select from


class Largest(NamedTuple):
    """Each token's k largest products over some columns, the largest first. Equal products are ordered by column."""

    products: Float[Array, "T k"]  # times the sign of the scale, so that logits increase with them; -inf for padding
    ids: Int[Array, "T k"]  # int32
    capped: Float[Array, "T k"] | None  # the x of eq. 0 if there is a softcap, -inf for padding; None without a softcap
    sumexp: Float[Array, "T"]  # Σ e^u over the columns (eq. 1), where m is their largest x

    @property
    def x(self) -> Float[Array, "T k"]:
        """The x of eq. 0, which is finite even for padding."""
        return clip_to_finite(self.products if self.capped is None else self.capped)

    @property
    def max(self) -> Float[Array, "T"]:
        """The largest x. It need not come first, because rounding in a softcap may make another x larger.

        A read of only the first x would also be slow: XLA does not recognize two slices of a sort as a top-k, and sorts
        whole rows.
        """
        return jnp.max(self.x, axis=-1)


def largest(x: Float[Array, "t n"], k: int) -> tuple[Float[Array, "t k"], Int[Array, "t k"]]:
    """Returns the k largest values of each row, and their columns; k is at most n."""
    rows, num_columns = x.shape
    _, width = plan(num_columns, k)
    if width == 1:
        return _select(x, k)
    grouped = num_columns // width * width
    groups = x[:, :grouped].reshape(rows, -1, width)
    best = jnp.sort(largest(jnp.max(groups, axis=2), k)[1], axis=1)
    inside = lax.broadcasted_iota(jnp.int32, (rows, k, width), 2)
    columns = (best[:, :, None] * width + inside).reshape(rows, -1)
    candidates = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    if grouped < num_columns:  # the columns after the last group are candidates too
        last = lax.broadcasted_iota(jnp.int32, (rows, num_columns - grouped), 1) + grouped
        columns = jnp.concatenate([columns, last], axis=1)
        candidates = jnp.concatenate([candidates, x[:, grouped:]], axis=1)
    values, indices = _select(candidates, k)
    return values, jnp.take_along_axis(columns, indices, axis=1)


def _select(x: Float[Array, "t n"], k: int) -> tuple[Float[Array, "t k"], Int[Array, "t k"]]:
    return lax.top_k(jnp.where(x == 0.0, 0.0, x), k)  # -0 becomes 0, because `top_k` puts -0 after 0


@functools.cache
def plan(num_columns: int, k: int) -> tuple[int, int]:
    """Returns the lowest cost of a selection from a row, and the group width that gives it; 1 means no groups."""
    plans = [(num_columns + SELECTION, 1)]
    for width in WIDTHS:
        if num_columns // width >= k:
            selecting_maxima, _ = plan(num_columns // width, k)
            writing_maxima = num_columns // width // MAXIMA
            plans.append((selecting_maxima + writing_maxima + k * width + num_columns % width + SELECTION, width))
    return min(plans)
