"""The two products of a chunk of dlogits. The kernels themselves slice the operands, and add to the sum.

    dhidden += dlogits · weight[chunk]          dweight[chunk] = dlogitsᵀ · hidden

XLA would copy the chunk of the weight before its product, and the chunk of dweight after its product. The kernels read
and write both in place. The contraction ends at the last unpadded column or unmasked row, known only at run time.

With a ``gradient_threshold``, a batch of active tiles has the same two products, each contracted over lists:

    dhidden[row block] += Σ dlogits[slot] · weight[tile]          over the row block's active vocabulary tiles
    dweight[tile]       = Σ dlogits[slot]ᵀ · hidden[row block]    over the vocabulary tile's active row blocks

The steps of such a contraction run through the list, and the memory warpgroup looks up the operands of each step. The
slots of one vocabulary tile are adjacent.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._operands import Span
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._threshold_tiles import Batch, Sizes, Worklist, find_row_block, sum_before
from lce_jax.mosaic.common._epilogue_steps import make_staging, send_product
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
    """Computes dlogits · weight over the span's first ``depth`` columns, and writes it to ``sums`` or adds it there.

    The contraction is split, with one array of ``sums`` for each split.
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
    sums: Any,  # [splits, Tp, Hp]
    output: Any,  # the same memory as ``sums``
) -> None:
    del sums
    span = Span.unpack(scalars)
    splits, columns = output.shape[0], -(-matmul.call.hidden_size // matmul.tuning.tile_n)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        # No other tile of this launch adds to the same elements, so the result is deterministic.
        send_product(multiply, slots, tile.row, output.at[tile.split], tile.column, span.adds)

    slots = make_staging(machine, matmul, output.shape[2], output.dtype)
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
    """Writes the span's dlogitsᵀ · hidden to ``dweight``, or adds it if ``may_add`` and `Span.adds_dweight`."""
    machine, matmul = generation.machine, Matmul(call, generation.tunings.of(call, "dweight"), 0, 0)
    lhs, rhs = (dlogits, hidden) if call.vocab_dim == 0 else (hidden, dlogits)
    body = functools.partial(_dweight_kernel, machine, matmul, may_add)
    return update(machine, matmul, body, "lce_dweight", (lhs, rhs, span), dweight)


def _dweight_kernel(
    machine: Machine,
    matmul: Matmul,
    may_add: bool,
    lhs: Any,  # dlogits [T, columns], or hidden [T, H]: the operand of the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits [T, columns]
    scalars: Any,  # a `Span`
    dweight: Any,  # [V, H] or [H, V], of all chunks
    output: Any,  # the same memory as ``dweight``
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

    slots = make_staging(machine, matmul, output.shape[1], output.dtype)
    num_steps = ceil_div(span.num_rows, matmul.tuning.tile_k)
    visit_all = functools.partial(_visit_all, matmul, groups, columns, 1, num_steps)
    machine.walk_tiles(matmul, lhs, rhs, Offset(), visit_all, consume, slots)


def update(machine: Machine, matmul: Matmul, body: Any, name: str, operands: tuple[Array, ...], result: Array) -> Array:
    """Runs ``body`` as a kernel that updates ``result`` in place."""
    outputs = [jax.ShapeDtypeStruct(result.shape, result.dtype)]
    run = machine.kernel(matmul, body, outputs, name, updated={len(operands): 0})
    return run(*operands, result)[0]


def _visit_all(matmul: Matmul, groups: Any, columns: int, splits: int, num_steps: Any, visit: Visit, carry: Any) -> Any:
    """Visits every tile of the result ``splits`` times: once for each split of the contraction."""
    area, per_split = groups * columns, ceil_div(num_steps, splits)

    def tile(info: Any, carry: Any) -> Any:
        split = lax.div(info.index[0], area)
        group, column = snake_index(matmul.tuning, lax.rem(info.index[0], area), groups, columns)
        row_block = group * matmul.tuning.cluster + lax.axis_index("cluster")
        first = split * per_split
        count = jnp.clip(num_steps - first, 0, per_split)
        return visit(Tile(row_block * ROW_BLOCK, column * matmul.tuning.tile_n, count, first, split=split), carry)

    return plgpu.nd_loop((area * splits,), collective_axes="sm", init_carry=carry)(tile)


def update_active_dhidden(
    generation: Generation,
    sums: Float[Array, "splits Tp Hp"],
    dlogits: Float[Array, "slots*128 256"],
    weight: Float[Array, "V H"],
    call: Call,
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
) -> Float[Array, "splits Tp Hp"]:
    """Adds a batch's part of dhidden to ``sums``. Each list is split, with one array of ``sums`` for each split.

    ``numbers``: the number of the batch, how many rows are unmasked, and how many columns are not padding.
    """
    machine, tuning = generation.machine, generation.tunings.of(call, "active_dhidden")
    matmul = Matmul(call, tuning, 1, call.vocab_dim, shares_lhs=True)
    body = functools.partial(_active_dhidden_kernel, machine, matmul, sizes)
    lists = (*work[:5], work.row_blocks, numbers)
    return update(machine, matmul, body, "lce_active_dhidden", (dlogits, weight, *lists), sums)


def _active_dhidden_kernel(
    machine: Machine,
    matmul: Matmul,
    sizes: Sizes,
    dlogits: Any,  # [slots · 128, 256]
    weight: Any,  # [V, H] or [H, V]
    order: Any,  # [tiles]; this and the next five are fields of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    sums_by_row: Any,  # [blocks · tiles]
    cells_by_row: Any,  # [blocks · tiles]
    row_blocks: Any,  # [batches · blocks]
    numbers: Any,  # [3]
    parts: Any,  # [splits, Tp, Hp]
    output: Any,  # the same memory as ``parts``
) -> None:
    del parts
    tile_k, cluster = matmul.tuning.tile_k, matmul.tuning.cluster
    batch = Batch.of(sizes, numbers[0], sums, cells)
    splits, _, hidden_size = output.shape
    steps_of_tile = TILE_N // tile_k
    columns = hidden_size // TILE_N // cluster  # the blocks of a cluster lie side by side
    # The kernel visits all unmasked row blocks if the batch has any entry.
    groups = jnp.where(batch.num_entries > 0, ceil_div(numbers[1], ROW_BLOCK), 0)

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
        # No other tile of this launch adds to the same elements, so the result is deterministic.
        send_product(multiply, slots, tile.row, output.at[tile.split], tile.column, True)

    slots = make_staging(machine, matmul, hidden_size, output.dtype)
    machine.walk_tiles(matmul, dlogits, weight, Offset(), visit_all, consume, slots)


def write_active_dweight(
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
    """Writes a batch's tiles of dweight, or adds them if ``add``. Tiles without an active row block get zeros."""
    machine, matmul = generation.machine, Matmul(call, generation.tunings.of(call, "active_dweight"), 0, 0)
    by_rows = call.vocab_dim == 0
    operands = (dlogits, hidden) if by_rows else (hidden, dlogits)
    lists = (work.order, work.sums, work.cells, work.ranks, numbers)
    body = functools.partial(_active_dweight_kernel, machine, matmul, sizes, by_rows, add)
    return update(machine, matmul, body, "lce_active_dweight", (*operands, *lists), dweight)


def _active_dweight_kernel(
    machine: Machine,
    matmul: Matmul,
    sizes: Sizes,
    by_rows: bool,  # whether dweight is [V, H]
    add: bool,
    lhs: Any,  # dlogits [slots · 128, 256], or hidden [T, H]: the operand of the rows of dweight
    rhs: Any,  # hidden [T, H], or dlogits
    order: Any,  # [tiles]; this and the next three are fields of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    ranks: Any,  # [tiles]
    numbers: Any,  # [3]
    dweight: Any,  # [V, H] or [H, V], of all batches
    output: Any,  # the same memory as ``dweight``
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
                row_block = find_row_block(sizes, cells[entry + lax.div(number, jnp.int32(steps_of_block))])
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

    slots = make_staging(machine, matmul, output.shape[1], output.dtype)
    machine.walk_tiles(matmul, lhs, rhs, Offset(), visit_all, consume, slots)
