"""The steps that epilogues share: loads of a warpgroup's rows, the mask of padding columns, and stores.

Padding columns of a tile get a value that adds nothing to any sum. Results are stored through shared memory by TMA, or
from registers on a GPU without TMA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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
    Tile,
    multiple_of,
    swizzled,
)

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


def mask_padding(
    z: Float[Array, "64 n"], column: Any, num_columns: Any, mask: Any, start: Any = 0
) -> Float[Array, "64 n"]:
    """Replaces padding columns of a tile by `PADDING`. ``start``: the first column of ``z`` in the tile.

    Only a tile with padding reads the mask. The first half of the mask says which columns of the ragged tile are
    padding. The second half is for tiles that are only padding. A comparison with an iota would take time in every
    tile, because the compiler hoists it out of the branch.
    """
    replace = functools.partial(_replace_padding, z, column, num_columns, mask, PADDING, start)
    return lax.cond(column + TILE_N > num_columns, replace, lambda: z)


def min_unpadded(
    z: Float[Array, "64 256"], column: Any, num_columns: Any, mask: Any, start: Any = 0
) -> Float[Array, "64"]:
    """Returns the smallest logit of each row, padding excluded.

    The branch reduces the tile to a few columns. If it returned a second tile besides ``z``, registers would spill.
    """

    def fold_unpadded() -> Array:
        return fold_columns(_replace_padding(z, column, num_columns, mask, -PADDING, start), jnp.minimum)

    return jnp.min(lax.cond(column + TILE_N > num_columns, fold_unpadded, lambda: fold_columns(z, jnp.minimum)), axis=1)


def fold_columns(z: Float[Array, "64 256"], function: Callable[[Array, Array], Array]) -> Float[Array, "64 8"]:
    """Reduces a tile to eight columns, without an exchange between threads.

    A branch calls this function; the rest of the reduction follows after the branch. If the shuffles of a full
    reduction were inside a branch, the compiler would treat all later code as divergent, and spill registers.
    """
    return functools.reduce(function, (z[:, start : start + FOLDED] for start in range(0, z.shape[1], FOLDED)))


def _replace_padding(z: Array, column: Any, num_columns: Any, mask: Any, value: float, start: Any = 0) -> Array:
    ragged, width = lax.div(num_columns, TILE_N) * TILE_N, z.shape[1]
    first = jnp.clip(column - ragged, 0, TILE_N) + start
    padding = _pallas.load(mask.at[pl.ds(first, width)], ACCUMULATOR.per_column)
    padding = _pallas.broadcast(padding, (WARPGROUP_ROWS, width), 1, ACCUMULATOR.layout)
    return jnp.where(padding > 0, value, z)


ACCUMULATOR = AccumulatorLayout(WARPGROUP_ROWS)


def warpgroup_rows(row: Any) -> Any:
    """Returns the 64 rows of this warpgroup in a tile that begins at ``row``."""
    return pl.ds(row + lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)


class TokenRows(NamedTuple):
    """The rows of a warpgroup's part of a tile. Each method loads anew, so that no register holds a number for long."""

    refs: Any  # the arrays ``row_scale``, ``targets`` and ``floor``, [Tp], and ``holds_target``, [row blocks, tiles]
    tile: Tile
    where: Any  # the tile's first column and its number, in the shard

    def place(self) -> Any:
        """Computes where the rows are in an array of all tokens."""
        return warpgroup_rows(self.tile.row)

    def load_scale(self) -> Float[Array, "64"]:
        """Loads the k of eq. 0 in base 2."""
        return ACCUMULATOR.load_rows(self.refs.row_scale, self.place())

    def load_target(self) -> Int[Array, "64"]:
        """Loads the columns of the labels, counted from the tile's first."""
        return ACCUMULATOR.load_rows(self.refs.targets, self.place()) - self.where.column

    def holds_target(self) -> Bool[Array, ""]:
        """Loads whether the tile has the label of any row of its row block."""
        return self.refs.holds_target[self.tile.row_block, self.where.number] > 0

    def load_floor(self) -> Float[Array, "64"] | None:
        """Loads the ``logit_floor``, if the call has one."""
        return None if self.refs.floor is None else ACCUMULATOR.load_rows(self.refs.floor, self.place())


def make_staging(machine: Machine, matmul: Matmul, columns: int, dtype: Any) -> Any:
    """Returns shared memory for stores to a [T, columns] output: the slots of each compute warpgroup.

    Returns None on a GPU without TMA, where epilogues store from registers.
    """
    if not machine.has_tma:
        return None
    itemsize = jnp.dtype(dtype).itemsize
    width = STAGING_BYTES // itemsize
    slots = matmul.tuning.slots if columns > width else 1  # with fewer columns, `send` stores one block per tile
    shape = (COMPUTE_WARPGROUPS, slots, WARPGROUP_ROWS, width)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(columns, itemsize))


def send(
    values: Float[Array, "64 n"], block: int, slots: Any, rows: Any, output: Any, column: Any, add: bool | Array = False
) -> None:
    """Rounds a block of columns and stores it at ``output[rows, column:]``, or adds it there if ``add``.

    TMA drops rows and columns outside the output. ``slots`` are None on a GPU without TMA.
    """
    if slots is None:
        _where(add, functools.partial(_store, values, rows, output, column))
        return
    count, width = slots.shape[1], slots.shape[3]
    if block > 0 and output.shape[1] <= width:
        return  # Mosaic (0.11.2, 0.12.0) would overwrite block 0, because it drops the index of a dimension of size one
    slot = slots.at[lax.axis_index("wg"), block % count]
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    slot[...] = values.astype(output.dtype)
    plgpu.commit_smem()
    columns = pl.ds(multiple_of(column, width), width)
    copy = functools.partial(plgpu.copy_smem_to_gmem, slot, output.at[rows, columns])
    _where(add, lambda add: copy(reduction_op="add" if add else None))


def _where(add: bool | Array, send: Callable[[bool], None]) -> None:
    """Calls ``send(add)``, with a branch if ``add`` is traced."""
    if isinstance(add, bool):
        send(add)
    else:
        pl.when(add == 0)(functools.partial(send, False))
        pl.when(add != 0)(functools.partial(send, True))


def _store(values: Float[Array, "64 64"], rows: Any, output: Any, column: Any, add: bool) -> None:
    """Stores a block from registers, or adds it. The rows and columns of an output are multiples of 64."""
    place = output.at[rows, pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)]

    def store() -> None:
        rounded = values.astype(output.dtype)
        before = _pallas.load(place, ACCUMULATOR.layout) if add else None
        _pallas.store(place, rounded if before is None else before + rounded)

    if output.shape[0] % TILE_N == output.shape[1] % TILE_N == 0:  # no tile reaches outside the output
        store()
    else:
        pl.when((rows.start < output.shape[0]) & (column < output.shape[1]))(store)


def send_product(multiply: Any, slots: Any, row: Any, output: Any, column: Any, add: bool | Array) -> None:
    """Stores a warpgroup's part of a tile at ``output[row:, column:]``, or adds it there if ``add``, block by block.

    Each block is rounded to the output's dtype. For dweight, that is the weight's dtype, or fp32 if dweight is added to
    a sum. For dhidden, `_chunks.empty_dhidden` chooses it.
    """
    values, rows = multiply(), warpgroup_rows(row)
    rows = pl.ds(pl.multiple_of(rows.start, ATOM_ROWS), rows.size)
    width = STAGING_COLUMNS if slots is None else slots.shape[-1]
    for i, start in enumerate(range(0, values.shape[1], width)):
        send(values[:, start : start + width], i, slots, rows, output, column + start, add)
