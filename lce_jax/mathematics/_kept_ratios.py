"""What a forward of two heads may keep of a tile: what the gradient needs of it, in two numbers of each column.

With u relative to each head's largest x in the tile, and v to the x of q where that of p is largest:

forward    the larger e of e^{u_p} and e^{u_q}, and t = u_q - u_p. The two are e^{-max(t, 0)} and e^{min(t, 0)} times e.
           Where the distributions are near each other, t is near 0 and rounds by a fraction of itself, so their
           difference, which is the gradient, is as exact as one rounding of it.
reverse    e^{u_p}, and r = v_q - u_p, which is small where p has its mass, also where q has almost none there
jsd        e^{u_p}, and t: its logarithm is bounded where q has almost nothing
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
type References = tuple[Array, Array, Array]  # `KLStatistics.references`


class Kept(NamedTuple):
    """Of a tile, or of all that are kept. In the dtypes that `dtypes` says."""

    e: Float[Array, "T n"]  # as `_dlogits.to_keep` has it
    ratio: Float[Array, "T n"]  # t or r


def dtypes(dtype: jnp.dtype, direction: Direction, capped: bool) -> tuple[jnp.dtype, jnp.dtype]:
    """Of both numbers where gradients are multiplied in ``dtype``; ``capped``: the student's logits are.

    In a forward KL an error of t is one of the smaller of both probabilities, which is e^{-|t|} of the larger: beside
    bfloat16's 8 bits float16's 11 are enough. A cap's derivative asks for t itself where the student is the smaller.
    The other gradients have the log-ratio for a factor, less its mean, which may leave nothing of a large one.
    """
    if dtype.itemsize > 2:
        return dtype, dtype
    narrow = direction == "forward" and dtype == jnp.bfloat16 and not capped
    return dtype, jnp.dtype("float16" if narrow else "float32")


def to_keep(own: Ratios, kept: tuple[jnp.dtype, jnp.dtype], direction: Direction) -> Kept:
    """Of ratios that are relative to the tile's own references, in the ``kept`` dtypes."""
    most = jnp.finfo(kept[1]).max.astype(own.d.dtype)
    e = jnp.maximum(own.e_p, own.e_q) if direction == "forward" else own.e_p
    ratio = own.distance if direction == "reverse" else own.d
    return Kept(_dlogits.to_keep(e, kept[0]), jnp.clip(ratio, -most, most).astype(kept[1]))


def from_kept(
    kept: Kept, of_tile: References, of_rows: References, scales: tuple[RowScale, RowScale], direction: Direction
) -> Ratios:
    """The ratios relative to the whole vocabulary's references, as far as the direction's gradient reads them."""
    dtype = of_tile[0].dtype
    (e, _), ratio = _dlogits.from_kept(kept.e, dtype), kept.ratio.astype(dtype)
    down_p, down_q, down_r = map(distance, of_tile, of_rows, (*scales, scales[1]))
    down_p, down_q = jnp.minimum(down_p, 0.0), jnp.minimum(down_q, 0.0)
    e_p, e_q = e * jnp.exp(down_p)[:, None], e * jnp.exp(down_q)[:, None]
    if direction == "reverse":
        r = ratio + (down_r - down_p)[:, None]
        return Ratios(e_p, e_q, r, r)
    if direction == "forward":
        e_p, e_q = e_p * jnp.exp(-jnp.maximum(ratio, 0.0)), e_q * jnp.exp(jnp.minimum(ratio, 0.0))
    to_at_p = distance(of_tile[1], of_rows[2], scales[1])
    return Ratios(e_p, e_q, ratio + (down_q - down_p)[:, None], ratio + (to_at_p - down_p)[:, None])


def students_x(
    kept: Kept, of_tile: References, scales: tuple[RowScale, RowScale], direction: Direction
) -> Float[Array, "T n"]:
    """The student's capped x, from -1 to 1."""
    which = 1 if direction == "forward" else 0
    highest, scale = of_tile[which], scales[which]
    u = _dlogits.from_kept(kept.e, highest.dtype)[1]
    if direction == "forward":
        u = u + jnp.minimum(kept.ratio.astype(highest.dtype), 0.0)
    return jnp.clip(highest[:, None] + u / along_rows(_dlogits.positive(scale)), -1.0, 1.0)
