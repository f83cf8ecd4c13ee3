"""Kernels of the backward that recompute logits, and turn them into gradients with respect to the raw products.

For one head they compute eqs. 4 and 5 in all tiles or in the active tiles; for two heads, eqs. 8 and 10 in all tiles.

An epilogue works on blocks of 64 columns, because a whole tile at once would spill registers. Each block is rounded
once to the weight's dtype, and stored through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._kl import Direction, KLCoefficients
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._operands import KLOperands, Prepared, Span
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic._threshold_tiles import Batch, Sizes, Worklist
from lce_jax.mosaic.common import _heads, _logits
from lce_jax.mosaic.common._epilogue_steps import (
    ACCUMULATOR,
    TokenRows,
    make_staging,
    mask_padding,
    send,
    warpgroup_rows,
)
from lce_jax.mosaic.common._heads import (
    BLOCKS,
    RATIOS,
    STRIP,
    HeldTile,
    Hold,
    KLRefs,
    KLWhere,
    MixtureRows,
    Multiply,
    along,
    compute_x,
    load_fields,
    multiply_exp2,
    scale_difference,
    skip_padding,
    take_block,
    take_strip,
)
from lce_jax.mosaic.common._logits import apply_softcap, differentiate_softcap
from lce_jax.mosaic.common._tiles import ROW_BLOCK, STAGING_COLUMNS, TILE_N, Matmul, Tile, multiple_of
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


def dlogits(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    call: Call,
    factors: Float[Array, "factors Tp"],
    span: Int[Array, "fields"],
    columns: int,
    adapter: Float[Array, "V R"] | None = None,
    memory: Float[Array, "T columns"] | None = None,
) -> Float[Array, "T columns"]:
    """Computes the dlogits of the tiles in ``span``: gradients with respect to raw products, in the weight's dtype.

    The result has ``columns`` columns, of which the span's tiles fill the first.

    ``weight``, and the B of an ``adapter``, hold the span's columns from its offset on. Padding columns get zeros.
    Tiles after the span, and row blocks without an unmasked row, are not written. The result overwrites ``memory``, if
    given.
    """
    machine, matmul = generation.machine, _logits.make_matmul(call, generation.tunings.of(call, "dlogits"))
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), call.dtype)
    optional = [x for x in (prepared.floor, adapter) if x is not None]
    per_token = prepared.targets, prepared.row_scale, prepared.holds_target, prepared.mask, factors
    operands = [prepared.hidden, weight, *per_token, span, *optional]
    body, updated = functools.partial(_kernel, machine, matmul), None if memory is None else {len(operands): 0}
    run = machine.kernel(matmul, body, [output], "lce_dlogits", updated=updated)
    return run(*operands, *([] if memory is None else [memory]))[0]


def _kernel(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; a copy of the chunk's part if V is not a multiple of 8
    targets: Any,  # [Tp]
    row_scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # a `Span`
    *refs: Any,  # the floor, B and the memory of the output, each if any; then the output [T, columns]
) -> None:
    *optional, output = refs
    num_floors, num_adapters = int(matmul.call.has_floor), int(matmul.call.rank > 0)
    floor, adapter = optional[:num_floors], optional[num_floors : num_floors + num_adapters]
    span, tile_refs = Span.unpack(scalars), DlogitsRefs(targets, row_scale, holds_target, mask, factors, output, *floor)
    first_tile = _logits.first_tile(span)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        column, number = span.column + tile.column, first_tile + tile.vocabulary_tile
        where = DlogitsWhere(column, number, span.num_columns, tile.row, tile.column)
        write_dlogits(matmul.call, tile_refs, tile, where, multiply, slots)

    slots = make_staging(machine, matmul, output.shape[1], output.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *adapter)


def active_dlogits(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    call: Call,
    factors: Float[Array, "factors Tp"],
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
) -> Float[Array, "slots*128 256"]:
    """Like `dlogits`, but for the active tiles of one batch. Each tile is written to the slot of its entry.

    ``numbers``: the number of the batch, how many rows are unmasked, and how many columns are not padding.
    """
    machine, matmul = generation.machine, _logits.make_matmul(call, generation.tunings.of(call, "dlogits"))
    output = jax.ShapeDtypeStruct((sizes.slots * ROW_BLOCK, TILE_N), call.dtype)
    run = machine.kernel(
        matmul, functools.partial(_active_kernel, machine, matmul, sizes), [output], "lce_active_dlogits"
    )
    per_token = (prepared.targets, prepared.row_scale, prepared.holds_target, prepared.mask, factors)
    floor = [] if prepared.floor is None else [prepared.floor]
    (result,) = run(prepared.hidden, weight, *per_token, work.order, work.sums, work.cells, numbers, *floor)
    return result


def _active_kernel(
    machine: Machine,
    matmul: Matmul,
    sizes: Sizes,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,  # [Tp]
    row_scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    order: Any,  # [tiles]; this and the next two are fields of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    numbers: Any,  # [3]
    *floor_and_output: Any,  # the floor [Tp], if there is one, and the output [slots · 128, 256]
) -> None:
    *floor, output = floor_and_output
    batch, num_columns = Batch.of(sizes, numbers[0], sums, cells), numbers[2]
    refs = DlogitsRefs(targets, row_scale, holds_target, mask, factors, output, *floor)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        where = DlogitsWhere(tile.column, tile.vocabulary_tile, num_columns, tile.slot * ROW_BLOCK, 0)
        write_dlogits(matmul.call, refs, tile, where, multiply, slots)

    slots = make_staging(machine, matmul, TILE_N, output.dtype)
    _logits.walk_active_logits(machine, matmul, hidden, weight, cells, order, sizes, batch, consume, slots)


class DlogitsRefs(NamedTuple):
    """The arrays that the epilogue reads and writes."""

    targets: Any
    row_scale: Any
    holds_target: Any
    mask: Any
    factors: Any
    output: Any
    floor: Any = None


class DlogitsWhere(NamedTuple):
    """The place of a tile, and of its gradients."""

    column: Any  # the tile's first column in the shard
    number: Any  # the tile's number in the shard
    num_columns: Any  # how many columns of the shard are not padding
    output_row: Any
    output_column: Any


def write_dlogits(call: Call, refs: DlogitsRefs, tile: Tile, where: DlogitsWhere, multiply: Any, slots: Any) -> None:
    """Computes the gradients of a warpgroup's part of a tile from its products (eqs. 4, 5), and stores them."""
    output_rows, rows = warpgroup_rows(where.output_row), TokenRows(refs, tile, where)
    row_scale, factors = rows.load_scale(), ACCUMULATOR.load_factors(refs.factors, rows.place())
    target, holds, floor = rows.load_target(), rows.holds_target(), rows.load_floor()
    for i, x in enumerate(_compute_x(call, multiply(), refs, where)):
        start = i * STAGING_COLUMNS
        x = ACCUMULATOR.apply_floor(x, floor)
        d = ACCUMULATOR.gradient(x, row_scale, factors)
        d = differentiate_softcap(call, d, x)
        d = ACCUMULATOR.put_target(d, factors, target - start, holds)
        send(d, i, slots, output_rows, refs.output, where.output_column + start)


def _compute_x(
    call: Call, z: Float[Array, "64 256"], refs: DlogitsRefs, where: DlogitsWhere
) -> Iterator[Float[Array, "64 64"]]:
    """Yields the x of eq. 0 block by block, with padding marked.

    A softcap is applied to each block when it is needed, because a second tile would spill registers.
    """
    mask = functools.partial(mask_padding, column=where.column, num_columns=where.num_columns, mask=refs.mask)
    has_cap = call.logit_softcap is not None
    z = z if has_cap else mask(z)
    for i in range(BLOCKS):
        block = take_block(z, i)
        yield mask(apply_softcap(call, block), start=i * STAGING_COLUMNS) if has_cap else block


def kl_dlogits(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
    memory: Float[Array, "Tp columns"] | None = None,
) -> Float[Array, "Tp columns"]:
    """Computes the student's dlogits (eq. 8 or 10) of the span's tiles, in the dtype of the student's weight.

    The result has ``columns`` columns, of which the span's tiles fill the first.

    ``factors`` are the `KLCoefficients` in base 2, where u_p - v_q is log2 e times its value in eq. 8. For "jsd" and
    "tv" they are the `MixtureFactors`. Padding columns get zeros. Tiles after the span, and row blocks without an
    unmasked row, are not written. The result overwrites ``memory``, if given.
    """
    machine, matmuls = generation.machine, _heads.make_matmuls(calls, generation.tunings.of(calls[0], "kl_dlogits"))
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), calls[0].dtype)  # whole tiles
    body = functools.partial(_kl_kernel, machine, matmuls, direction)
    arrays = [*_heads.pack_operands(operands, span), factors]
    updated = None if memory is None else {len(arrays): 0}
    run = machine.kernel_of_heads(matmuls[0], body, [output], "lce_kl_dlogits", updated=updated)
    return run(*arrays, *([] if memory is None else [memory]))[0]


def _kl_kernel(machine: Machine, matmuls: tuple[Matmul, Matmul], direction: Direction, *refs: Any) -> None:
    *arrays, row_scales, mask, scalars, (factors, *_, output, held) = _heads.unpack_refs(refs)  # _: the output's memory
    span = Span.unpack(scalars)
    tile_refs = KLRefs(_heads.make_head_operands(matmuls, row_scales), mask, output, factors)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, None, span.num_columns)
        write_kl_dlogits(tile_refs, direction, tile, where, multiply, functools.partial(machine.hold, held))

    _heads.walk_heads(machine, matmuls, arrays, span, consume, held)


def write_kl_dlogits(
    refs: KLRefs, direction: Direction, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """Computes the gradients of a warpgroup's part of a tile from both products, and stores them."""
    rows = functools.partial(warpgroup_rows, tile.row)
    p, q = refs.heads
    held = hold(compute_x(p.call, multiply[0](), refs.mask, where))
    x = compute_x(q.call, multiply[1](), refs.mask, where)
    gradient = (
        _mixture_gradient(refs, direction, rows, where)
        if direction in RATIOS
        else _kl_gradient(refs, rows, direction == "reverse")
    )
    for i in range(BLOCKS):
        d = gradient(held, x, i)
        column = tile.column + i * STAGING_COLUMNS
        # Registers are stored directly, because shared memory is better used for another stage (`sm90._tuning`).
        columns = pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)
        _pallas.store(refs.output.at[rows(), columns], d.astype(refs.output.dtype))


type Gradient = Callable[[HeldTile, Array, int], Array]  # (held tile of p, x of q, number of a block) -> [64, 64]


def _kl_gradient(refs: KLRefs, rows: Callable[[], Any], reverse: bool) -> Gradient:
    """Returns the function that computes eq. 8 on a block, in base 2, times the softcap's derivative."""
    p, q = refs.heads
    factors = load_fields(KLCoefficients, refs.factors, lambda ref: ACCUMULATOR.load_rows(ref, rows()))
    row_scales = ACCUMULATOR.load_rows(p.row_scale, rows()), ACCUMULATOR.load_rows(q.row_scale, rows())

    def compute_block(held: HeldTile, x: Array, i: int) -> Array:
        both = held.block(i), take_block(x, i)
        d = _block_gradient(both, row_scales, factors, reverse)
        return differentiate_softcap((p if reverse else q).call, d, both[0] if reverse else both[1])

    return compute_block


def _mixture_gradient(refs: KLRefs, direction: Direction, rows: Callable[[], Any], where: KLWhere) -> Gradient:
    """Returns the function that computes eq. 10 on a block, in base 2, times the softcap's derivative."""

    def compute_strip(held: HeldTile, column: int, x: Array) -> Array:
        x_p = held.strip(column)
        strip_rows = MixtureRows(refs, rows)
        ratios = RATIOS[direction].of((x_p, x), strip_rows)
        factor_p, mean = strip_rows.load("factor_p", "mean")
        d = multiply_exp2(ratios.u_p, factor_p * (ratios.slope - mean))
        return differentiate_softcap(refs.heads[0].call, d, x_p)

    def compute_block(held: HeldTile, x: Array, i: int) -> Array:
        first = i * STAGING_COLUMNS
        strips = [
            skip_padding(
                where, column, functools.partial(compute_strip, held, column), jnp.zeros_like, take_strip(x, column)
            )
            for column in range(first, first + STAGING_COLUMNS, STRIP)
        ]
        return jnp.concatenate(strips, axis=1)

    return compute_block


def _block_gradient(
    x: tuple[Array, Array], row_scales: tuple[Array, Array], rows: KLCoefficients, reverse: bool
) -> Float[Array, "64 n"]:
    """Computes eq. 8 on a block in base 2, like `lce_jax.mathematics._kl.dlogits`."""
    u_p = jnp.minimum(scale_difference(x[0], rows.max_p, row_scales[0]), 0.0)
    e_p = jnp.exp2(u_p)
    if reverse:
        distance = u_p - scale_difference(x[1], rows.at_p, row_scales[1]) - along(rows.mean)
        return jnp.where(e_p > 0.0, e_p * along(rows.factor_p) * distance, 0.0)
    u_q = jnp.minimum(scale_difference(x[1], rows.max_q, row_scales[1]), 0.0)
    return jnp.exp2(u_q) * along(rows.factor_q) - e_p * along(rows.factor_p)
