"""The backward kernel: the gradient in the raw products (eqs. 4, 5) of one chunk of the vocabulary, recomputed.

The epilogue works in 64-column blocks, each rounded once to the weight's dtype and sent out through shared memory:
the whole tile at once would spill registers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.sm90 import _epilogue, _logits, _pipeline
from lce_jax.mosaic.sm90._epilogue import along_rows
from lce_jax.mosaic.sm90._hardware import STAGING_COLUMNS, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic.sm90._pipeline import Matmul, Tile
from lce_jax.mosaic.sm90._tuning import Tuning
from lce_jax.mosaic.sm90._vocabulary_mask import PADDING, without_padding

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCK = (WARPGROUP_ROWS, STAGING_COLUMNS)


def dlogits(
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Case,
    tuning: Tuning,
    rows: RowFactors,
    span: Int[Array, "fields"],
    columns: int,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    ``weight`` holds the span's part at its offset. Zero on columns that are padding or do not exist; tiles after
    the span and row blocks without a live row are left unwritten.
    """
    matmul = _logits.logits(case, tuning)
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), case.dtype)
    factors = jnp.stack(jax.tree.leaves(rows))
    run = _pipeline.kernel(matmul, functools.partial(_kernel, matmul), [output], "lce_dlogits")
    (result,) = run(
        prepared.hidden,
        weight,
        prepared.targets,
        prepared.scale,
        prepared.holds_target,
        prepared.mask,
        factors,
        span,
    )
    return result


def _kernel(
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; the chunk's own part where V is no multiple of 8
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # a `Span`
    output: Any,  # [T, columns]
) -> None:
    span = Span.unpack(scalars)
    first_tile, options = _logits.first_tile(span), matmul.case.options

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _epilogue.load_rows(scale, tile.rows)
        rows = _epilogue.load_factors(factors, tile.rows)
        column = span.column + tile.column
        target = _epilogue.load_rows(targets, tile.rows) - column
        holds = holds_target[tile.row_block, first_tile + tile.vocabulary_tile] > 0
        z = multiply()
        cap = options.logit_softcap
        if cap is not None:
            z = _epilogue.softcap(z, cap, options)
        z = without_padding(z, column, span.num_columns, mask, PADDING)
        for i in range(TILE_N // STAGING_COLUMNS):
            start = i * STAGING_COLUMNS
            block = z[:, start : start + STAGING_COLUMNS]
            d = _block_gradient(block, row_scale, rows, target - start, holds)
            d = d if cap is None else d * (1.0 - block * block)
            _epilogue.send(d, i, slots, tile.rows, output, tile.column + start)

    slots = _epilogue.staging(matmul, output.shape[1], output.dtype)
    _logits.walk_logits(matmul, hidden, weight, span, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _block_gradient(z: Array, row_scale: Array, rows: RowFactors, target: Array, holds: Any) -> Array:
    """Eq. 4 on a block of columns; ``target`` counts from its first."""
    u = z * along_rows(row_scale, STAGING_COLUMNS) - along_rows(rows.shift, STAGING_COLUMNS)
    factor = along_rows(rows.constant, STAGING_COLUMNS)
    if rows.slope is not None:
        factor = factor + along_rows(rows.slope, STAGING_COLUMNS) * u
    d = jnp.exp2(u) * factor

    def add_target() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, BLOCK, 1, layout=_epilogue.MATRIX)
        hit = columns == along_rows(target, STAGING_COLUMNS)
        return jnp.where(hit, d + along_rows(rows.target, STAGING_COLUMNS), d)

    return lax.cond(holds, add_target, lambda: d)
