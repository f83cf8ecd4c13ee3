"""What the kernels' epilogues share: the rows of a warpgroup, and the way out through shared memory.

The mask of the vocabulary: padding columns of a tile of logits get a value that adds nothing.

The epilogue of the forward's tiles: statistics (eq. 1) of [64, 256] logits in registers.

The epilogue of the backward's tiles: the gradient (eqs. 4, 5) in [64, 256] raw products that registers hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._operands import FLOOR
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._dlogits import DlogitsRefs, DlogitsWhere
from lce_jax.mosaic.common._logits import FOLDED, PADDING, Held, LabelBelow, extent, softcap
from lce_jax.mosaic.common._statistics import StatisticsRefs, StatisticsWhere, as_cached, of_sums, store, sums
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
from lce_jax.types._types import Call

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


def statistics(case: Call, refs: StatisticsRefs, tile: Tile, where: StatisticsWhere, multiply: Any, slots: Any) -> None:
    """A warpgroup's part of a tile, from its products to the partial statistics and the cache."""
    rows = functools.partial(rows_of, tile.row)  # computed where they are needed: no register holds them
    row_scale = HELD.load_rows(refs.scale, rows())
    target = HELD.load_rows(refs.targets, rows()) - where.column
    holds = refs.holds_target[tile.row_block, where.first_tile + where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, rows())
    z = multiply()
    if case.logit_softcap is not None:
        z = softcap(z, case.logit_softcap, case)
    lowest = lowest_live(z, *where.edge) if case.stats and floor is None else None
    z = without_padding(z, *where.edge)
    at_target = None if floor is None else _target_logit(z, target, holds)
    label = None if floor is None or at_target is None else LabelBelow.of(at_target, target, floor)
    z = HELD.reaching(z, floor)
    highest = jnp.maximum(jnp.max(z, axis=1), FLOOR)
    highest = highest if label is None else label.highest(highest)
    # With a cache the target comes first, so that z dies block by block; without one the exponentials come first.
    # The other order spills registers, in either case. With a floor the target is known already.
    if refs.cache is not None:
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
        send = functools.partial(_send_exponentials, slots, rows(), refs.cache.exponentials, where.column)
        found = _sums(z, row_scale, highest, case, send)
        refs.cache.max.at[where.first_tile + where.number, rows()][...] = highest
    else:
        found = _sums(z, row_scale, highest, case, None)
        at_target = _target_logit(z, target, holds) if at_target is None else at_target
    support = None
    if floor is not None and case.stats:
        lowest, support = _extent(z)
    if floor is not None:  # read anew: no register holds it beside the sums
        target = HELD.load_rows(refs.targets, rows()) - where.column
    owned = (target >= 0) & (target < TILE_N)
    at_target = jnp.where(owned, (at_target - highest) * row_scale, -jnp.inf)
    of_tile = of_sums(case, found, max=highest, target=at_target, min=lowest, support=support)
    store(refs, where, rows, of_tile if label is None else label.added(of_tile, row_scale))


def _extent(z: Array) -> tuple[Array, Array]:
    """The smallest logit of each row that counts, and how many do, a block of columns at a time."""
    blocks = [extent(z[:, start : start + STAGING_COLUMNS]) for start in range(0, TILE_N, STAGING_COLUMNS)]
    lowest, support = zip(*blocks, strict=True)
    return functools.reduce(jnp.minimum, lowest), functools.reduce(jnp.add, support)


def _sums(z: Array, row_scale: Array, highest: Array, case: Call, send: Any) -> list[Array]:
    """The `sums` of the tile, a block of columns at a time, each block's e handed to ``send``.

    u takes one instruction more than a fused multiply-add, which would not be 0 at the largest column.
    """
    found: list[Array] = []
    for i, start in enumerate(range(0, TILE_N, STAGING_COLUMNS)):
        u = z[:, start : start + STAGING_COLUMNS] - HELD.along_rows(highest, STAGING_COLUMNS)
        u = u * HELD.along_rows(row_scale, STAGING_COLUMNS)
        e = jnp.exp2(u)
        parts = sums(case, u, e)
        found = [a + b for a, b in zip(found, parts, strict=True)] if found else parts
        if send is not None:
            send(i, e)
    return found


def _send_exponentials(slots: Any, rows: Any, output: Any, column: Any, i: int, e: Array) -> None:
    send(as_cached(e, output.dtype), i, slots, rows, output, column + i * STAGING_COLUMNS)


def _target_logit(z: Array, target: Array, holds: Any) -> Array:
    """The logit, unscaled, at each row's target, 0 where the tile has none; only tiles that hold some target look."""

    def look() -> Array:
        return functools.reduce(jnp.add, (jnp.where(there, x, 0.0) for there, x in HELD.by_label(z, target)))

    def none() -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, FOLDED), jnp.float32), HELD.layout)

    return jnp.sum(lax.cond(holds, look, none), axis=1)


def dlogits(case: Call, refs: DlogitsRefs, tile: Tile, where: DlogitsWhere, multiply: Any, slots: Any) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    output_rows, cap = rows_of(where.output_row), case.logit_softcap
    row_scale = HELD.load_rows(refs.scale, rows_of(tile.row))
    rows = HELD.load_factors(refs.factors, rows_of(tile.row))
    target = HELD.load_rows(refs.targets, rows_of(tile.row)) - where.column
    holds = refs.holds_target[tile.row_block, where.number] > 0
    floor = None if refs.floor is None else HELD.load_rows(refs.floor, rows_of(tile.row))
    z = multiply()
    real = functools.partial(without_padding, column=where.column, num_columns=where.num_columns, mask=refs.mask)
    z = real(z) if cap is None else z
    for i in range(TILE_N // STAGING_COLUMNS):
        start = i * STAGING_COLUMNS
        block = z[:, start : start + STAGING_COLUMNS]
        if cap is not None:  # a block at a time: a second tile beside the first would spill its registers
            block = real(softcap(block, cap, case), start=start)
        block = HELD.reaching(block, floor)
        d = HELD.gradient(block, row_scale, rows)
        d = d if cap is None else d * (1.0 - block * block)
        d = HELD.with_target(d, rows, target - start, holds)
        send(d, i, slots, output_rows, refs.output, where.output_column + start)
