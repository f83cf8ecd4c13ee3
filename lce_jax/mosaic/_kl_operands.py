"""The operands of the kernels of `lce_jax.linear_kl`, which see a tile of both heads' logits.

What the kernels of a divergence from a mixture need of each token, in base 2: eqs. 9 and 10 but for the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics._kl import Mixture, MixtureCoefficients
from lce_jax.mosaic._operands import LOG2E

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class KLHead(NamedTuple):
    """One head's operands, as the kernels take them."""

    hidden: Float[Array, "T H"]  # as in `Prepared`
    weight: Float[Array, "V H"]  # holds a span's part at its offset; zeros are read after its last row
    scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2


class KLOperands(NamedTuple):
    """Both heads, that of p first, and the columns that are padding."""

    heads: tuple[KLHead, KLHead]
    mask: Int[Array, "2*tile"]  # as in `Prepared`


class KLCache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare both heads' products: `_kept_ratios.Kept`."""

    e: Float[Array, "Tp columns"]  # whole tiles
    ratio: Float[Array, "Tp columns"]  # in base 2
    references: Float[Array, "tiles 3 Tp"]  # of each tile


class MixtureFactors(NamedTuple):
    """A vector of each, [T], in the order in which the kernels get them.

    With n = β / (1 - β + β e^{d₀}), the logarithm of eq. 9 is that of 1 + x, x = n (e^d - e^{d₀}).
    """

    max_p: Array
    max_q: Array
    at_p: Array
    log_sums: Array  # log2 s_p - log2 s_q
    own: Array  # (1 - β) n / β, so that 1 + x is also own + n e^d
    other: Array  # n
    start: Array  # n e^{d₀}: 1 - own
    most: Array  # the d whose exponential is taken
    log: Array  # t₀
    student: Array  # 1 - β
    teacher: Array  # β
    is_above_half: Array  # 1.0 in every row if a β of any row is above ½
    of_p: Array  # as in `MixtureCoefficients`, of a logarithm in base 2
    mean: Array


def mixture_factors(rows: Mixture | MixtureCoefficients, length: int) -> Float[Array, "14 Tp"]:
    """Of the sums' pass, or of the gradient's; 0 from the call's tokens to ``length``."""
    if isinstance(rows, MixtureCoefficients):
        rows, of_p, mean = rows
    else:
        of_p = mean = jnp.zeros_like(rows.log_sums)
    student, teacher = rows.weights
    other = teacher / rows.at_p.total
    found = MixtureFactors(
        *rows.references,
        log_sums=rows.log_sums * LOG2E,
        own=student / rows.at_p.total,
        other=other,
        start=other * rows.at_p.ratio,
        most=jnp.asarray(rows.at_p.most * LOG2E),
        log=rows.log_at_p * LOG2E,
        student=student,
        teacher=teacher,
        is_above_half=jnp.any(teacher > 0.5),
        of_p=of_p * (1.0 / LOG2E),
        mean=mean * LOG2E,
    )
    stacked = jnp.stack([jnp.broadcast_to(x, of_p.shape).astype(jnp.float32) for x in found])
    return jnp.pad(stacked, ((0, 0), (0, length - stacked.shape[1])))
