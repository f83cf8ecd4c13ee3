"""The backward's two products of one chunk of dlogits, with the sum and the slices inside the kernel.

    dhidden += dlogits · weight[chunk]          dweight[chunk] = dlogitsᵀ · hidden

XLA would copy the chunk of the weight in front of its product and the chunk of dweight behind it. Here both are read
and written where they lie, and the contraction ends with the last live column or row, known at run time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._compat import pl, plgpu
from lce_jax._types import Case
from lce_jax.mosaic import _config, _pipeline
from lce_jax.mosaic._config import ATOM_ROWS, ROW_BLOCK, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic._operands import Span
from lce_jax.mosaic._pipeline import Matmul, Origin, Tile, Visit, ceil_div

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def update_dhidden(
    sums: Float[Array, "splits Tp Hp"],
    dlogits: Float[Array, "T columns"],
    weight: Float[Array, "V H"],
    case: Case,
    span: Int[Array, "fields"],
    add: bool,
    interpret: Any = None,
) -> Float[Array, "splits Tp Hp"]:
    """``sums`` plus the part of the span's first ``depth`` columns, or that part alone, in the span's rows.

    The contraction is cut into as many parts as there are arrays of sums.
    """
    matmul = Matmul(case, _config.tiles(case, "dhidden"), 1, case.options.vocab_dim)
    body = functools.partial(_dhidden_kernel, matmul, add)
    return _update(matmul, body, "lce_dhidden", dlogits, weight, span, sums, interpret)


def _dhidden_kernel(
    matmul: Matmul,
    add: bool,
    dlogits: Any,  # [T, columns]
    weight: Any,  # [V, H] or [H, V]
    scalars: Any,  # a `Span`
    sums: Any,  # [splits, Tp, Hp] as they were
    output: Any,  # as they will be, in the same place
) -> None:
    del sums
    span = Span.unpack(scalars)
    splits, _, hidden_size = output.shape

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        # Nobody else adds to these in this launch: their bits repeat.
        _send_tile(multiply(), slots, tile.rows, output.at[tile.place], tile.column, add)

    slots = _pipeline.staging(matmul, hidden_size, output.dtype)
    groups, num_steps = _pipeline.row_groups(matmul, span.num_rows), ceil_div(span.depth, matmul.tiles.tile_k)
    tiles = functools.partial(_visit_all, matmul, groups, hidden_size // TILE_N, splits, num_steps)
    _pipeline.walk_tiles(matmul, dlogits, weight, Origin(k=span.origin), tiles, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def write_dweight(
    dweight: Float[Array, "V H"],
    dlogits: Float[Array, "T columns"],
    hidden: Float[Array, "T H"],
    case: Case,
    span: Int[Array, "fields"],
    interpret: Any = None,
) -> Float[Array, "V H"]:
    """``dweight`` with the span's tiles written at its origin, from its rows."""
    matmul = Matmul(case, _config.tiles(case, "dweight"), 0, 0)
    lhs, rhs = (dlogits, hidden) if case.options.vocab_dim == 0 else (hidden, dlogits)
    body = functools.partial(_dweight_kernel, matmul)
    return _update(matmul, body, "lce_dweight", lhs, rhs, span, dweight, interpret)


def _dweight_kernel(
    matmul: Matmul,
    lhs: Any,  # dlogits [T, columns], or hidden [T, H]: what runs down the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits [T, columns]
    scalars: Any,  # a `Span`
    dweight: Any,  # [V, H] or [H, V]; the other chunks are in it already
    output: Any,  # the same place
) -> None:
    del dweight
    span = Span.unpack(scalars)
    if matmul.case.options.vocab_dim == 0:
        first_row, first_column = span.origin, 0
        groups, columns = _pipeline.row_groups(matmul, span.num_tiles * TILE_N), -(-rhs.shape[1] // TILE_N)
    else:
        first_row, first_column = 0, span.origin
        groups, columns = _pipeline.row_groups(matmul, lhs.shape[1]), span.num_tiles

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        values = multiply()
        row = first_row + tile.row + lax.axis_index("wg") * WARPGROUP_ROWS
        rows = pl.ds(pl.multiple_of(row, ATOM_ROWS), WARPGROUP_ROWS)
        _send_tile(values, slots, rows, output, first_column + tile.column)

    slots = _pipeline.staging(matmul, output.shape[1], output.dtype)
    num_steps = ceil_div(span.num_rows, matmul.tiles.tile_k)
    tiles = functools.partial(_visit_all, matmul, groups, columns, 1, num_steps)
    _pipeline.walk_tiles(matmul, lhs, rhs, Origin(), tiles, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _send_tile(
    values: Float[Array, "64 256"], slots: Any, rows: Any, output: Any, column: Any, add: bool = False
) -> None:
    """Copies a warpgroup's part of a tile to ``output[rows, column:]``, or adds it there, block by block."""
    width = slots.shape[-1]
    for i, start in enumerate(range(0, TILE_N, width)):
        _pipeline.send(values[:, start : start + width], i, slots, rows, output, column + start, add)


def _update(
    matmul: Matmul, body: Any, name: str, lhs: Array, rhs: Array, span: Array, result: Array, interpret: Any
) -> Array:
    """``result`` as ``body`` leaves it, in its place."""
    outputs = [jax.ShapeDtypeStruct(result.shape, result.dtype)]
    run = _pipeline.kernel(matmul, body, outputs, name, interpret, updated={3: 0})
    return run(lhs, rhs, span, result)[0]


def _visit_all(matmul: Matmul, groups: Any, columns: int, splits: int, num_steps: Any, visit: Visit) -> Any:
    """Visits the tiles of the result, each ``splits`` times with its part of the contraction."""
    area, per_split = groups * columns, -(-num_steps // splits)

    def tile(info: Any, carry: Any) -> Any:
        split = lax.div(info.index[0], area)
        group, column = _pipeline.snake_index(matmul.tiles, lax.rem(info.index[0], area), groups, columns)
        row_block = group * matmul.tiles.cluster + lax.axis_index("cluster")
        first = split * per_split
        count = jnp.clip(num_steps - first, 0, per_split)
        return visit(Tile(row_block * ROW_BLOCK, column * TILE_N, count, first, place=split), carry)

    return plgpu.nd_loop((area * splits,), collective_axes="sm", init_carry=jnp.int32(0))(tile)
