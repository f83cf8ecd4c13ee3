"""What a forward of two heads may keep of a tile: both its distributions, in two numbers of each column.

e is the larger of e^{u_p} and e^{u_q}, each relative to its own largest x in the tile, and r = v_q - u_p, which is 0
where the x of p is largest. With s, the v_q of q's largest x with its sign turned, t = r + s is u_q - u_p, and the two
are e^{-max(t, 0)} and e^{min(t, 0)} times e. Where the distributions are near each other, r is near 0 and rounds by a
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

REFERENCES = 3
type References = tuple[Array, Array, Array]  # `KLStatistics.references`, of the tile or of the whole vocabulary


class Kept(NamedTuple):
    """Of a tile, or of all that are kept. In the dtypes that `dtypes` says."""

    e: Float[Array, "T n"]  # as `_dlogits.to_keep` has it
    r: Float[Array, "T n"]


def dtypes(dtype: jnp.dtype, direction: Direction) -> tuple[jnp.dtype, jnp.dtype]:
    """Of both numbers where gradients are multiplied in ``dtype``.

    An r of several units, rounded as e is, would be off by several times as much. So it has three digits more. But the
    gradient of a reverse KL is proportional to r, which a teacher that rules a token out makes larger than float16 has
    it; there its error is relative as that of e is.
    """
    wider = {"bfloat16": "bfloat16" if direction == "reverse" else "float16", "float16": "float32"}
    return dtype, jnp.dtype(wider.get(dtype.name, dtype))


def to_keep(own: Ratios, kept: tuple[jnp.dtype, jnp.dtype]) -> Kept:
    """Of ratios that are relative to the tile's own references, in the ``kept`` dtypes.

    What float16 cannot hold is of a column that one of both distributions does not have: any large r says so.
    """
    most = jnp.finfo(kept[1]).max.astype(own.distance.dtype)
    r = jnp.clip(own.distance, -most, most).astype(kept[1])
    return Kept(_dlogits.to_keep(jnp.maximum(own.e_p, own.e_q), kept[0]), r)


def from_kept(kept: Kept, of_tile: References, of_rows: References, scales: tuple[RowScale, RowScale]) -> Ratios:
    """The ratios relative to the whole vocabulary's references."""
    e, (r, t) = _dlogits.kept_exponentials(kept.e, of_tile[0].dtype), _log_ratios(kept, of_tile, scales[1])
    down_p, down_q, down = map(distance, of_tile, of_rows, (*scales, scales[1]))
    down_p, down_q = jnp.minimum(down_p, 0.0), jnp.minimum(down_q, 0.0)
    return Ratios(
        e * jnp.exp(-jnp.maximum(t, 0.0)) * jnp.exp(down_p)[:, None],
        e * jnp.exp(jnp.minimum(t, 0.0)) * jnp.exp(down_q)[:, None],
        t + (down_q - down_p)[:, None],
        r + (down - down_p)[:, None],
    )


def x_of_p(kept: Kept, of_tile: References, scales: tuple[RowScale, RowScale]) -> Float[Array, "T n"]:
    """The capped x of p, from -1 to 1."""
    _, t = _log_ratios(kept, of_tile, scales[1])
    return _x(kept, -jnp.maximum(t, 0.0), of_tile[0], scales[0])


def x_of_q(kept: Kept, of_tile: References, scales: tuple[RowScale, RowScale]) -> Float[Array, "T n"]:
    """That of q."""
    _, t = _log_ratios(kept, of_tile, scales[1])
    return _x(kept, jnp.minimum(t, 0.0), of_tile[1], scales[1])


def _x(kept: Kept, below: Array, highest: Array, scale: RowScale) -> Array:
    u = _dlogits.log_kept(kept.e, highest.dtype) + below
    return jnp.clip(highest[:, None] + u / along_rows(_dlogits.positive(scale)), -1.0, 1.0)


def _log_ratios(kept: Kept, of_tile: References, scale_q: RowScale) -> tuple[Array, Array]:
    """The r and the t."""
    r = kept.r.astype(of_tile[0].dtype)
    return r, r + distance(of_tile[2], of_tile[1], scale_q)[:, None]
