"""What the kernels' epilogues share: the rows of a warpgroup, the mask of the vocabulary, the way out.

A tile's padding columns get a value that adds nothing. Results go out through shared memory, or from the registers
where a GPU has no TMA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Machine
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._logits import FOLDED, PADDING, AccumulatorLayout
from lce_jax.mosaic.common._tiles import (
    ATOM_ROWS,
    COMPUTE_WARPGROUPS,
    STAGING_BYTES,
    STAGING_COLUMNS,
    TILE_N,
    WARPGROUP_ROWS,
    Matmul,
    multiple_of,
    swizzled,
)

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


def without_padding(
    z: Float[Array, "64 n"], column: Any, num_columns: Any, mask: Any, start: Any = 0
) -> Float[Array, "64 n"]:
    """A tile, or its columns from ``start`` on, with `PADDING` on those that are padding, whatever they held.

    Only a tile that holds padding reads the mask. The first half of the mask says which columns of the ragged tile are
    padding, the second half says it of a tile of nothing but padding. A comparison with an iota would cost every tile,
    because the compiler hoists it out of the branch.
    """
    replace = functools.partial(_replaced, z, column, num_columns, mask, PADDING, start)
    return lax.cond(column + TILE_N > num_columns, replace, lambda: z)


def lowest_live(
    z: Float[Array, "64 256"], column: Any, num_columns: Any, mask: Any, start: Any = 0
) -> Float[Array, "64"]:
    """The smallest number of each row that is no padding.

    Inside the branch until few columns are left, so that no second tile is alive beside ``z``, which would spill its
    registers.
    """

    def of_real() -> Array:
        return folded(_replaced(z, column, num_columns, mask, -PADDING, start), jnp.minimum)

    return jnp.min(lax.cond(column + TILE_N > num_columns, of_real, lambda: folded(z, jnp.minimum)), axis=1)


def folded(z: Float[Array, "64 256"], function: Callable[[Array, Array], Array]) -> Float[Array, "64 8"]:
    """A tile, reduced by each thread alone.

    What branches return: the shuffles of a whole reduction in one would have the compiler take all that follow it for
    divergent, and spill registers.
    """
    return functools.reduce(function, (z[:, start : start + FOLDED] for start in range(0, z.shape[1], FOLDED)))


def _replaced(z: Array, column: Any, num_columns: Any, mask: Any, value: float, start: Any = 0) -> Array:
    ragged, width = lax.div(num_columns, TILE_N) * TILE_N, z.shape[1]
    first = jnp.clip(column - ragged, 0, TILE_N) + start
    padding = plgpu.load(mask.at[pl.ds(first, width)], layout=HELD.per_column, optimized=False)
    padding = lax.broadcast_in_dim(padding, (WARPGROUP_ROWS, width), (1,))
    return jnp.where(padding > 0, value, z)


HELD = AccumulatorLayout(WARPGROUP_ROWS)


def rows_of(row: Any) -> Any:
    """The 64 rows of this warpgroup, of a tile that begins at ``row``."""
    return pl.ds(row + lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)


def staging(machine: Machine, matmul: Matmul, columns: int, dtype: Any) -> Any:
    """Shared memory through which an epilogue sends a [T, columns] output: the slots of each compute warpgroup.

    None without TMA: epilogues then store what registers hold.
    """
    if not machine.has_tma:
        return None
    itemsize = jnp.dtype(dtype).itemsize
    width = STAGING_BYTES // itemsize
    slots = matmul.tuning.slots if columns > width else 1  # `send` sends one block of a tile there
    shape = (COMPUTE_WARPGROUPS, slots, WARPGROUP_ROWS, width)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(columns, itemsize))


def send(
    values: Float[Array, "64 n"], block: int, slots: Any, rows: Any, output: Any, column: Any, add: bool | Array = False
) -> None:
    """Rounds a block of columns and copies it to ``output[rows, column:]``, or adds it there.

    TMA drops what lies outside. ``slots``: None where a GPU has no TMA.
    """
    if slots is None:
        _where(add, functools.partial(_store, values, rows, output, column))
        return
    count, width = slots.shape[1], slots.shape[3]
    if block > 0 and output.shape[1] <= width:
        return  # Mosaic (0.11.2, 0.12.0) would write over block 0: it drops the index into a dimension of one block
    slot = slots.at[lax.axis_index("wg"), block % count]
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    slot[...] = values.astype(output.dtype)
    plgpu.commit_smem()
    columns = pl.ds(multiple_of(column, width), width)
    copy = functools.partial(plgpu.copy_smem_to_gmem, slot, output.at[rows, columns])
    _where(add, lambda add: copy(reduction_op="add" if add else None))


def _where(add: bool | Array, send: Callable[[bool], None]) -> None:
    """``send(add)``, also where it is not known yet."""
    if isinstance(add, bool):
        send(add)
    else:
        pl.when(add == 0)(functools.partial(send, False))
        pl.when(add != 0)(functools.partial(send, True))


def _store(values: Float[Array, "64 64"], rows: Any, output: Any, column: Any, add: bool) -> None:
    """The same from registers. Rows and columns of an output are multiples of 64."""
    place = output.at[rows, pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)]

    def store() -> None:
        rounded = values.astype(output.dtype)
        there = plgpu.load(place, layout=HELD.layout, optimized=False) if add else None
        _pallas.store(place, rounded if there is None else there + rounded)

    if output.shape[0] % TILE_N == output.shape[1] % TILE_N == 0:  # a tile of the vocabulary, whose rows dweight has
        store()
    else:
        pl.when((rows.start < output.shape[0]) & (column < output.shape[1]))(store)


def send_product(multiply: Any, slots: Any, row: Any, output: Any, column: Any, add: bool | Array) -> None:
    """Copies a warpgroup's part of a tile to ``output[row:, column:]``, or adds it there, block by block.

    Each block is rounded to the output's dtype: dweight's is the weight's, or fp32 if it is added; dhidden's is chosen
    in `_chunks`.
    """
    values, rows = multiply(), rows_of(row)
    rows = pl.ds(pl.multiple_of(rows.start, ATOM_ROWS), rows.size)
    width = STAGING_COLUMNS if slots is None else slots.shape[-1]
    for i, start in enumerate(range(0, values.shape[1], width)):
        send(values[:, start : start + width], i, slots, rows, output, column + start, add)
