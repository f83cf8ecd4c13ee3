"""The k largest numbers of each row, exactly: the largest first, equal ones in the order of their columns.

A row is cut into groups of neighbours. The k groups with the largest maxima hold the k largest numbers, because each of
these groups has one that is at least as large as all of any other group. Of groups with equal maxima the first ones
count, so equal numbers keep their order. The k largest maxima are found in the same way. So a few selections from about
a thousand numbers replace one from the whole row.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._statistics import floored

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

WIDTHS = (2, 4, 8, 16, 32, 64, 128)  # that a group may have
SELECTION = 256  # what one more selection costs, as so many more numbers in another
MAXIMA = 16  # so many maxima written and read cost as much as one number in a selection


class Largest(NamedTuple):
    """Each token's k largest products over some columns, the largest first, equal ones by column."""

    products: Float[Array, "T k"]  # with the sign of the scale, so that logits increase with them; -inf for padding
    ids: Int[Array, "T k"]  # int32
    capped: Float[Array, "T k"] | None  # x of eq. 0 with a softcap, -inf for padding; None without one
    sumexp: Float[Array, "T"]  # eq. 1 of all these columns: Σ e^u, with the largest of these x as m

    @property
    def x(self) -> Float[Array, "T k"]:
        """That of eq. 0, finite for padding."""
        return floored(self.products if self.capped is None else self.capped)

    @property
    def max(self) -> Float[Array, "T"]:
        """The largest x: not the first, because a rounded cap may put another one above it.

        Nor could XLA take a first one apart: in two slices of a sort it does not see a top-k, and sorts whole rows.
        """
        return jnp.max(self.x, axis=-1)


def largest(x: Float[Array, "t n"], k: int) -> tuple[Float[Array, "t k"], Int[Array, "t k"]]:
    """The k largest numbers of each row and their columns; k is at most n."""
    rows, num_columns = x.shape
    _, width = plan(num_columns, k)
    if width == 1:
        return _selected(x, k)
    whole = num_columns // width * width
    groups = x[:, :whole].reshape(rows, -1, width)
    best = jnp.sort(largest(jnp.max(groups, axis=2), k)[1], axis=1)
    inside = lax.broadcasted_iota(jnp.int32, (rows, k, width), 2)
    columns = (best[:, :, None] * width + inside).reshape(rows, -1)
    taken = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    if whole < num_columns:  # the rest of the row, less than a group, competes with what the groups hold
        rest = lax.broadcasted_iota(jnp.int32, (rows, num_columns - whole), 1) + whole
        columns, taken = jnp.concatenate([columns, rest], axis=1), jnp.concatenate([taken, x[:, whole:]], axis=1)
    values, places = _selected(taken, k)
    return values, jnp.take_along_axis(columns, places, axis=1)


def _selected(x: Float[Array, "t n"], k: int) -> tuple[Float[Array, "t k"], Int[Array, "t k"]]:
    return lax.top_k(jnp.where(x == 0.0, 0.0, x), k)  # it puts -0 after 0


@functools.cache
def plan(num_columns: int, k: int) -> tuple[int, int]:
    """What the selections of a row cost, and the width of its groups for the least cost; 1 for no groups."""
    plans = [(num_columns + SELECTION, 1)]
    for width in WIDTHS:
        if num_columns // width >= k:
            of_maxima, _ = plan(num_columns // width, k)
            written = num_columns // width // MAXIMA
            plans.append((of_maxima + written + k * width + num_columns % width + SELECTION, width))
    return min(plans)
