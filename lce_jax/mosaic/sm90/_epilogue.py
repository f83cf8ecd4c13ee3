"""What the kernels' epilogues share: per-token vectors beside a tile, the cap, the way out through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Options
from lce_jax.mosaic._operands import LOG2E, RowFactors
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.sm90._hardware import COMPUTE_WARPGROUPS, STAGING_BYTES, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic.sm90._pipeline import Matmul, multiple_of, swizzled

if TYPE_CHECKING:
    from jaxtyping import Array, Float

MATRIX = plgpu.Layout.WGMMA
PER_ROW = MATRIX.reduce(1)
PER_COLUMN = MATRIX.reduce(0)


def staging(matmul: Matmul, columns: int, dtype: Any) -> Any:
    """Shared memory through which an epilogue sends a [T, columns] output: the slots of each compute warpgroup."""
    itemsize = jnp.dtype(dtype).itemsize
    width = STAGING_BYTES // itemsize
    slots = matmul.tuning.slots if columns > width else 1  # `send` sends one block of a tile there
    shape = (COMPUTE_WARPGROUPS, slots, WARPGROUP_ROWS, width)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(columns, itemsize))


def send(
    values: Float[Array, "64 n"], block: int, slots: Any, rows: Any, output: Any, column: Any, add: bool = False
) -> None:
    """Rounds a block of columns and copies it to ``output[rows, column:]``, or adds it there.

    TMA drops what lies outside.
    """
    count, width = slots.shape[1], slots.shape[3]
    if block > 0 and output.shape[1] <= width:
        return  # Mosaic (0.11.2, 0.12.0) would write over block 0: it drops the index into a dimension of one block
    slot = slots.at[lax.axis_index("wg"), block % count]
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    slot[...] = values.astype(output.dtype)
    plgpu.commit_smem()
    columns = pl.ds(multiple_of(column, width), width)
    plgpu.copy_smem_to_gmem(slot, output.at[rows, columns], reduction_op="add" if add else None)


def load_rows(ref: Any, rows: Any) -> Float[Array, "64"]:
    """The part of a per-token vector for a slice of 64 tokens, from GMEM."""
    return plgpu.load(ref.at[rows], layout=PER_ROW, optimized=False)


def load_factors(factors: Any, rows: Any) -> RowFactors:
    """The same part of the stacked `RowFactors`."""
    highest, target, constant = (load_rows(factors.at[i], rows) for i in range(3))
    return RowFactors(highest, target, constant, load_rows(factors.at[3], rows) if factors.shape[0] == 4 else None)


def along_rows(values: Float[Array, "64"], columns: int = TILE_N) -> Float[Array, "64 n"]:
    """One value per row, broadcast."""
    return lax.broadcast_in_dim(values, (WARPGROUP_ROWS, columns), (0,))


def with_target(d: Float[Array, "64 n"], rows: RowFactors, label: Float[Array, "64"], holds: Any) -> Any:
    """A block of dlogits with eq. 4's target at the label, which counts from the block's first column.

    ``holds`` says whether the tile has any.
    """

    def replace() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, d.shape, 1, layout=MATRIX)
        return jnp.where(columns == along_rows(label, d.shape[1]), along_rows(rows.target, d.shape[1]), d)

    return lax.cond(holds, replace, lambda: d)


def softcap(z: Any, cap: float, options: Options) -> Any:
    """The tanh of eq. 0, to the last digits of fp32: the hardware's own tanh has eleven bits."""
    return 1.0 - 2.0 / (jnp.exp2(z * (2.0 * LOG2E * options.logit_scale / cap)) + 1.0)
