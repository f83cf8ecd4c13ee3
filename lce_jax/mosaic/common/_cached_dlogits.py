"""The backward's other kernel: dlogits (eqs. 4, 5) from cached exponentials, one pass at the speed of memory.

In base 2, u = log2 e + (tile maximum - maximum)·scale: everything but log2 e is one number per row and tile. So an
element costs one logarithm and two multiplications: dz = e (a + b log2 e).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mathematics._logprobs import FP16_SHIFT
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _cached_blocks
from lce_jax.mosaic.common._cached_blocks import COLUMNS, HELD, ROWS, Block, Walk, along
from lce_jax.mosaic.common._tiles import ROW_BLOCK

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def cached_dlogits(
    prepared: Prepared,
    case: Case,
    factors: Float[Array, "factors Tp"],
    cache: Cache,
    span: Int[Array, "fields"],
    columns: int,
    overwrites: bool,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    The exponentials have the relative precision of that dtype, which is the precision of the result. Zero on padding;
    tiles after the span and row blocks without a live row, which the forward did not keep, are left unwritten. With
    ``overwrites`` the gradient takes the place of all of the cache, block by block, each read before it is written.
    """
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), case.dtype)
    body, updated = functools.partial(_kernel, case), {0: 0} if overwrites else None
    (result,) = _cached_blocks.kernel(body, output, case, "lce_cached_dlogits", [cache.exponentials], updated)(
        cache.exponentials,
        cache.max,
        factors,
        prepared.scale,
        prepared.targets,
        prepared.holds_target,
        span,
    )
    return result


class Refs(NamedTuple):
    """What the kernel reads and writes beside the exponentials."""

    tile_max: Any  # [tiles of the cache, Tp]
    factors: Any  # [3 or 4, Tp]
    scale: Any  # [Tp]
    targets: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    output: Any  # [T, columns]


def _kernel(
    case: Case,
    exponentials: Any,  # [T, columns of the cache]
    tile_max: Any,
    factors: Any,
    scale: Any,
    targets: Any,
    holds_target: Any,
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    refs, span = Refs(tile_max, factors, scale, targets, holds_target, output), Span.unpack(scalars)
    gradient = functools.partial(_block_gradient, case, refs, span)
    _cached_blocks.walk_blocks(Walk.of(span), [exponentials], output, gradient)


def _block_gradient(case: Case, refs: Refs, span: Span, block: Block, values: Sequence[Array]) -> Array:
    """The gradient of one block: loads what its rows need, then eqs. 4 and 5."""
    load = functools.partial(HELD.load_rows, rows=block.rows)
    row_block = lax.div(block.row, jnp.int32(ROW_BLOCK // ROWS))
    rows = HELD.load_factors(refs.factors, block.rows)
    label = load(refs.targets) - (span.column + block.column * COLUMNS)
    holds = refs.holds_target[row_block, block.tile] > 0
    scale, highest = load(refs.scale), load(refs.tile_max.at[block.tile])
    e, log2_e = of_cache(values[0], refs.output.dtype)
    d = _gradient(e, log2_e, rows, (highest - rows.max) * scale)
    d = d if case.options.logit_softcap is None else d * cap_derivative(log2_e, highest, scale)
    return HELD.with_target(d, rows, label, holds)


def of_cache(e: Array, dtype: Any) -> tuple[Array, Array]:
    """The exponentials that were kept in ``dtype``, and their logarithms, which are finite."""
    if dtype == jnp.float16:
        e = e * 2.0**-FP16_SHIFT
    return e, jnp.log2(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))


def _gradient(e: Array, log2_e: Array, rows: RowFactors, down: Array) -> Array:
    """Eq. 4 on a block of exponentials, but for the label.

    ``down`` is the dᵢ of eq. 2. Its exponential is taken first, because ``slope`` times ``down`` may overflow.
    """
    factor = jnp.exp2(down)
    if rows.slope is None:
        return e * along(rows.constant * factor)
    return e * (along(rows.constant * factor + rows.slope * (down * factor)) + along(rows.slope * factor) * log2_e)


def cap_derivative(u: Array, highest: Array, scale: Array) -> Array:
    """The 1 - tanh² of eq. 5, where ``u`` is the logit's distance from the ``highest`` in base 2.

    The scale is 0 on rows left out, where e is 1 and all else 0.
    """
    tanh = along(highest) + u * along(1.0 / jnp.maximum(scale, 1e-30))
    return 1.0 - tanh * tanh
