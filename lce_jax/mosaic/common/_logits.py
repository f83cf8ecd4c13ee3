"""The walk over tiles of logits (hidden · weightᵀ), which the forward and the recomputing backward share.

`AccumulatorLayout` has the operations on a block of a tile in the registers of a warpgroup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Machine
from lce_jax.mosaic._operands import LOG2E, RowFactors, Span, make_geometry
from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic._threshold_tiles import Batch, Sizes, find_row_block
from lce_jax.mosaic.common import _tiles
from lce_jax.mosaic.common._tiles import (
    ROW_BLOCK,
    TILE_N,
    TILING,
    Matmul,
    Offset,
    Tile,
    Visit,
    VisitAll,
    row_groups,
    snake_index,
)
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


FOLDED = 8  # columns of a block, of which each of four threads holds two
PADDING = -1e15  # the logit of columns that do not count: its exp2 is 0, its square finite


class AccumulatorLayout(NamedTuple):
    """Operations on the rows of a tile that is in the registers of a warpgroup."""

    num_rows: int

    @property
    def layout(self) -> Any:
        """The layout of wgmma's results, which all generations use for tiles in registers."""
        return plgpu.Layout.WGMMA

    @property
    def per_row(self) -> Any:
        """The layout of one number per row."""
        return self.layout.reduce(1)

    @property
    def per_column(self) -> Any:
        """The layout of one number per column."""
        return self.layout.reduce(0)

    def load_rows(self, ref: Any, rows: Any) -> Float[Array, "rows"]:
        """Loads these rows of a per-token vector from global memory."""
        return _pallas.load(ref.at[rows], self.per_row)

    def load_factors(self, factors: Any, rows: Any) -> RowFactors:
        """Loads these rows of the stacked `RowFactors`."""
        highest, target, constant = (self.load_rows(factors.at[i], rows) for i in range(3))
        return RowFactors(
            highest, target, constant, self.load_rows(factors.at[3], rows) if factors.shape[0] == 4 else None
        )

    def along_rows(self, values: Float[Array, "rows"], columns: int = TILE_N) -> Float[Array, "rows n"]:
        """Broadcasts one value per row along the columns."""
        return _pallas.broadcast(values, (self.num_rows, columns), 0, self.layout)

    def put_target(self, d: Float[Array, "rows n"], rows: RowFactors, label: Float[Array, "rows"], holds: Any) -> Any:
        """Puts the target of eq. 4 at each row's label. ``label`` is relative to the block's first column.

        ``holds``: whether the tile has any label.
        """

        def put() -> Array:
            target = self.along_rows(rows.target, FOLDED)
            return jnp.concatenate([jnp.where(there, target, x) for there, x in self.compare_labels(d, label)], axis=1)

        return lax.cond(holds, put, lambda: d)

    def compare_labels(self, x: Float[Array, "rows n"], label: Float[Array, "rows"]) -> list[tuple[Array, Array]]:
        """Returns, for eight columns at a time, whether each is its row's label, and x there.

        With an iota of all columns at once, the registers would hold the whole iota.
        """
        place = self.along_rows(label, FOLDED)
        place -= plgpu.broadcasted_iota(jnp.int32, place.shape, 1, layout=self.layout)
        return [(place == start, x[:, start : start + FOLDED]) for start in range(0, x.shape[1], FOLDED)]

    def apply_floor(self, x: Float[Array, "rows n"], floor: Float[Array, "rows"] | None) -> Float[Array, "rows n"]:
        """Replaces logits below their row's floor by `PADDING`, including the label's.

        `_statistics` reads the label's logit before, and adds it to the statistics afterwards.
        """
        return x if floor is None else jnp.where(x < self.along_rows(floor, x.shape[1]), PADDING, x)

    def gradient(self, x: Float[Array, "rows n"], row_scale: Array, rows: RowFactors) -> Float[Array, "rows n"]:
        """Computes eq. 4 on a block of columns, without the label's term. u has the same bits as in the forward."""

        def along(values: Array) -> Array:
            return self.along_rows(values, x.shape[1])

        u = (x - along(rows.max)) * along(row_scale)
        e = jnp.exp2(u)
        d = along(rows.constant) * e
        return d if rows.slope is None else d + along(rows.slope) * (u * e)


def apply_softcap(call: Call, z: Any) -> Any:
    """Computes the x of eq. 0 from raw products: their tanh, or the products without a softcap.

    The tanh has full fp32 precision. The hardware's tanh has eleven bits.
    """
    cap = call.logit_softcap
    return z if cap is None else 1.0 - 2.0 / (jnp.exp2(z * (2.0 * LOG2E * call.logit_scale / cap)) + 1.0)


def differentiate_softcap(call: Call, d: Float[Array, "rows n"], x: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Turns ``d``, a gradient with respect to x, into that with respect to the raw products (eq. 5)."""
    return d if call.logit_softcap is None else d * (1.0 - x * x)


def make_matmul(call: Call, tuning: Any) -> Matmul:
    """Returns the static part of a kernel that walks over the logits, which are the product hidden · weightᵀ."""
    return Matmul(call, tuning, 1, call.hidden_dim)


def walk_logits(
    machine: Machine, matmul: Matmul, hidden: Any, weight: Any, span: Span, consume: Any, scratch: Any, *adapter: Any
) -> None:
    """Walks over the logits in the unmasked row groups and the span's vocabulary tiles, with `Machine.walk_tiles`."""
    options = Offset(column=span.offset), make_visit(matmul, span), consume, scratch
    machine.walk_tiles(matmul, hidden, weight, *options, *adapter)


def make_visit(matmul: Matmul, span: Span) -> VisitAll:
    """Returns the function that visits tiles of logits in the unmasked row groups and the span's vocabulary tiles."""
    tuning, groups = matmul.tuning, row_groups(matmul, span.num_rows)
    shape = make_geometry(matmul.call, TILING)

    def column(number: Any) -> Any:
        if not shape.has_parts:
            return number * TILE_N
        first = first_tile(span)
        return _tiles.first_column(shape, first + number) - _tiles.first_column(shape, first)

    def visit_all(visit: Visit, carry: Any) -> Any:
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

    return visit_all


def num_steps(matmul: Matmul) -> int:
    """Returns the number of steps of a contraction over H, and over an adapter's rank if there is one."""
    tile_k = matmul.tuning.tile_k
    return -(-matmul.call.hidden_size // tile_k) + -(-matmul.call.rank // tile_k)


def walk_active_logits(
    machine: Machine,
    matmul: Matmul,
    hidden: Any,
    weight: Any,
    cells: Any,
    order: Any,
    sizes: Sizes,
    batch: Batch,
    consume: Any,
    scratch: Any,
) -> None:
    """Walks over the logits of a batch's active tiles. The blocks of a cluster compute the entries of one group."""
    tuning = matmul.tuning

    def visit_all(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            slot = info.index[0] * tuning.cluster + lax.axis_index("cluster")
            cell = cells[batch.entry + slot]
            number, row_block = order[lax.div(cell, jnp.int32(sizes.width))], find_row_block(sizes, cell)
            fields = {"row_block": row_block, "vocabulary_tile": number, "slot": slot}
            return visit(Tile(row_block * ROW_BLOCK, number * TILE_N, num_steps(matmul), **fields), carry)

        groups = lax.div(batch.num_entries, jnp.int32(tuning.cluster))
        return plgpu.nd_loop((groups,), collective_axes="sm", init_carry=carry)(tile)

    machine.walk_tiles(matmul, hidden, weight, Offset(), visit_all, consume, scratch)


def first_tile(span: Span) -> Int[Array, ""]:
    """Returns the number of the span's first vocabulary tile in the shard."""
    return lax.div(span.column, jnp.int32(TILE_N))
