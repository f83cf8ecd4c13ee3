"""The backward's two products of one chunk of dlogits, with the sum and the slices inside the kernel.

    dhidden += dlogits · weight[chunk]          dweight[chunk] = dlogitsᵀ · hidden

XLA would copy the chunk of the weight before its product and the chunk of dweight after it. Here both are read and
written where they lie, and the contraction ends with the last live column or row, known at run time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._generation import Generation, Machine
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common._machine import Matmul, Offset, Tile, Visit, ceil_div, row_groups
from lce_jax.mosaic.common._order import snake_index
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def update_dhidden(
    generation: Generation,
    sums: Float[Array, "splits Tp Hp"],
    dlogits: Float[Array, "T columns"],
    weight: Float[Array, "V H"],
    case: Case,
    span: Int[Array, "fields"],
) -> Float[Array, "splits Tp Hp"]:
    """The product over the span's first ``depth`` columns, in the span's rows, written to ``sums`` or added there.

    The contraction is cut into as many parts as there are arrays of sums.
    """
    machine = generation.machine
    matmul = Matmul(case, generation.tunings.of(case, "dhidden"), 1, case.options.vocab_dim)
    body = functools.partial(_dhidden_kernel, machine, matmul)
    return update(machine, matmul, body, "lce_dhidden", (dlogits, weight, span), sums)


def _dhidden_kernel(
    machine: Machine,
    matmul: Matmul,
    dlogits: Any,  # [T, columns]
    weight: Any,  # [V, H] or [H, V]
    scalars: Any,  # a `Span`
    sums: Any,  # [splits, Tp, Hp] as they were
    output: Any,  # as they will be, in the same place
) -> None:
    del sums
    span = Span.unpack(scalars)
    splits, columns = output.shape[0], -(-matmul.case.hidden_size // matmul.tuning.tile_n)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        # No other tile of this launch adds to the same elements, so two runs are bitwise equal.
        machine.send_product(multiply, slots, tile.row, output.at[tile.split], tile.column, span.adds)

    slots = machine.staging(matmul, output.shape[2], output.dtype)
    groups, num_steps = row_groups(matmul, span.num_rows), ceil_div(span.depth, matmul.tuning.tile_k)
    visit_all = functools.partial(_visit_all, matmul, groups, columns, splits, num_steps)
    machine.walk_tiles(matmul, dlogits, weight, Offset(k=span.offset), visit_all, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def write_dweight(
    generation: Generation,
    dweight: Float[Array, "V H"],
    dlogits: Float[Array, "T columns"],
    hidden: Float[Array, "T H"],
    case: Case,
    span: Int[Array, "fields"],
    add: bool = False,
) -> Float[Array, "V H"]:
    """``dweight`` with the span's tiles written, or added, at its offset, from its rows."""
    machine, matmul = generation.machine, Matmul(case, generation.tunings.of(case, "dweight"), 0, 0)
    lhs, rhs = (dlogits, hidden) if case.options.vocab_dim == 0 else (hidden, dlogits)
    body = functools.partial(_dweight_kernel, machine, matmul, add)
    return update(machine, matmul, body, "lce_dweight", (lhs, rhs, span), dweight)


def _dweight_kernel(
    machine: Machine,
    matmul: Matmul,
    add: bool,
    lhs: Any,  # dlogits [T, columns], or hidden [T, H]: what runs down the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits [T, columns]
    scalars: Any,  # a `Span`
    dweight: Any,  # [V, H] or [H, V]; the other chunks are in it already
    output: Any,  # the same place
) -> None:
    del dweight
    span = Span.unpack(scalars)
    if matmul.case.options.vocab_dim == 0:
        first_row, first_column = span.offset, 0
        groups = row_groups(matmul, span.num_tiles * TILE_N)
        columns = -(-rhs.shape[1] // matmul.tuning.tile_n)
    else:
        first_row, first_column = 0, span.offset
        groups, columns = row_groups(matmul, lhs.shape[1]), span.num_tiles

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row, column = first_row + tile.row, first_column + tile.column
        machine.send_product(multiply, slots, row, output, column, add)

    slots = machine.staging(matmul, output.shape[1], output.dtype)
    num_steps = ceil_div(span.num_rows, matmul.tuning.tile_k)
    visit_all = functools.partial(_visit_all, matmul, groups, columns, 1, num_steps)
    machine.walk_tiles(matmul, lhs, rhs, Offset(), visit_all, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def update(machine: Machine, matmul: Matmul, body: Any, name: str, operands: tuple[Array, ...], result: Array) -> Array:
    """``result`` as ``body`` leaves it, in its place."""
    outputs = [jax.ShapeDtypeStruct(result.shape, result.dtype)]
    run = machine.kernel(matmul, body, outputs, name, updated={len(operands): 0})
    return run(*operands, result)[0]


def _visit_all(matmul: Matmul, groups: Any, columns: int, splits: int, num_steps: Any, visit: Visit, carry: Any) -> Any:
    """Visits the tiles of the result, each ``splits`` times with its part of the contraction."""
    area, per_split = groups * columns, ceil_div(num_steps, splits)

    def tile(info: Any, carry: Any) -> Any:
        split = lax.div(info.index[0], area)
        group, column = snake_index(matmul.tuning, lax.rem(info.index[0], area), groups, columns)
        row_block = group * matmul.tuning.cluster + lax.axis_index("cluster")
        first = split * per_split
        count = jnp.clip(num_steps - first, 0, per_split)
        return visit(Tile(row_block * ROW_BLOCK, column * matmul.tuning.tile_n, count, first, split=split), carry)

    return plgpu.nd_loop((area * splits,), collective_axes="sm", init_carry=carry)(tile)
