"""The kernel that selects the active tiles of a ``gradient_threshold``: a thread per token, a few tiles at a time.

select   the tiles' maxima, the merged statistics   ->  the active tiles; the probability in the others, in parts
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._operands import FLOOR, LOG2E, make_geometry
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N, TILING, active_tiles_shape
from lce_jax.mosaic.common._tokens import THREADS, block_rows, kernel, mask_to_int, on_all_threads, thread_numbers
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

TILES = 16  # how many tiles a block reads; their loads overlap


def select(
    call: Call,
    maxima: Float[Array, "tiles saved Tp"],
    targets: Int[Array, "Tp"],
    row_scale: Float[Array, "Tp"],
    merged: Float[Array, "n"],
    field: int,
    numbers: Int[Array, "3"],
    candidate_tiles: Int[Array, "tiles blocks"] | None = None,
) -> tuple[Int[Array, "tiles blocks"], Float[Array, "parts Tp"] | None]:
    """Returns 1 for each active tile, and the probability in the other tiles, summed over groups of tiles.

    Args:
        call: the shard's call.
        maxima: each tile's largest x, and its sum of exponentials if the probabilities are requested.
        targets: the labels' columns in the shard, -1 for labels of other shards.
        row_scale: the k of eq. 0 in base 2.
        merged: a flat array; its fields ``field`` and ``field + 1`` are the maximum and the sum of the whole
            vocabulary. Full row blocks are read, so another field must follow these two, or they must be padded.
        field: the number of the field with the maximum.
        numbers: the number of rows, the stride of fields, and a tile that is always active, or -1.
        candidate_tiles: 1 for each tile that holds a candidate; None if the call has no candidates.
    """
    shape = make_geometry(call, TILING)
    outputs, parts = [jax.ShapeDtypeStruct(active_tiles_shape(call), jnp.int32)], -(-shape.num_tiles // TILES)
    if maxima.shape[1] > 1:
        outputs.append(jax.ShapeDtypeStruct((parts, shape.padded_tokens), jnp.float32))
    body = functools.partial(_select, call, field, candidate_tiles is not None)
    run = kernel(body, outputs, "lce_select", {"part": parts, "rows": shape.row_blocks})
    active, *masses = run(
        maxima, targets, row_scale, merged, numbers, *([] if candidate_tiles is None else [candidate_tiles])
    )
    return active, masses[0] if masses else None


def _select(
    call: Call,
    field: int,
    has_candidates: bool,
    maxima: Any,
    targets: Any,
    row_scale: Any,
    merged: Any,
    numbers: Any,
    *refs: Any,
) -> None:
    candidate_refs, (active, *masses) = refs[:has_candidates], refs[has_candidates:]
    block, part = lax.axis_index("rows"), lax.axis_index("part")
    count, stride, always = (numbers[i] for i in range(3))
    rows, zero = block_rows(block), on_all_threads(0.0, jnp.float32)
    tiles = [part * TILES + i for i in range(TILES)]

    def put(tile: Any, is_active: Any) -> None:
        def store() -> None:
            active[tile, block] = is_active

        pl.when(tile < active.shape[0])(store)

    def put_inactive() -> None:
        for tile in tiles:
            put(tile, jnp.int32(0))

    def select_rows() -> None:
        # After the last row, the arrays hold numbers of other fields, which are not used.
        there = on_all_threads(block * ROW_BLOCK) + thread_numbers() < count
        highest, sumexp = (merged[pl.ds((field + i) * stride + block * ROW_BLOCK, THREADS)] for i in range(2))
        of_rows, k = jnp.log(sumexp) * LOG2E, row_scale[rows]
        holds = _holds(_find_tile(targets[rows]), candidate_refs, tiles, block)
        mass = zero
        for tile, has_any, (largest, of_tile) in [
            (tiles[i], holds[i], _load(maxima, tiles[i], rows)) for i in range(TILES)
        ]:
            u = (largest - highest) * k - of_rows  # the logarithm of the tile's largest probability
            # NaN is not below the threshold, so a row with NaN makes all tiles active. Its gradient is NaN.
            is_active = jnp.where(u < math.log2(call.gradient_threshold), on_all_threads(0), on_all_threads(1))
            if call.has_floor:  # a row in which no column reaches the floor has no gradient, and its u is infinite
                is_active = jnp.where(sumexp == 0.0, on_all_threads(0), is_active)
            is_active = jnp.where(has_any > 0, on_all_threads(1), is_active)
            is_active = jnp.where(on_all_threads(tile) == always, on_all_threads(1), is_active)
            is_active = jnp.max(jnp.where(there, is_active, on_all_threads(0)))
            put(tile, is_active)
            if of_tile is not None:
                mass += jnp.where(on_all_threads(is_active) > 0, zero, jnp.exp2(jnp.minimum(u, 0.0)) * of_tile)
        for ref in masses:
            ref.at[part, rows][...] = jnp.where(there, mass, zero)

    has_rows = block * ROW_BLOCK < count
    pl.when(has_rows)(select_rows)
    pl.when(jnp.logical_not(has_rows))(put_inactive)


def _holds(label_tile: Any, candidate_tiles: Sequence[Any], tiles: list[Any], block: Any) -> list[Any]:
    """Returns a positive number for each of ``tiles`` that holds the label of the thread's token or any candidate."""
    holds = [mask_to_int(label_tile == tile) for tile in tiles]
    for marks in candidate_tiles:
        flags = (marks[jnp.minimum(tile, marks.shape[0] - 1), block] for tile in tiles)
        holds = [label + on_all_threads(candidate) for label, candidate in zip(holds, flags, strict=True)]
    return holds


def _find_tile(column: Any) -> Any:
    """Returns the number of a column's tile; a negative number for a negative column."""
    return lax.shift_right_arithmetic(column, on_all_threads(TILE_N.bit_length() - 1))


def _load(maxima: Any, tile: Any, rows: Any) -> tuple[Any, Any]:
    """Loads a tile's largest x, and its sum if there is one. Tiles that no launch visited count as padding."""
    is_valid, at = on_all_threads(tile) < maxima.shape[0], jnp.minimum(tile, maxima.shape[0] - 1)
    none = FLOOR, 0.0
    fields = [
        jnp.where(is_valid, maxima[at, i, rows], on_all_threads(none[i], jnp.float32))
        for i in range(min(maxima.shape[1], 2))
    ]
    return fields[0], fields[1] if len(fields) > 1 else None
