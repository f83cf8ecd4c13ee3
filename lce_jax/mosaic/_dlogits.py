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

from lce_jax._compat import plgpu
from lce_jax._types import Case
from lce_jax.mosaic import _config, _pipeline
from lce_jax.mosaic._config import STAGING_COLUMNS, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic._operands import PADDING, Prepared, RowFactors, Span
from lce_jax.mosaic._pipeline import Matmul, Tile, along_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCK = (WARPGROUP_ROWS, STAGING_COLUMNS)


def dlogits(
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Case,
    rows: RowFactors,
    span: Int[Array, "fields"],
    columns: int,
    interpret: Any = None,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    ``weight`` holds the span's part at its origin. Zero on columns that are padding or none at all; tiles behind the
    span and row blocks without a live row are left unwritten.
    """
    matmul = _pipeline.logits(case, "dlogits")
    output = jax.ShapeDtypeStruct((_config.geometry(case).tokens, columns), case.dtype)
    factors = jnp.stack(jax.tree.leaves(rows))
    run = _pipeline.kernel(matmul, functools.partial(_kernel, matmul), [output], "lce_dlogits", interpret)
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
    first_tile, options = span.first_tile, matmul.case.options

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _pipeline.load_rows(scale, tile.rows)
        rows = _pipeline.load_factors(factors, tile.rows)
        column = span.column + tile.column
        target = _pipeline.load_rows(targets, tile.rows) - column
        holds = holds_target[tile.place.row_block, first_tile + tile.place.position] > 0
        z = multiply()
        cap = options.logit_softcap
        if cap is not None:
            z = _pipeline.softcap(z, cap, options)
        z = _pipeline.without_padding(z, column, span.num_columns, mask, PADDING)
        for i in range(TILE_N // STAGING_COLUMNS):
            start = i * STAGING_COLUMNS
            block = z[:, start : start + STAGING_COLUMNS]
            d = _block_gradient(block, row_scale, rows, target - start, holds)
            d = d if cap is None else d * (1.0 - block * block)
            _pipeline.send(d, i, slots, tile.rows, output, tile.column + start)

    slots = _pipeline.staging(matmul, output.shape[1], output.dtype)
    _pipeline.walk_logits(matmul, hidden, weight, span, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _block_gradient(z: Array, row_scale: Array, rows: RowFactors, target: Array, holds: Any) -> Array:
    """Eq. 4 on a block of columns; ``target`` counts from its first."""
    u = z * along_rows(row_scale, STAGING_COLUMNS) - along_rows(rows.shift, STAGING_COLUMNS)
    factor = along_rows(rows.constant, STAGING_COLUMNS)
    if rows.slope is not None:
        factor = factor + along_rows(rows.slope, STAGING_COLUMNS) * u
    d = jnp.exp2(u) * factor

    def add_target() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, BLOCK, 1, layout=_pipeline.MATRIX)
        hit = columns == along_rows(target, STAGING_COLUMNS)
        return jnp.where(hit, d + along_rows(rows.target, STAGING_COLUMNS), d)

    return lax.cond(holds, add_target, lambda: d)
