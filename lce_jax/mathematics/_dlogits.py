"""The gradient in the raw products (eqs. 4 and 5) over a tile: from its logits, or from exponentials that were kept.

A forward may keep e^u of a tile, relative to the tile's own maximum, in the dtype in which gradients are multiplied.
Its relative error is that of one rounding, as that of the gradient. What does not count has exactly 0, and so has its
gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options, RowCoefficients
from lce_jax.mathematics import _repeats, _softcap
from lce_jax.mathematics._logprobs import along_rows
from lce_jax.mathematics._statistics import distance

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int

FP16_SHIFT = 15.0  # fp16 exponentials are kept times 2^15: in (0, 1] they would waste half of fp16's exponents


def keeps(options: Options) -> bool:
    """Whether the gradient can be made from exponentials.

    Not where a capped logit far below the maximum has a gradient too, as in a mean: there e^u is 0 and says nothing.
    """
    return options.logit_softcap is None or not options.mean_logit


def to_keep(e: Float[Array, "T n"], dtype: jnp.dtype) -> Float[Array, "T n"]:
    """e^u as it is kept."""
    return (e * 2.0**FP16_SHIFT if dtype == jnp.float16 else e).astype(dtype)


def from_kept(kept: Float[Array, "T n"], dtype: jnp.dtype) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """The e^u that `to_keep` was given, and the u, finite."""
    e = kept.astype(dtype)
    e = e * 2.0**-FP16_SHIFT if kept.dtype == jnp.float16 else e
    return e, jnp.log(jnp.maximum(e, jnp.finfo(e.dtype).tiny))


def from_logits(
    x: Float[Array, "T n"],
    scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    options: Options,
    candidates: Int[Array, "T K"] | None = None,
    floor: Float[Array, "T"] | None = None,
) -> Float[Array, "T n"]:
    """Of x and k (eq. 0). ``floor`` is that of `_logprobs.tile_statistics`.

    ``candidates`` are columns of this tile, once each (`mathematics._repeats.add_repeats`), or lie outside [0, n).
    """
    u = jnp.minimum(distance(x, rows.max[:, None], along_rows(scale)), 0.0)
    return _gradient(u, jnp.exp(u), x, rows, targets, live, options, candidates, floor)


def from_exponentials(
    kept: Float[Array, "T n"],
    highest: Float[Array, "T"],
    scale: Float[Array, "T"] | float,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    options: Options,
    candidates: Int[Array, "T K"] | None = None,
) -> Float[Array, "T n"]:
    """Of what `to_keep` made, and the tile's largest x. A floor is in them already."""
    e, log_e = from_kept(kept, highest.dtype)
    down = jnp.minimum(distance(highest, rows.max, scale), 0.0)
    x = None
    if options.logit_softcap is not None:
        x = jnp.clip(highest[:, None] + log_e / along_rows(positive(scale)), -1.0, 1.0)
    e = e * jnp.exp(down)[:, None]
    return _gradient(log_e + down[:, None], e, x, rows, targets, live, options, candidates, None)


def positive(scale: Float[Array, "T"] | float) -> Float[Array, "T"] | float:
    """A row without gradient may have any scale."""
    return scale if isinstance(scale, float | int) else jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)


def _gradient(
    u: Float[Array, "T n"],
    e: Float[Array, "T n"],
    x: Float[Array, "T n"] | None,
    rows: RowCoefficients,
    targets: Int[Array, "T"],
    live: Bool[Array, "n"] | None,
    options: Options,
    candidates: Int[Array, "T K"] | None,
    floor: Float[Array, "T"] | None,
) -> Float[Array, "T n"]:
    """Eqs. 4 and 5. ``x`` is read with a softcap or a floor."""
    d = rows.constant[:, None] * e
    if rows.slope is not None:
        d = d + rows.slope[:, None] * (u * e)
    columns = lax.broadcasted_iota(jnp.int32, e.shape, 1)
    dcap = 1.0 if options.logit_softcap is None or x is None else _softcap.derivative(x)
    d = d * dcap
    if x is not None and floor is not None:
        d = jnp.where(x < floor[:, None], 0.0, d)
    d = jnp.where(columns == targets[:, None], rows.target[:, None], d)
    if rows.uniform is not None:
        d = d + rows.uniform[:, None] * dcap
    d = d if live is None else jnp.where(live[None, :], d, 0.0)
    if candidates is None or rows.candidates is None:
        return d
    places = _repeats.unique_places(candidates, 0, d.shape[1], d.shape[1])
    return d.at[places].add(rows.candidates, mode="drop", unique_indices=True)
