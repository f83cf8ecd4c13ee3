"""Terms at a token's candidates, each column once: what lets a scatter add them in no order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Operands, RowCoefficients

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def add_repeats(columns: Int[Array, "T K"], terms: Float[Array, "T K"]) -> tuple[Array, Array]:
    """Columns that occur once per token, sorted, and the sum of their terms; -1 and 0 in place of the repeats.

    So the terms can be scattered to unique places, which is deterministic: adding to one place twice is not, on a GPU.
    After the step of 2ⁿ, each of the sorted terms is the sum of the last 2ⁿ⁺¹ of its column.
    """
    columns, terms = lax.sort((columns, terms), dimension=1, num_keys=1, is_stable=True)
    step, most = 1, columns.shape[1]
    while step < most:
        same = columns[:, step:] == columns[:, :-step]
        earlier = jnp.where(same, terms[:, :-step], 0.0)
        terms = terms + jnp.pad(earlier, ((0, 0), (step, 0)))
        step *= 2
    repeated = jnp.pad(columns[:, 1:] == columns[:, :-1], ((0, 0), (0, 1)))  # the last of its column has the sum
    return jnp.where(repeated, -1, columns), jnp.where(repeated, 0.0, terms)


def each_once(operands: Operands, rows: RowCoefficients) -> tuple[Operands, RowCoefficients]:
    """Both, which have candidates, with those of `add_repeats`."""
    assert operands.candidates is not None
    assert rows.candidates is not None
    columns, terms = add_repeats(operands.candidates, rows.candidates)
    return operands._replace(candidates=columns), rows._replace(candidates=terms, at_candidates=None)


def unique_places(columns: Int[Array, "T K"], first: Any, last: Any, size: int) -> tuple[Array, Array]:
    """Where to scatter into [T, size], which holds the columns [first, last): those outside lie beyond ``size``.

    No two places are equal if each column occurs once per token.
    """
    rows, k = (lax.broadcasted_iota(jnp.int32, columns.shape, dim) for dim in (0, 1))
    return rows, jnp.where((columns >= first) & (columns < last), columns - first, size + k)
