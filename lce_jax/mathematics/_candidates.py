"""Eqs. 1, 3 and 4 of `_logprobs` at candidates, elementwise: XLA's programs and the kernels' bodies share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax.mathematics._statistics import distance

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def at_columns(x: Float[Array, "T n"], columns: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The x at these columns, -inf where they lie outside [0, n)."""
    owned = (columns >= 0) & (columns < x.shape[1])
    return jnp.where(owned, jnp.take_along_axis(x, jnp.where(owned, columns, 0), axis=1), -jnp.inf)


def logprobs(
    x: Float[Array, "*b"], highest: Float[Array, "*b"], scale: Any, log_sumexp: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Eq. 3, from the statistics beside each candidate; 0 where x is -inf."""
    u = jnp.minimum(distance(x, highest, scale), 0.0)
    return jnp.where(x == -jnp.inf, 0.0, u - log_sumexp)


def terms(
    x: Float[Array, "*b"], cotangent: Float[Array, "*b"], factor: Any, dcap: Callable[[Any], Any] | None
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """The g_c of eq. 4, 0 where x is -inf, and what it adds to the gradient in the raw product (eq. 5).

    ``dcap`` is the derivative of the cap, if there is one.
    """
    owned = x > -jnp.inf
    g = jnp.where(owned, cotangent, 0.0)
    term = g * factor
    return g, term if dcap is None else term * dcap(jnp.where(owned, x, 0.0))
