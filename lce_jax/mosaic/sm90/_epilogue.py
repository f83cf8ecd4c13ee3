"""What the kernels' epilogues share: the rows of a warpgroup, and the way out through shared memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._held import Held
from lce_jax.mosaic.common._machine import Matmul, multiple_of, swizzled
from lce_jax.mosaic.common._tiles import ATOM_ROWS, STAGING_BYTES
from lce_jax.mosaic.sm90._hardware import COMPUTE_WARPGROUPS, WARPGROUP_ROWS

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

HELD = Held(WARPGROUP_ROWS)


def rows_of(row: Any) -> Any:
    """The 64 rows of this warpgroup, of a tile that begins at ``row``."""
    return pl.ds(row + lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)


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


def send_product(multiply: Any, slots: Any, row: Any, output: Any, column: Any, add: bool | Array) -> None:
    """Copies a warpgroup's part of a tile to ``output[row:, column:]``, or adds it there, block by block.

    Each block is rounded to the output's dtype: dweight's is the weight's, or fp32 if it is added; dhidden's is chosen
    in `_dhidden`.
    """
    values, rows = multiply(), rows_of(row)
    rows = pl.ds(pl.multiple_of(rows.start, ATOM_ROWS), rows.size)
    send = functools.partial(_send_tile, values, slots, rows, output, column)
    if isinstance(add, bool):
        send(add)
    else:
        pl.when(add == 0)(functools.partial(send, False))
        pl.when(add != 0)(functools.partial(send, True))


def _send_tile(values: Float[Array, "64 n"], slots: Any, rows: Any, output: Any, column: Any, add: bool) -> None:
    width = slots.shape[-1]
    for i, start in enumerate(range(0, values.shape[1], width)):
        send(values[:, start : start + width], i, slots, rows, output, column + start, add)
