"""What a forward of two heads may keep of a tile: both its distributions, in two numbers of each column.

They are the larger e of e^{u_p} and e^{u_q}, each relative to its own largest x in the tile, and t = u_q - u_p. The two
are e^{-max(t, 0)} and e^{min(t, 0)} times e. Where the distributions are near each other, t is near 0 and rounds by a
fraction of itself, so their difference, which is the gradient, is as exact as one rounding of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics import _dlogits
from lce_jax.mathematics._kl import Direction, Ratios, RowScale
from lce_jax.mathematics._logprobs import along_rows
from lce_jax.mathematics._statistics import distance

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

REFERENCES = 2
type OfTile = tuple[Array, Array]  # the largest x of p and of q
type OfRows = tuple[Array, Array, Array]  # `KLStatistics.references` of the whole vocabulary


class Kept(NamedTuple):
    """Of a tile, or of all that are kept. In the dtypes that `dtypes` says."""

    e: Float[Array, "T n"]  # as `_dlogits.to_keep` has it
    t: Float[Array, "T n"]


def dtypes(dtype: jnp.dtype, direction: Direction) -> tuple[jnp.dtype, jnp.dtype]:
    """Of both numbers where gradients are multiplied in ``dtype``.

    A forward KL's gradient is a difference of the two distributions. An error of t is one of the smaller, which is
    e^{-|t|} of the larger: 11 bits are enough, and so is float16's largest number. The other gradients have the
    log-ratio itself for a factor, less its mean. A teacher may rule tokens out with logits of -1e9, a cold one is far
    from the student's everywhere, and a mean may leave nothing of a large log-ratio: they need float32.
    """
    if dtype.itemsize > 2:
        return dtype, dtype
    return dtype, jnp.dtype("float16" if direction == "forward" else "float32")


def to_keep(own: Ratios, kept: tuple[jnp.dtype, jnp.dtype]) -> Kept:
    """Of ratios that are relative to the tile's own references, in the ``kept`` dtypes."""
    most = jnp.finfo(kept[1]).max.astype(own.d.dtype)
    return Kept(_dlogits.to_keep(jnp.maximum(own.e_p, own.e_q), kept[0]), jnp.clip(own.d, -most, most).astype(kept[1]))


def from_kept(kept: Kept, of_tile: OfTile, of_rows: OfRows, scales: tuple[RowScale, RowScale]) -> Ratios:
    """The ratios relative to the whole vocabulary's references."""
    dtype = of_tile[0].dtype
    (e, _), t = _dlogits.from_kept(kept.e, dtype), kept.t.astype(dtype)
    down_p, down_q = (jnp.minimum(distance(*of_one), 0.0) for of_one in zip(of_tile, of_rows[:2], scales, strict=True))
    to_at_p = distance(of_tile[1], of_rows[2], scales[1])
    return Ratios(
        e * jnp.exp(-jnp.maximum(t, 0.0)) * jnp.exp(down_p)[:, None],
        e * jnp.exp(jnp.minimum(t, 0.0)) * jnp.exp(down_q)[:, None],
        t + (down_q - down_p)[:, None],
        t + (to_at_p - down_p)[:, None],
    )


def x_of_p(kept: Kept, of_tile: OfTile, scales: tuple[RowScale, RowScale]) -> Float[Array, "T n"]:
    """The capped x of p, from -1 to 1."""
    return _x(kept, -jnp.maximum(kept.t.astype(of_tile[0].dtype), 0.0), of_tile[0], scales[0])


def x_of_q(kept: Kept, of_tile: OfTile, scales: tuple[RowScale, RowScale]) -> Float[Array, "T n"]:
    """That of q."""
    return _x(kept, jnp.minimum(kept.t.astype(of_tile[0].dtype), 0.0), of_tile[1], scales[1])


def _x(kept: Kept, below: Array, highest: Array, scale: RowScale) -> Array:
    u = _dlogits.from_kept(kept.e, highest.dtype)[1] + below
    return jnp.clip(highest[:, None] + u / along_rows(_dlogits.positive(scale)), -1.0, 1.0)
