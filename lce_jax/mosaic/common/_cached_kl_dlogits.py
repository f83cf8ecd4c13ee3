"""The dlogits of two heads (eqs. 8, 10) from what their forward kept, one pass at the speed of memory.

`lce_jax.mathematics._kept_ratios` in base 2: what makes a tile's numbers those of the whole vocabulary is one number
per row and tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax._types import Case
from lce_jax.mathematics._kl import Direction, KLCoefficients
from lce_jax.mosaic._kl_kernel_set import KLCache, KLOperands
from lce_jax.mosaic._mixture import MixtureFactors
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _cached_blocks
from lce_jax.mosaic.common._cached_blocks import HELD, Block, Walk, along
from lce_jax.mosaic.common._cached_dlogits import cap_derivative, of_cache
from lce_jax.mosaic.common._kl import of_rows
from lce_jax.mosaic.common._log_ratios import Reference, relative_log_ratio

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def dlogits(
    cases: tuple[Case, Case],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    cache: KLCache,
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
    overwrites: bool,
) -> Float[Array, "Tp columns"]:
    """As `common._kl.dlogits`. With ``overwrites`` it takes the place of the exponentials, each read before."""
    case = cases[direction == "forward"]  # the student's
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), case.dtype)
    body, updated = functools.partial(_kernel, case, direction), {0: 0} if overwrites else None
    scales = [head.scale for head in operands.heads]
    run = _cached_blocks.kernel(body, output, case, "lce_cached_kl_dlogits", cache[:2], updated)
    return run(*cache, *scales, factors, span)[0]


def _kernel(
    case: Case,
    direction: Direction,
    e: Any,
    t: Any,
    highest: Any,  # [tiles of the cache, 2, Tp]
    scale_p: Any,  # [Tp]
    scale_q: Any,
    factors: Any,  # [fields, Tp]
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    gradient = functools.partial(_block_gradient, case, direction, highest, (scale_p, scale_q), factors)
    _cached_blocks.walk_blocks(Walk.of(Span.unpack(scalars)), [e, t], output, gradient)


def _block_gradient(
    case: Case,
    direction: Direction,
    highest: Any,
    scales: Sequence[Any],
    factors: Any,
    block: Block,
    values: Sequence[Array],
) -> Array:
    """The gradient of one block: loads what its rows need, then eq. 8 or 10 and the cap's derivative."""
    load = functools.partial(HELD.load_rows, rows=block.rows)
    k_p, k_q = map(load, scales)
    max_p, max_q = (load(highest.at[block.tile, i]) for i in range(2))
    rows: KLCoefficients | MixtureFactors
    rows = of_rows(MixtureFactors, factors, load) if direction == "jsd" else of_rows(KLCoefficients, factors, load)
    (e, log2_e), t = of_cache(values[0], case.dtype), values[1]
    below_p, below_q = jnp.minimum(-t, 0.0), jnp.minimum(t, 0.0)
    down_p, down_q = (max_p - rows.max_p) * k_p, (max_q - rows.max_q) * k_q
    to_distance = (max_q - rows.at_p) * k_q - down_p
    of_p = rows.of_p * jnp.exp2(down_p)
    if isinstance(rows, MixtureFactors):
        reference = Reference(*map(along, (rows.own, rows.other, rows.start, rows.most)))
        log = relative_log_ratio(t + along(down_q - down_p + rows.log_sums), t + along(to_distance), reference)
        d = e * jnp.exp2(below_p) * along(of_p) * (log - along(rows.mean))
    elif direction == "reverse":
        d = e * jnp.exp2(below_p) * along(of_p) * -(t + along(to_distance) + along(rows.mean))
    else:
        d = e * (jnp.exp2(below_q) * along(rows.of_q * jnp.exp2(down_q)) - jnp.exp2(below_p) * along(of_p))
    if case.options.logit_softcap is not None and direction == "forward":
        d = d * cap_derivative(log2_e + below_q, max_q, k_q)
    elif case.options.logit_softcap is not None:
        d = d * cap_derivative(log2_e + below_p, max_p, k_p)
    return jnp.where(e > 0.0, d, 0.0)  # on padding t says nothing
