"""Which tiles carry gradient (`lce_jax.mosaic._threshold`), as kernels: a thread per token, a few tiles at a time.

select   the tiles' maxima, the merged statistics   ->  the live tiles; the probability in the others, in parts
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._operands import FLOOR, LOG2E, geometry
from lce_jax.mosaic._pallas import pl
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N, TILING, live_shape
from lce_jax.mosaic.common._tokens import THREADS, as_int, block_rows, kernel, numbered, on_all_threads
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

TILES = 16  # of a block, whose loads overlap


def select(
    call: Call,
    maxima: Float[Array, "tiles kept Tp"],
    targets: Int[Array, "Tp"],
    row_scale: Float[Array, "Tp"],
    merged: Float[Array, "n"],
    field: int,
    numbers: Int[Array, "3"],
    held: Int[Array, "tiles blocks"] | None = None,
) -> tuple[Int[Array, "tiles blocks"], Float[Array, "parts Tp"] | None]:
    """1 where a tile is live, and of several parts of the vocabulary the probability in the tiles that are not.

    Args:
        call: of the shard.
        maxima: each tile's largest x, and its sum if the probabilities are asked for.
        targets: the shard's columns of the labels, -1 where it does not hold them.
        row_scale: the k of eq. 0 in base 2.
        merged: flat; its fields ``field`` and ``field + 1`` are the maximum and the sum of the whole vocabulary.
            Another field follows, or both are padded to whole row blocks.
        field: of the maximum.
        numbers: how many rows there are, the stride of fields, and a tile that is live whatever it holds, or -1.
        held: 1 where a tile holds a candidate. None: there are none.
    """
    shape = geometry(call, TILING)
    outputs, parts = [jax.ShapeDtypeStruct(live_shape(call), jnp.int32)], -(-shape.num_tiles // TILES)
    if maxima.shape[1] > 1:
        outputs.append(jax.ShapeDtypeStruct((parts, shape.padded_tokens), jnp.float32))
    body = functools.partial(_select, call, field, held is not None)
    run = kernel(body, outputs, "lce_select", {"part": parts, "rows": shape.row_blocks})
    live, *masses = run(maxima, targets, row_scale, merged, numbers, *([] if held is None else [held]))
    return live, masses[0] if masses else None


def _select(
    call: Call,
    field: int,
    has_held: bool,
    maxima: Any,
    targets: Any,
    row_scale: Any,
    merged: Any,
    numbers: Any,
    *refs: Any,
) -> None:
    given, (live, *masses) = refs[:has_held], refs[has_held:]
    block, part = lax.axis_index("rows"), lax.axis_index("part")
    count, stride, always = (numbers[i] for i in range(3))
    rows, zero = block_rows(block), on_all_threads(0.0, jnp.float32)
    tiles = [part * TILES + i for i in range(TILES)]

    def put(tile: Any, is_live: Any) -> None:
        def store() -> None:
            live[tile, block] = is_live

        pl.when(tile < live.shape[0])(store)

    def none_is_live() -> None:
        for tile in tiles:
            put(tile, jnp.int32(0))

    def some_may_be() -> None:
        # After the last row come numbers that belong to others, of which nothing is made.
        there = on_all_threads(block * ROW_BLOCK) + numbered() < count
        highest, sumexp = (merged[pl.ds((field + i) * stride + block * ROW_BLOCK, THREADS)] for i in range(2))
        of_rows, k = jnp.log(sumexp) * LOG2E, row_scale[rows]
        holds = _holds(_tile_of(targets[rows]), given, tiles, block)
        mass = zero
        for tile, held, (largest, of_tile) in [
            (tiles[i], holds[i], _load(maxima, tiles[i], rows)) for i in range(TILES)
        ]:
            u = (largest - highest) * k - of_rows  # the logarithm of the tile's largest probability
            # NaN is not below: a row without probabilities makes all tiles live, so that its gradient is NaN as well.
            is_live = jnp.where(u < math.log2(call.gradient_threshold), on_all_threads(0), on_all_threads(1))
            if call.has_floor:  # a row without a column that counts has no gradient, and its u is infinite
                is_live = jnp.where(sumexp == 0.0, on_all_threads(0), is_live)
            is_live = jnp.where(held > 0, on_all_threads(1), is_live)
            is_live = jnp.where(on_all_threads(tile) == always, on_all_threads(1), is_live)
            is_live = jnp.max(jnp.where(there, is_live, on_all_threads(0)))
            put(tile, is_live)
            if of_tile is not None:
                mass += jnp.where(on_all_threads(is_live) > 0, zero, jnp.exp2(jnp.minimum(u, 0.0)) * of_tile)
        for ref in masses:
            ref.at[part, rows][...] = jnp.where(there, mass, zero)

    has_rows = block * ROW_BLOCK < count
    pl.when(has_rows)(some_may_be)
    pl.when(jnp.logical_not(has_rows))(none_is_live)


def _holds(of_label: Any, given: Sequence[Any], tiles: list[Any], block: Any) -> list[Any]:
    """More than 0 for each of ``tiles`` that holds the label of the thread's token, or any candidate."""
    holds = [as_int(of_label == tile) for tile in tiles]
    for held in given:
        of_tiles = (held[jnp.minimum(tile, held.shape[0] - 1), block] for tile in tiles)
        holds = [label + on_all_threads(candidate) for label, candidate in zip(holds, of_tiles, strict=True)]
    return holds


def _tile_of(column: Any) -> Any:
    """Negative if the column is."""
    return lax.shift_right_arithmetic(column, on_all_threads(TILE_N.bit_length() - 1))


def _load(maxima: Any, tile: Any, rows: Any) -> tuple[Any, Any]:
    """A tile's largest x and its sum, if they are there; tiles that nothing has visited are padding."""
    there, at = on_all_threads(tile) < maxima.shape[0], jnp.minimum(tile, maxima.shape[0] - 1)
    none = FLOOR, 0.0
    found = [
        jnp.where(there, maxima[at, i, rows], on_all_threads(none[i], jnp.float32))
        for i in range(min(maxima.shape[1], 2))
    ]
    return found[0], found[1] if len(found) > 1 else None
