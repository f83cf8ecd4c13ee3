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
from lce_jax.mosaic._config import (
    ATOM_ROWS,
    STAGING_COLUMNS,
    TILE_N,
    WARPGROUP_ROWS,
)
from lce_jax.mosaic._operands import PADDING, Prepared, RowFactors
from lce_jax.mosaic._pipeline import Logits, Tile, along_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float

BLOCK = (WARPGROUP_ROWS, STAGING_COLUMNS)


def dlogits(
    prepared: Prepared, case: Case, rows: RowFactors, first_tile: Any, columns: int, interpret: Any = None
) -> Float[Array, "T columns"]:
    """The gradient in ``columns`` raw products from vocabulary tile ``first_tile`` on, in the weight's dtype.

    Whole tiles, zero on columns that are padding or none at all. Row blocks without a live row are left unwritten.
    """
    shape = _config.geometry(case)
    spec = _pipeline.logits(case, "dlogits", -(-columns // TILE_N))
    output = jax.ShapeDtypeStruct((shape.tokens, spec.num_tiles * TILE_N), case.dtype)
    groups = _pipeline.row_groups(spec.matmul, prepared.num_rows)
    scalars = jnp.stack([groups, prepared.num_columns, jnp.asarray(first_tile, jnp.int32)])
    weight = prepared.weight
    if case.vocab_size % ATOM_ROWS:  # TMA counts whole atoms of rows: a copy of the chunk alone
        weight = lax.dynamic_slice_in_dim(weight, first_tile * TILE_N, columns)
    factors = jnp.stack(jax.tree.leaves(rows))
    run = _pipeline.kernel(spec.matmul, functools.partial(_kernel, spec), [output], "lce_dlogits", interpret)
    (result,) = run(
        prepared.hidden,
        weight,
        prepared.targets,
        prepared.scale,
        prepared.holds_target,
        prepared.mask,
        factors,
        scalars,
    )
    return result


def _kernel(
    spec: Logits,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; the chunk's own part where V is no multiple of 8
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # live row groups, live columns, first tile
    output: Any,  # [T, columns]
) -> None:
    live_groups, num_columns, first_tile = (scalars[i] for i in range(3))
    first_column = first_tile * TILE_N
    case = spec.matmul.case
    options = case.options

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row_scale = _pipeline.load_rows(scale, tile.rows)
        rows = _pipeline.load_factors(factors, tile.rows)
        column = first_column + tile.column
        target = _pipeline.load_rows(targets, tile.rows) - column
        holds = holds_target[tile.place.row_block, first_tile + tile.place.position] > 0
        z = multiply()
        cap = options.logit_softcap
        if cap is not None:
            z = _pipeline.softcap(z, cap, options)
        z = _pipeline.without_padding(z, column, num_columns, mask, PADDING)
        for i in range(TILE_N // STAGING_COLUMNS):
            start = i * STAGING_COLUMNS
            block = z[:, start : start + STAGING_COLUMNS]
            d = _block_gradient(block, row_scale, rows, target - start, holds)
            d = d if cap is None else d * (1.0 - block * block)
            _pipeline.send(d, i, slots, tile.rows, output, tile.column + start)

    slots = _pipeline.staging(spec.matmul, output.shape[1], output.dtype)
    weight_start = first_column if case.vocab_size % ATOM_ROWS == 0 else 0
    _pipeline.walk_logits(spec, hidden, weight, weight_start, live_groups, consume, slots)
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
