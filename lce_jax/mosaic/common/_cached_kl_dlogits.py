"""The dlogits of two heads (eqs. 8, 10) from what their forward kept, one pass at the speed of memory.

`lce_jax.mathematics._kl` in base 2: what makes a tile's numbers those of the whole vocabulary is one number
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
from lce_jax.mosaic._kl_operands import KLCache, KLOperands
from lce_jax.mosaic._mixture import MixtureFactors
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _cached_blocks
from lce_jax.mosaic.common._cached_blocks import HELD, Block, Walk, along
from lce_jax.mosaic.common._cached_dlogits import cap_derivative, of_cache
from lce_jax.mosaic.common._kl import of_rows
from lce_jax.mosaic.common._log_ratios import Reference, relative_log_ratio

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def cached_kl_dlogits(
    cases: tuple[Case, Case],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    cache: KLCache,
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
) -> Float[Array, "Tp columns"]:
    """As `kl_dlogits`, in the place of the cache's exponentials: a block is read before it is written."""
    case = cases[direction == "forward"]  # the student's
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), case.dtype)
    body = functools.partial(_kernel, case, direction)
    scales = [head.scale for head in operands.heads]
    run = _cached_blocks.kernel(body, output, case, "lce_cached_kl_dlogits", cache[:2], {0: 0})
    return run(*cache, *scales, factors, span)[0]


def _kernel(
    case: Case,
    direction: Direction,
    e: Any,
    ratio: Any,
    references: Any,  # [tiles of the cache, 3, Tp]
    scale_p: Any,  # [Tp]
    scale_q: Any,
    factors: Any,  # [fields, Tp]
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    gradient = functools.partial(_block_gradient, case, direction, references, (scale_p, scale_q), factors)
    _cached_blocks.walk_blocks(Walk.of(Span.unpack(scalars)), [e, ratio], output, gradient)


def _block_gradient(
    case: Case,
    direction: Direction,
    references: Any,
    scales: Sequence[Any],
    factors: Any,
    block: Block,
    values: Sequence[Array],
) -> Array:
    """The gradient of one block: loads what its rows need, then eq. 8 or 10 and the cap's derivative."""
    load = functools.partial(HELD.load_rows, rows=block.rows)
    k_p, k_q = map(load, scales)
    max_p, max_q, at_p = (load(references.at[block.tile, i]) for i in range(3))
    rows: KLCoefficients | MixtureFactors
    rows = of_rows(MixtureFactors, factors, load) if direction == "jsd" else of_rows(KLCoefficients, factors, load)
    (e, log2_e), ratio = of_cache(values[0], case.dtype), values[1]
    down_p, down_q = (max_p - rows.max_p) * k_p, (max_q - rows.max_q) * k_q
    of_p, u = along(rows.of_p * jnp.exp2(down_p)), log2_e
    if isinstance(rows, MixtureFactors):
        reference = Reference(*map(along, (rows.own, rows.other, rows.start, rows.most)))
        d, to_distance = ratio + along(down_q - down_p + rows.log_sums), (max_q - rows.at_p) * k_q - down_p
        log = relative_log_ratio(d, ratio + along(to_distance), reference)
        gradient = e * of_p * (log - along(rows.mean))
    elif direction == "reverse":
        to_distance = (at_p - rows.at_p) * k_q - down_p
        gradient = e * of_p * -(ratio + along(to_distance) + along(rows.mean))
    else:
        below_p, below_q = jnp.minimum(-ratio, 0.0), jnp.minimum(ratio, 0.0)
        of_q, u = along(rows.of_q * jnp.exp2(down_q)), log2_e + below_q
        gradient = e * (jnp.exp2(below_q) * of_q - jnp.exp2(below_p) * of_p)
    if case.options.logit_softcap is not None:
        gradient = gradient * cap_derivative(u, *((max_q, k_q) if direction == "forward" else (max_p, k_p)))
    return jnp.where(e > 0.0, gradient, 0.0)  # on padding the ratio says nothing
