"""The backward's two products of one chunk of dlogits, with the sum and the slices inside the kernel.

    dhidden += dlogits · weight[chunk]          dweight[chunk] = dlogitsᵀ · hidden

XLA would copy the chunk of the weight before its product and the chunk of dweight after it. Here both are read and
written where they lie, and the contraction ends with the last live column or row, known at run time.

The two products of a batch of live tiles of dlogits, each contracted over its own list.

    dhidden[row block] += Σ dlogits[slot] · weight[tile]          over the row block's live vocabulary tiles
    dweight[tile]       = Σ dlogits[slot]ᵀ · hidden[row block]    over the vocabulary tile's live row blocks

The steps of a contraction are counted through the list, and the memory warpgroup looks up where each step's operands
lie. The slots of one vocabulary tile are side by side.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._live_tiles import Batch, Sizes, Worklist, row_block_of, sum_before
from lce_jax.mosaic._operands import Span
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic.common._epilogue import send_product, staging
from lce_jax.mosaic.common._tiles import (
    ROW_BLOCK,
    TILE_N,
    Matmul,
    Offset,
    StepPlace,
    Tile,
    Visit,
    ceil_div,
    longest_first_index,
    row_groups,
    snake_index,
    turning_snake_index,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


def update_dhidden(
    generation: Generation,
    sums: Float[Array, "splits Tp Hp"],
    dlogits: Float[Array, "T columns"],
    weight: Float[Array, "V H"],
    call: Call,
    span: Int[Array, "fields"],
) -> Float[Array, "splits Tp Hp"]:
    """The product over the span's first ``depth`` columns, in the span's rows, written to ``sums`` or added there.

    The contraction is cut into as many parts as there are arrays of sums.
    """
    machine = generation.machine
    matmul = Matmul(call, generation.tunings.of(call, "dhidden"), 1, call.vocab_dim)
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
    splits, columns = output.shape[0], -(-matmul.call.hidden_size // matmul.tuning.tile_n)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        # No other tile of this launch adds to the same elements, so two runs are bitwise equal.
        send_product(multiply, slots, tile.row, output.at[tile.split], tile.column, span.adds)

    slots = staging(machine, matmul, output.shape[2], output.dtype)
    groups, num_steps = row_groups(matmul, span.num_rows), ceil_div(span.depth, matmul.tuning.tile_k)
    visit_all = functools.partial(_visit_all, matmul, groups, columns, splits, num_steps)
    machine.walk_tiles(matmul, dlogits, weight, Offset(k=span.offset), visit_all, consume, slots)


def write_dweight(
    generation: Generation,
    dweight: Float[Array, "V H"],
    dlogits: Float[Array, "T columns"],
    hidden: Float[Array, "T H"],
    call: Call,
    span: Int[Array, "fields"],
    may_add: bool = False,
) -> Float[Array, "V H"]:
    """``dweight`` with the span's tiles written at its offset, from its rows, or added if the span says so too."""
    machine, matmul = generation.machine, Matmul(call, generation.tunings.of(call, "dweight"), 0, 0)
    lhs, rhs = (dlogits, hidden) if call.vocab_dim == 0 else (hidden, dlogits)
    body = functools.partial(_dweight_kernel, machine, matmul, may_add)
    return update(machine, matmul, body, "lce_dweight", (lhs, rhs, span), dweight)


def _dweight_kernel(
    machine: Machine,
    matmul: Matmul,
    may_add: bool,
    lhs: Any,  # dlogits [T, columns], or hidden [T, H]: what runs down the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits [T, columns]
    scalars: Any,  # a `Span`
    dweight: Any,  # [V, H] or [H, V]; the other chunks are in it already
    output: Any,  # the same place
) -> None:
    del dweight
    span = Span.unpack(scalars)
    if matmul.call.vocab_dim == 0:
        first_row, first_column = span.offset, 0
        groups = row_groups(matmul, span.num_tiles * TILE_N)
        columns = -(-rhs.shape[1] // matmul.tuning.tile_n)
    else:
        first_row, first_column = 0, span.offset
        groups, columns = row_groups(matmul, lhs.shape[1]), span.num_tiles

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row, column = first_row + tile.row, first_column + tile.column
        send_product(multiply, slots, row, output, column, may_add and span.adds_dweight)

    slots = staging(machine, matmul, output.shape[1], output.dtype)
    num_steps = ceil_div(span.num_rows, matmul.tuning.tile_k)
    visit_all = functools.partial(_visit_all, matmul, groups, columns, 1, num_steps)
    machine.walk_tiles(matmul, lhs, rhs, Offset(), visit_all, consume, slots)


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


def update_live_dhidden(
    generation: Generation,
    sums: Float[Array, "splits Tp Hp"],
    dlogits: Float[Array, "slots*128 256"],
    weight: Float[Array, "V H"],
    call: Call,
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
) -> Float[Array, "splits Tp Hp"]:
    """``sums`` with a batch's part added; each list is cut into as many parts as there are arrays of sums.

    ``numbers``: that of the batch, and how many live rows and columns there are.
    """
    machine, tuning = generation.machine, generation.tunings.of(call, "live_dhidden")
    matmul = Matmul(call, tuning, 1, call.vocab_dim, shares_lhs=True)
    body = functools.partial(_live_dhidden_kernel, machine, matmul, sizes)
    lists = (*work[:5], work.row_blocks, numbers)
    return update(machine, matmul, body, "lce_live_dhidden", (dlogits, weight, *lists), sums)


def _live_dhidden_kernel(
    machine: Machine,
    matmul: Matmul,
    sizes: Sizes,
    dlogits: Any,  # [slots · 128, 256]
    weight: Any,  # [V, H] or [H, V]
    order: Any,  # [tiles], and the next five: of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    sums_by_row: Any,  # [blocks · tiles]
    cells_by_row: Any,  # [blocks · tiles]
    row_blocks: Any,  # [batches · blocks]
    numbers: Any,  # [3]
    parts: Any,  # [splits, Tp, Hp] as they were
    output: Any,  # as they will be, in the same place
) -> None:
    del parts
    tile_k, cluster = matmul.tuning.tile_k, matmul.tuning.cluster
    batch = Batch.of(sizes, numbers[0], sums, cells)
    splits, _, hidden_size = output.shape
    steps_of_tile, columns = TILE_N // tile_k, hidden_size // TILE_N // cluster  # clusters lie side by side
    groups = jnp.where(batch.num_entries > 0, ceil_div(numbers[1], ROW_BLOCK), 0)  # all with a live tile

    def visit_all(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            split, index = lax.div(info.index[0], groups * columns), lax.rem(info.index[0], groups * columns)
            group, column = turning_snake_index(matmul.tuning, matmul.clusters, index, groups, columns)
            column = column * cluster + lax.axis_index("cluster")
            block = row_blocks[(numbers[0] + 1) * sizes.blocks - 1 - group]
            start, stop = (sum_before(sums_by_row, block * sizes.tiles + batch.rank + i) for i in (0, batch.num_ranks))
            every = stop - start
            per_split = lax.div(every + (splits - 1), jnp.int32(splits))
            count = jnp.clip(every - split * per_split, 0, per_split)

            def locate(number: Any) -> StepPlace:
                place = start + lax.div(number, jnp.int32(steps_of_tile))
                within = lax.rem(number, jnp.int32(steps_of_tile)) * tile_k
                rank = cells_by_row[place] - block * sizes.tiles
                slot = sums[rank * sizes.width + block] - 1 - batch.entry
                return StepPlace(slot * ROW_BLOCK, within, order[rank] * TILE_N + within)

            row, steps = block * ROW_BLOCK, count * steps_of_tile
            before = split * per_split * steps_of_tile
            return visit(Tile(row, column * TILE_N, steps, before, split=split, locate=locate), carry)

        return plgpu.nd_loop((groups * columns * splits,), collective_axes="sm", init_carry=carry)(tile)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        # No other tile of this launch adds to the same elements, so two runs are bitwise equal.
        send_product(multiply, slots, tile.row, output.at[tile.split], tile.column, True)

    slots = staging(machine, matmul, hidden_size, output.dtype)
    machine.walk_tiles(matmul, dlogits, weight, Offset(), visit_all, consume, slots)


def write_live_dweight(
    generation: Generation,
    dweight: Float[Array, "V H"],
    dlogits: Float[Array, "slots*128 256"],
    hidden: Float[Array, "T H"],
    call: Call,
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
    add: bool,
) -> Float[Array, "V H"]:
    """``dweight`` with a batch's vocabulary tiles written, or added; zeros where nothing is live."""
    machine, matmul = generation.machine, Matmul(call, generation.tunings.of(call, "live_dweight"), 0, 0)
    by_rows = call.vocab_dim == 0
    operands = (dlogits, hidden) if by_rows else (hidden, dlogits)
    lists = (work.order, work.sums, work.cells, work.ranks, numbers)
    body = functools.partial(_live_dweight_kernel, machine, matmul, sizes, by_rows, add)
    return update(machine, matmul, body, "lce_live_dweight", (*operands, *lists), dweight)


def _live_dweight_kernel(
    machine: Machine,
    matmul: Matmul,
    sizes: Sizes,
    by_rows: bool,  # whether dweight is [V, H]
    add: bool,
    lhs: Any,  # dlogits [slots · 128, 256], or hidden [T, H]: what runs down the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits
    order: Any,  # [tiles], and the next three: of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    ranks: Any,  # [tiles]
    numbers: Any,  # [3]
    dweight: Any,  # [V, H] or [H, V]; what no batch has written is in it already
    output: Any,  # the same place
) -> None:
    del dweight
    batch, tuning = Batch.of(sizes, numbers[0], sums, cells), matmul.tuning
    hidden = rhs if by_rows else lhs
    blocks_of_tile, steps_of_block = TILE_N // ROW_BLOCK, ROW_BLOCK // tuning.tile_k
    if by_rows:
        groups, columns = row_groups(matmul, batch.num_ranks * TILE_N), -(-hidden.shape[1] // TILE_N)
    else:
        groups, columns = row_groups(matmul, hidden.shape[1]), batch.num_ranks

    def visit_all(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            if by_rows:
                group, column = longest_first_index(matmul.clusters, info.index[0], groups, columns)
            else:
                column, group = longest_first_index(matmul.clusters, info.index[0], columns, groups)
            block = group * tuning.cluster + lax.axis_index("cluster")
            rank = ranks[batch.rank + (lax.div(block, jnp.int32(blocks_of_tile)) if by_rows else column)]
            part = lax.rem(block, jnp.int32(blocks_of_tile)) * ROW_BLOCK
            cell = rank * sizes.width
            entry, stop = (sum_before(sums, cell + blocks) for blocks in (0, sizes.blocks))

            def locate(number: Any) -> StepPlace:
                row_block = row_block_of(sizes, cells[entry + lax.div(number, jnp.int32(steps_of_block))])
                token = row_block * ROW_BLOCK + lax.rem(number, jnp.int32(steps_of_block)) * tuning.tile_k
                in_slots = (entry - batch.entry) * ROW_BLOCK + number * tuning.tile_k
                return StepPlace(part, in_slots, token) if by_rows else StepPlace(block * ROW_BLOCK, token, in_slots)

            steps, vocabulary_tile = (stop - entry) * steps_of_block, order[rank] * TILE_N
            row, to = (vocabulary_tile + part, column * TILE_N) if by_rows else (block * ROW_BLOCK, vocabulary_tile)
            read = column * TILE_N if by_rows else 0
            return visit(Tile(row, read, steps, written=to, locate=locate), carry)

        return plgpu.nd_loop((groups * columns,), collective_axes="sm", init_carry=carry)(tile)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        send_product(multiply, slots, tile.row, output, tile.written, add)

    slots = staging(machine, matmul, output.shape[1], output.dtype)
    machine.walk_tiles(matmul, lhs, rhs, Offset(), visit_all, consume, slots)
