"""The backward kernel: the gradient in the raw products (eqs. 4, 5) of one chunk of the vocabulary, recomputed.

The epilogue works in 64-column blocks, each rounded once to the weight's dtype and sent out through shared memory:
the whole tile at once would spill registers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic._worklist import Batch, Batches, Worklist
from lce_jax.mosaic.sm90 import _epilogue, _logits, _pipeline
from lce_jax.mosaic.sm90._hardware import ROW_BLOCK, STAGING_COLUMNS, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic.sm90._pipeline import Matmul, Tile
from lce_jax.mosaic.sm90._tuning import Tuning
from lce_jax.mosaic.sm90._vocabulary_mask import without_padding

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def dlogits(
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Case,
    tuning: Tuning,
    factors: Float[Array, "factors Tp"],
    span: Int[Array, "fields"],
    columns: int,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    ``weight`` holds the span's part at its offset. Zero on columns that are padding or do not exist; tiles after
    the span and row blocks without a live row are left unwritten.
    """
    matmul = _logits.logits(case, tuning)
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), case.dtype)
    run = _pipeline.kernel(matmul, functools.partial(_kernel, matmul), [output], "lce_dlogits")
    (result,) = run(
        prepared.hidden,
        weight,
        prepared.targets,
        prepared.scale,
        prepared.holds_target,
        prepared.mask,
        factors,
        span,
    )
    return result


def _kernel(
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]; the chunk's own part where V is no multiple of 8
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    scalars: Any,  # a `Span`
    output: Any,  # [T, columns]
) -> None:
    span, refs = Span.unpack(scalars), Refs(targets, scale, holds_target, mask, factors, output)
    first_tile = _logits.first_tile(span)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        column, number = span.column + tile.column, first_tile + tile.vocabulary_tile
        _epilogue_of_tile(matmul, refs, tile, multiply, slots, column, number, span.num_columns, tile.rows, tile.column)

    slots = _epilogue.staging(matmul, output.shape[1], output.dtype)
    _logits.walk_logits(matmul, hidden, weight, span, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def live_dlogits(
    prepared: Prepared,
    weight: Float[Array, "V H"],
    case: Case,
    tuning: Tuning,
    factors: Float[Array, "factors Tp"],
    work: Worklist,
    batches: Batches,
    batch: Int[Array, "1"],
    slots: int,
) -> Float[Array, "slots*128 256"]:
    """The same of a batch's live tiles alone, each in the slot of its entry; ``batch`` is its number."""
    matmul = _logits.logits(case, tuning)
    output = jax.ShapeDtypeStruct((slots * ROW_BLOCK, TILE_N), case.dtype)
    run = _pipeline.kernel(matmul, functools.partial(_live_kernel, matmul), [output], "lce_live_dlogits")
    per_token = (prepared.targets, prepared.scale, prepared.holds_target, prepared.mask, factors)
    (result,) = run(prepared.hidden, weight, *per_token, work.row_blocks, work.tiles, batches.scalars, batch)
    return result


def _live_kernel(
    matmul: Matmul,
    hidden: Any,  # [T, H]
    weight: Any,  # [V, H] or [H, V]
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    mask: Any,  # [512]
    factors: Any,  # [3 or 4, Tp]
    row_blocks: Any,  # [entries]
    tiles: Any,  # [entries]
    scalars: Any,  # [batches, fields], a `Batch` each
    number: Any,  # of the batch
    output: Any,  # [slots · 128, 256]
) -> None:
    batch, refs = Batch.unpack(scalars, number[0]), Refs(targets, scale, holds_target, mask, factors, output)

    def consume(tile: Tile, multiply: Any, slots: Any) -> None:
        row = tile.slot * ROW_BLOCK + lax.axis_index("wg") * WARPGROUP_ROWS
        rows, number = pl.ds(pl.multiple_of(row, WARPGROUP_ROWS), WARPGROUP_ROWS), tile.vocabulary_tile
        _epilogue_of_tile(matmul, refs, tile, multiply, slots, tile.column, number, batch.num_columns, rows, 0)

    slots = _epilogue.staging(matmul, TILE_N, output.dtype)
    _logits.walk_live_logits(matmul, hidden, weight, row_blocks, tiles, batch, consume, slots)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class Refs(NamedTuple):
    """What the epilogue reads and writes."""

    targets: Any
    scale: Any
    holds_target: Any
    mask: Any
    factors: Any
    output: Any


def _epilogue_of_tile(
    matmul: Matmul,
    refs: Refs,
    tile: Tile,
    multiply: Any,
    slots: Any,
    column: Any,  # of the tile, in the shard
    number: Any,  # of its vocabulary tile
    num_columns: Any,
    output_rows: Any,
    output_column: Any,
) -> None:
    """A warpgroup's part of a tile, from its products to the output."""
    options = matmul.case.options
    row_scale = _epilogue.load_rows(refs.scale, tile.rows)
    rows = _epilogue.load_factors(refs.factors, tile.rows)
    target = _epilogue.load_rows(refs.targets, tile.rows) - column
    holds = refs.holds_target[tile.row_block, number] > 0
    z, cap = multiply(), options.logit_softcap
    real = functools.partial(without_padding, column=column, num_columns=num_columns, mask=refs.mask)
    z = real(z) if cap is None else z
    for i in range(TILE_N // STAGING_COLUMNS):
        start = i * STAGING_COLUMNS
        block = z[:, start : start + STAGING_COLUMNS]
        if cap is not None:  # a block at a time: a second tile beside the first would spill its registers
            block = real(_epilogue.softcap(block, cap, options), start=start)
        d = _block_gradient(block, row_scale, rows)
        d = d if cap is None else d * (1.0 - block * block)
        d = _epilogue.with_target(d, rows, target - start, holds)
        _epilogue.send(d, i, slots, output_rows, refs.output, output_column + start)


def _block_gradient(x: Array, row_scale: Array, rows: RowFactors) -> Array:
    """Eq. 4 on a block of columns, but for the label. u has the bits of the forward's (`_statistics._sums`)."""
    along = functools.partial(_epilogue.along_rows, columns=STAGING_COLUMNS)
    u = (x - along(rows.max)) * along(row_scale)
    e = jnp.exp2(u)
    d = along(rows.constant) * e
    return d if rows.slope is None else d + along(rows.slope) * (u * e)
