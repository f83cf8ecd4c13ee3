"""Temperatures of rows: their inverses, and rows that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from lce_jax import scalars
from lce_jax._types import RowCoefficients
from lce_jax.mathematics._statistics import MASKED, along

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float

# Below it a temperature counts as this one: float32 holds what its inverse multiplies, the kernels' padding included.
SMALLEST = 1e-20


def inverse(temperature: Float[Array, "T"]) -> Float[Array, "T"]:
    """1 / τ; 1 where there is no such temperature."""
    return 1.0 / jnp.where(scalars.is_temperature(temperature), jnp.maximum(temperature, SMALLEST), 1.0)


def without_gradient(rows: RowCoefficients, which: Bool[Array, "T"]) -> RowCoefficients:
    """The coefficients with no gradient in these rows, where e^u becomes 0 too: dweight gets no NaN from them."""
    found = jax.tree.map(lambda x: jnp.where(along(which, x), 0.0, x), rows)
    return found._replace(max=jnp.where(which, -MASKED, rows.max))
