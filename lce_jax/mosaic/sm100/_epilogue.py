"""What the epilogues share: the rows of a tile, its columns block by block, and the way out through shared memory.

A thread holds whole rows of a block, so nothing is reduced across threads. The blocks of a tile are a loop: unrolled,
all of them are alive at once and spill registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._held import PADDING, Held
from lce_jax.mosaic.common._machine import Matmul, multiple_of, swizzled
from lce_jax.mosaic.common._tiles import ATOM_ROWS, ROW_BLOCK, STAGING_BYTES, STAGING_COLUMNS, TILE_N
from lce_jax.mosaic.sm100._pipeline import Product

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

VECTOR_BYTES = 16  # that a thread stores to shared memory at once
BLOCKS = TILE_N // STAGING_COLUMNS  # of logits


def layout(itemsize: int) -> Any:
    """How registers hold a block that leaves as numbers of so many bytes."""
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(VECTOR_BYTES // itemsize)


HELD = Held(layout(2), ROW_BLOCK)


def rows_of(row: Any) -> Any:
    """The rows of a tile that begins at ``row``."""
    return pl.ds(multiple_of(row, ATOM_ROWS), ROW_BLOCK)


def block_of(z: Product, i: Any) -> Float[Array, "128 64"]:
    """A block of logits, raw."""
    return z.load(i * STAGING_COLUMNS, STAGING_COLUMNS, HELD.layout)


def without_padding(
    z: Float[Array, "128 64"], i: Any, column: Any, num_columns: Any, value: float = PADDING
) -> Float[Array, "128 64"]:
    """Block ``i`` of the tile at ``column`` with ``value`` on the columns that are padding, whatever they held."""
    left = num_columns - column - i * STAGING_COLUMNS

    def replace() -> Array:
        number = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=HELD.layout)
        return jnp.where(number < left, z, value)

    return lax.cond(left < STAGING_COLUMNS, replace, lambda: z)


def staging(matmul: Matmul, columns: int, dtype: Any) -> Any:
    """Shared memory through which the epilogue sends a [T, columns] output."""
    itemsize = jnp.dtype(dtype).itemsize
    width = STAGING_BYTES // itemsize
    slots = matmul.tuning.slots if columns > width else 1  # of a tile one block alone is sent there
    return plgpu.SMEM((slots, ROW_BLOCK, width), dtype, transforms=swizzled(columns, itemsize))


def send(
    values: Float[Array, "128 n"], block: Any, slots: Any, rows: Any, output: Any, column: Any, add: bool = False
) -> None:
    """Rounds a block of columns and copies it to ``output[rows, column:]``, or adds it there.

    TMA drops what lies outside.
    """
    count, _, width = slots.shape
    slot = slots.at[lax.rem(block, jnp.int32(count))]
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    slot[...] = values.astype(output.dtype)
    plgpu.commit_smem()
    columns = pl.ds(multiple_of(column, width), width)
    plgpu.copy_smem_to_gmem(slot, output.at[rows, columns], reduction_op="add" if add else None)


def send_product(
    multiply: Callable[[], Product], slots: Any, row: Any, output: Any, column: Any, add: bool | Array
) -> None:
    """Copies a tile to ``output[row:, column:]``, or adds it there, block by block: zeros where it has no step.

    Each block is rounded to the output's dtype: dweight's is the weight's, or fp32 if it is added; dhidden's is chosen
    in `lce_jax.mosaic._dhidden`.
    """
    width, rows, z = slots.shape[2], rows_of(row), multiply()
    held = layout(jnp.dtype(output.dtype).itemsize)

    def block(adds: bool, i: Any, _: None) -> None:
        def load() -> Array:
            return z.load(i * width, width, held)

        def none() -> Array:
            return plgpu.layout_cast(jnp.zeros((ROW_BLOCK, width), jnp.float32), held)

        values = lax.cond(jnp.int32(z.num_steps) > 0, load, none)
        send(values, i, slots, rows, output, column + i * width, adds)

    def all_blocks(adds: bool) -> None:
        # Whole rounds of the slots: those after the last column are dropped.
        count = z.accumulator.shape[1] // width if output.shape[1] > width else 1
        lax.fori_loop(0, count, functools.partial(block, adds), None)

    if isinstance(add, bool):
        all_blocks(add)
    else:
        pl.when(add == 0)(functools.partial(all_blocks, False))
        pl.when(add != 0)(functools.partial(all_blocks, True))
    z.release()
