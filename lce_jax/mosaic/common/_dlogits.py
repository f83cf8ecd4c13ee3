"""The backward's kernels: the gradient in the raw products of one chunk of the vocabulary, recomputed.

Of one head by eqs. 4 and 5, for all tiles or the live ones; of two by eqs. 8 and 10.

An epilogue works in 64-column blocks, each rounded once to the weight's dtype and sent out through shared memory:
the whole tile at once would spill registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._kl import Direction, KLCoefficients
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._live_tiles import Batch, Sizes, Worklist
from lce_jax.mosaic._operands import KLOperands, Prepared, Span
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common import _heads, _logits
from lce_jax.mosaic.common._epilogue import HELD, rows_of, send, staging, without_padding
from lce_jax.mosaic.common._heads import (
    BLOCKS,
    STRIP,
    HeldTile,
    Hold,
    KLRefs,
    KLWhere,
    MixtureRatios,
    Multiply,
    along,
    block_of,
    load_fields,
    load_mixture_factors,
    relative,
    strip_of,
    times_exp2,
    unless_padding,
    x_of,
)
from lce_jax.mosaic.common._logits import softcap
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
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    ``weight`` holds the span's part at its offset, and so does ``adapter``, B of an adapter. Zero on columns that
    are padding or do not exist; tiles after the span and row blocks without a live row are left unwritten.
    """
    machine, matmul = generation.machine, _logits.logits(call, generation.tunings.of(call, "dlogits"))
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), call.dtype)
    run = machine.kernel(matmul, functools.partial(_kernel, machine, matmul), [output], "lce_dlogits")
    (result,) = run(
        prepared.hidden,
        weight,
        prepared.targets,
        prepared.row_scale,
        prepared.holds_target,
        prepared.mask,
        factors,
        span,
        *[x for x in (prepared.floor, adapter) if x is not None],
    )
    return result


def _kernel(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; the chunk's own part where V is no multiple of 8
    targets: Any,  # [Tp]
    row_scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # a `Span`
    *refs_of_case: Any,  # the floor and B, if any, and [T, columns]
) -> None:
    *given, output = refs_of_case
    floor, adapter = given[: matmul.call.has_floor], given[matmul.call.has_floor :]
    span, refs = Span.unpack(scalars), DlogitsRefs(targets, row_scale, holds_target, mask, factors, output, *floor)
    first_tile = _logits.first_tile(span)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        column, number = span.column + tile.column, first_tile + tile.vocabulary_tile
        where = DlogitsWhere(column, number, span.num_columns, tile.row, tile.column)
        write_dlogits(matmul.call, refs, tile, where, multiply, slots)

    slots = staging(machine, matmul, output.shape[1], output.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *adapter)


def live_dlogits(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    call: Call,
    factors: Float[Array, "factors Tp"],
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
) -> Float[Array, "slots*128 256"]:
    """The same of a batch's live tiles alone, each in the slot of its entry.

    ``numbers``: that of the batch, and how many live rows and columns there are.
    """
    machine, matmul = generation.machine, _logits.logits(call, generation.tunings.of(call, "dlogits"))
    output = jax.ShapeDtypeStruct((sizes.slots * ROW_BLOCK, TILE_N), call.dtype)
    run = machine.kernel(matmul, functools.partial(_live_kernel, machine, matmul, sizes), [output], "lce_live_dlogits")
    per_token = (prepared.targets, prepared.row_scale, prepared.holds_target, prepared.mask, factors)
    floor = [] if prepared.floor is None else [prepared.floor]
    (result,) = run(prepared.hidden, weight, *per_token, work.order, work.sums, work.cells, numbers, *floor)
    return result


def _live_kernel(
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
    order: Any,  # [tiles], and the next two: of a `Worklist`
    sums: Any,  # [tiles · width]
    cells: Any,  # [entries]
    numbers: Any,  # [3]
    *floor_and_output: Any,  # [Tp] if there is a floor, and [slots · 128, 256]
) -> None:
    *floor, output = floor_and_output
    batch, num_columns = Batch.of(sizes, numbers[0], sums, cells), numbers[2]
    refs = DlogitsRefs(targets, row_scale, holds_target, mask, factors, output, *floor)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        where = DlogitsWhere(tile.column, tile.vocabulary_tile, num_columns, tile.slot * ROW_BLOCK, 0)
        write_dlogits(matmul.call, refs, tile, where, multiply, slots)

    slots = staging(machine, matmul, TILE_N, output.dtype)
    _logits.walk_live_logits(machine, matmul, hidden, weight, cells, order, sizes, batch, consume, slots)


class DlogitsRefs(NamedTuple):
    """What the epilogue reads and writes."""

    targets: Any
    row_scale: Any
    holds_target: Any
    mask: Any
    factors: Any
    output: Any
    floor: Any = None


class DlogitsWhere(NamedTuple):
    """Where a tile lies, and where its gradient goes."""

    column: Any  # its first one, in the shard
    number: Any  # in the shard
    num_columns: Any  # live ones of the shard
    output_row: Any
    output_column: Any


def write_dlogits(call: Call, refs: DlogitsRefs, tile: Tile, where: DlogitsWhere, multiply: Any, slots: Any) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    output_rows, cap = rows_of(where.output_row), call.logit_softcap
    row_scale = HELD.load_rows(refs.row_scale, rows_of(tile.row))
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
            block = real(softcap(block, cap, call), start=start)
        block = HELD.reaching(block, floor)
        d = HELD.gradient(block, row_scale, rows)
        d = d if cap is None else d * (1.0 - block * block)
        d = HELD.with_target(d, rows, target - start, holds)
        send(d, i, slots, output_rows, refs.output, where.output_column + start)


def kl_dlogits(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
) -> Float[Array, "Tp columns"]:
    """Eq. 8 or 10 in the student's raw products, in its weight's dtype, at the beginning of ``columns``.

    ``factors`` are the `KLCoefficients` in base 2, where u_p - v_q is log2 e times that of eq. 8, or of "jsd" the
    `MixtureFactors`. Zero on columns that are padding or do not exist; tiles after the span and row blocks without a
    live row are left unwritten.
    """
    machine, matmuls = generation.machine, _heads.make_matmuls(calls, generation.tunings.of(calls[0], "kl_dlogits"))
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), calls[0].dtype)  # whole tiles
    body = functools.partial(_kl_kernel, machine, matmuls, direction)
    run = machine.kernel_of_heads(matmuls[0], body, [output], "lce_kl_dlogits")
    return run(*_heads.pack_operands(operands, span), factors)[0]


def _kl_kernel(machine: Machine, matmuls: tuple[Matmul, Matmul], direction: Direction, *refs: Any) -> None:
    *arrays, row_scales, mask, scalars, (factors, output, held) = _heads.unpack_refs(refs)
    span = Span.unpack(scalars)
    of_kernel = KLRefs(_heads.make_head_operands(matmuls, row_scales), mask, output, factors)

    def consume(tile: Tile, multiply: Multiply, held: Any) -> None:
        where = KLWhere(span.column + tile.column, None, span.num_columns)
        write_kl_dlogits(of_kernel, direction, tile, where, multiply, functools.partial(machine.hold, held))

    _heads.walk_heads(machine, matmuls, arrays, span, consume, held)


def write_kl_dlogits(
    refs: KLRefs, direction: Direction, tile: Tile, where: KLWhere, multiply: Multiply, hold: Hold
) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    rows = functools.partial(rows_of, tile.row)
    p, q = refs.heads
    held = hold(x_of(p.call, multiply[0](), refs.mask, where))
    x = x_of(q.call, multiply[1](), refs.mask, where)
    gradient = (
        _mixture_gradient(refs, rows, where) if direction == "jsd" else _kl_gradient(refs, rows, direction == "reverse")
    )
    for i in range(BLOCKS):
        d = gradient(held, x, i)
        column = tile.column + i * STAGING_COLUMNS
        # Without a slot of shared memory, where a stage of the products does more (`sm90._tuning`).
        columns = pl.ds(multiple_of(column, STAGING_COLUMNS), STAGING_COLUMNS)
        _pallas.store(refs.output.at[rows(), columns], d.astype(refs.output.dtype))


type Gradient = Callable[[HeldTile, Array, int], Array]  # [64, 64], of a block by its number


def _kl_gradient(refs: KLRefs, rows: Callable[[], Any], reverse: bool) -> Gradient:
    """`lce_jax.mathematics._kl.dlogits` in base 2, and the cap's derivative."""
    p, q = refs.heads
    factors = load_fields(KLCoefficients, refs.factors, lambda ref: HELD.load_rows(ref, rows()))
    row_scales = HELD.load_rows(p.row_scale, rows()), HELD.load_rows(q.row_scale, rows())

    def of_block(held: HeldTile, x: Array, i: int) -> Array:
        both = held.block(i), block_of(x, i)
        d = _block_gradient(both, row_scales, factors, reverse)
        return _through_cap((p if reverse else q).call, d, both[0] if reverse else both[1])

    return of_block


def _mixture_gradient(refs: KLRefs, rows: Callable[[], Any], where: KLWhere) -> Gradient:
    """`lce_jax.mathematics._kl.dlogits` in base 2, and the cap's derivative."""

    def of_strip(held: HeldTile, column: int, x: Array) -> Array:
        x_p = held.strip(column)
        factors, row_scales = load_mixture_factors(refs, rows)
        own = MixtureRatios.of((x_p, x), row_scales, factors)
        d = times_exp2(own.u_p, factors.factor_p * (own.of_p - factors.mean))
        return _through_cap(refs.heads[0].call, d, x_p)

    def of_block(held: HeldTile, x: Array, i: int) -> Array:
        first = i * STAGING_COLUMNS
        strips = [
            unless_padding(
                where, column, functools.partial(of_strip, held, column), jnp.zeros_like, strip_of(x, column)
            )
            for column in range(first, first + STAGING_COLUMNS, STRIP)
        ]
        return jnp.concatenate(strips, axis=1)

    return of_block


def _through_cap(call: Call, d: Float[Array, "64 n"], x: Float[Array, "64 n"]) -> Float[Array, "64 n"]:
    """In the raw products."""
    return d if call.logit_softcap is None else d * (1.0 - x * x)


def _block_gradient(
    x: tuple[Array, Array], row_scales: tuple[Array, Array], rows: KLCoefficients, reverse: bool
) -> Float[Array, "64 n"]:
    """`lce_jax.mathematics._kl.dlogits` of a block, in base 2."""
    u_p = jnp.minimum(relative(x[0], rows.max_p, row_scales[0]), 0.0)
    e_p = jnp.exp2(u_p)
    if reverse:
        distance = u_p - relative(x[1], rows.at_p, row_scales[1]) - along(rows.mean)
        return jnp.where(e_p > 0.0, e_p * along(rows.factor_p) * distance, 0.0)
    u_q = jnp.minimum(relative(x[1], rows.max_q, row_scales[1]), 0.0)
    return jnp.exp2(u_q) * along(rows.factor_q) - e_p * along(rows.factor_p)
