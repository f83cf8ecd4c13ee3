"""The factors of a call's rows (eq. 0), from temperatures and a traced scale or softcap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax import scalars
from lce_jax.call._rows import Rows
from lce_jax.mathematics import _temperature

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float


class Scales(NamedTuple):
    """Per-token factors of eq. 0 from temperature and a traced scale or softcap: z = logits · x(sign · r)."""

    logits: Float[Array, "T"] | None  # None: 1
    raw: Float[Array, "T"] | None = None  # x = tanh(raw · r), or raw · r
    sign: Float[Array, "T"] | None = None  # of a traced scale, where it multiplies hidden

    @property
    def derivative(self) -> Float[Array, "T"] | None:
        """The row factor of eq. 5, without the scale in the options."""
        return self.logits if self.raw is None or self.logits is None else self.logits * self.raw


def of_rows(
    rows: Rows, dtype: Any, signs_hidden: bool, invert: Callable[[Array], Array] = _temperature.inverse
) -> Scales:
    """The factors of a call, whose temperatures ``invert`` inverts.

    The sign of a traced scale, which may be 0, is apart, because k of eq. 1 must be positive. It multiplies hidden
    where ``signs_hidden`` says so, else the raw products, which no kernel does.
    """
    inverse = None if rows.temperature is None else invert(rows.temperature.astype(dtype))
    if rows.logit_scale is None:
        return Scales(inverse)
    sign = raw = None
    if rows.logit_softcap is None:
        sign, logits = jnp.sign(rows.logit_scale), jnp.abs(rows.logit_scale)
        logits = jnp.where(sign == 0, 1.0, logits)
        if not signs_hidden:
            sign, raw = None, sign
    else:
        logits = jnp.abs(rows.logit_softcap)  # c tanh(x / c) is even in c
        raw = rows.logit_scale / logits
    return Scales(logits if inverse is None else logits * inverse, raw, sign)


def wrong_rows(rows: Rows) -> Bool[Array, "T"] | None:
    """Rows that count and whose temperature is not positive and finite, or whose floor is NaN.

    They return NaN and have no gradient.
    """
    found = [] if rows.temperature is None else [~scalars.is_temperature(rows.temperature)]
    found += [] if rows.floor is None else [jnp.isnan(rows.floor)]
    if not found:
        return None
    wrong = functools.reduce(jnp.logical_or, found)
    return wrong if rows.live is None else wrong & rows.live
