"""The backward kernel: the gradient in the raw products (eqs. 4, 5) of one chunk of the vocabulary, recomputed.

An epilogue works in 64-column blocks, each rounded once to the weight's dtype and sent out through shared memory:
the whole tile at once would spill registers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from lce_jax.mosaic._call import Generation, Machine
from lce_jax.mosaic._live_tiles import Batch, Sizes, Worklist
from lce_jax.mosaic._operands import Prepared, Span
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N, Matmul, Tile
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


def dlogits(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Call,
    factors: Float[Array, "factors Tp"],
    span: Int[Array, "fields"],
    columns: int,
    beside: Float[Array, "V R"] | None = None,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    ``weight`` holds the span's part at its offset, and so does the B of an adapter ``beside`` it. Zero on columns that
    are padding or do not exist; tiles after the span and row blocks without a live row are left unwritten.
    """
    machine, matmul = generation.machine, _logits.logits(case, generation.tunings.of(case, "dlogits"))
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), case.dtype)
    run = machine.kernel(matmul, functools.partial(_kernel, machine, matmul), [output], "lce_dlogits")
    (result,) = run(
        prepared.hidden,
        weight,
        prepared.targets,
        prepared.scale,
        prepared.holds_target,
        prepared.mask,
        factors,
        span,
        *[x for x in (prepared.floor, beside) if x is not None],
    )
    return result


def _kernel(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; the chunk's own part where V is no multiple of 8
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # a `Span`
    *refs_of_case: Any,  # the floor and B, if any, and [T, columns]
) -> None:
    *given, output = refs_of_case
    floor, beside = given[: matmul.case.has_floor], given[matmul.case.has_floor :]
    span, refs = Span.unpack(scalars), DlogitsRefs(targets, scale, holds_target, mask, factors, output, *floor)
    first_tile = _logits.first_tile(span)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        column, number = span.column + tile.column, first_tile + tile.vocabulary_tile
        where = DlogitsWhere(column, number, span.num_columns, tile.row, tile.column)
        machine.dlogits(matmul.case, refs, tile, where, multiply, slots)

    slots = machine.staging(matmul, output.shape[1], output.dtype)
    _logits.walk_logits(machine, matmul, hidden, weight, span, consume, slots, *beside)


def live_dlogits(
    generation: Generation,
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Call,
    factors: Float[Array, "factors Tp"],
    work: Worklist,
    sizes: Sizes,
    numbers: Int[Array, "3"],
) -> Float[Array, "slots*128 256"]:
    """The same of a batch's live tiles alone, each in the slot of its entry.

    ``numbers``: that of the batch, and how many live rows and columns there are.
    """
    machine, matmul = generation.machine, _logits.logits(case, generation.tunings.of(case, "dlogits"))
    output = jax.ShapeDtypeStruct((sizes.slots * ROW_BLOCK, TILE_N), case.dtype)
    run = machine.kernel(matmul, functools.partial(_live_kernel, machine, matmul, sizes), [output], "lce_live_dlogits")
    per_token = (prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, factors)
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
    scale: Any,  # [Tp]
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
    refs = DlogitsRefs(targets, scale, holds_target, mask, factors, output, *floor)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        where = DlogitsWhere(tile.column, tile.vocabulary_tile, num_columns, tile.slot * ROW_BLOCK, 0)
        machine.dlogits(matmul.case, refs, tile, where, multiply, slots)

    slots = machine.staging(matmul, TILE_N, output.dtype)
    _logits.walk_live_logits(machine, matmul, hidden, weight, cells, order, sizes, batch, consume, slots)


class DlogitsRefs(NamedTuple):
    """What the epilogue reads and writes."""

    targets: Any
    scale: Any
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
