"""The walk over tiles of logits, which the forward and the recomputing backward share: hidden · weightᵀ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._generation import Machine
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._live_tiles import Batch
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _parts
from lce_jax.mosaic.common._machine import Matmul, Offset, Tile, Visit, VisitAll, row_groups
from lce_jax.mosaic.common._order import snake_index
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N, TILING

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Int


def logits(case: Case, tuning: Any) -> Matmul:
    """The static part of a kernel that walks over logits: the product hidden · weightᵀ."""
    return Matmul(case, tuning, 1, case.options.hidden_dim)


def walk_logits(
    machine: Machine, matmul: Matmul, hidden: Any, weight: Any, span: Span, consume: Any, scratch: Any
) -> None:
    """`Machine.walk_tiles` over the logits of the live row groups and the span's vocabulary tiles."""
    machine.walk_tiles(matmul, hidden, weight, Offset(column=span.offset), visit_all(matmul, span), consume, scratch)


def visit_all(matmul: Matmul, span: Span) -> VisitAll:
    """What visits the logits of the live row groups and the span's vocabulary tiles."""
    tuning, groups = matmul.tuning, row_groups(matmul, span.num_rows)
    shape = geometry(matmul.case, TILING)

    def column(number: Any) -> Any:
        if not shape.has_parts:
            return number * TILE_N
        first = first_tile(span)
        return _parts.first_column(shape, first + number) - _parts.first_column(shape, first)

    def visit_them(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            group, number = snake_index(tuning, info.index[0], groups, span.num_tiles)
            row_block = group * tuning.cluster + lax.axis_index("cluster")
            visited = Tile(
                row_block * ROW_BLOCK,
                column(number),
                num_steps(matmul),
                row_block=row_block,
                vocabulary_tile=number,
            )
            return visit(visited, carry)

        return plgpu.nd_loop((groups * span.num_tiles,), collective_axes="sm", init_carry=carry)(tile)

    return visit_them


def num_steps(matmul: Matmul) -> int:
    """Those of a contraction over H."""
    return -(-matmul.case.hidden_size // matmul.tuning.tile_k)


def walk_live_logits(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,
    weight: Any,
    row_blocks: Any,
    tiles: Any,
    batch: Batch,
    consume: Any,
    scratch: Any,
) -> None:
    """`Machine.walk_tiles` over the logits of a batch's entries; the blocks of a cluster take those of one group."""
    tuning = matmul.tuning

    def visit_live(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            slot = info.index[0] * tuning.cluster + lax.axis_index("cluster")
            row_block, number = row_blocks[batch.entry + slot], tiles[batch.entry + slot]
            at = {"row_block": row_block, "vocabulary_tile": number, "slot": slot}
            return visit(Tile(row_block * ROW_BLOCK, number * TILE_N, num_steps(matmul), **at), carry)

        groups = lax.div(batch.num_entries, jnp.int32(tuning.cluster))
        return plgpu.nd_loop((groups,), collective_axes="sm", init_carry=carry)(tile)

    machine.walk_tiles(matmul, hidden, weight, Offset(), visit_live, consume, scratch)


def first_tile(span: Span) -> Int[Array, ""]:
    """The number of the span's first vocabulary tile, in the shard."""
    return lax.div(span.column, jnp.int32(TILE_N))
