"""The walk over tiles of logits, which the forward and the recomputing backward share: hidden · weightᵀ.

A block of a tile as a warpgroup holds it in registers, and the per-token vectors beside it.

With a floor: the label of each row, which counts also where its logit is below the floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._statistics import SUMS
from lce_jax.mosaic._call import Machine
from lce_jax.mosaic._live_tiles import Batch, Sizes, row_block_of
from lce_jax.mosaic._operands import FLOOR, LOG2E, RowFactors, Span, geometry
from lce_jax.mosaic._pallas import plgpu
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
from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


FOLDED = 8  # columns of which each of four threads holds two
PADDING = -1e15  # stands for the raw products of columns that do not count: exp2 of it is 0, its square is finite


class AccumulatorLayout(NamedTuple):
    """Rows of a tile in the registers of a warpgroup."""

    num_rows: int

    @property
    def layout(self) -> Any:
        """That of wgmma's results. It is of registers alone: every generation has it."""
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
        """The part of a per-token vector for these rows, from GMEM."""
        return plgpu.load(ref.at[rows], layout=self.per_row, optimized=False)

    def load_factors(self, factors: Any, rows: Any) -> RowFactors:
        """The same part of the stacked `RowFactors`."""
        highest, target, constant = (self.load_rows(factors.at[i], rows) for i in range(3))
        return RowFactors(
            highest, target, constant, self.load_rows(factors.at[3], rows) if factors.shape[0] == 4 else None
        )

    def along_rows(self, values: Float[Array, "rows"], columns: int = TILE_N) -> Float[Array, "rows n"]:
        """One value per row, broadcast."""
        return lax.broadcast_in_dim(values, (self.num_rows, columns), (0,))

    def with_target(self, d: Float[Array, "rows n"], rows: RowFactors, label: Float[Array, "rows"], holds: Any) -> Any:
        """A block of dlogits with eq. 4's target at the label, which counts from the block's first column.

        ``holds`` says whether the tile has any.
        """

        def replace() -> Array:
            target = self.along_rows(rows.target, FOLDED)
            return jnp.concatenate([jnp.where(there, target, x) for there, x in self.by_label(d, label)], axis=1)

        return lax.cond(holds, replace, lambda: d)

    def by_label(self, x: Float[Array, "rows n"], label: Float[Array, "rows"]) -> list[tuple[Array, Array]]:
        """Of eight columns at a time: whether each is its row's label, and x. Registers would keep an iota of all."""
        place = self.along_rows(label, FOLDED)
        place -= plgpu.broadcasted_iota(jnp.int32, place.shape, 1, layout=self.layout)
        return [(place == start, x[:, start : start + FOLDED]) for start in range(0, x.shape[1], FOLDED)]

    def reaching(self, x: Float[Array, "rows n"], floor: Float[Array, "rows"] | None) -> Float[Array, "rows n"]:
        """A block with `PADDING` on what is below the rows' floor. The label's own logit counts all the same."""
        return x if floor is None else jnp.where(x < self.along_rows(floor, x.shape[1]), PADDING, x)

    def gradient(self, x: Float[Array, "rows n"], row_scale: Array, rows: RowFactors) -> Float[Array, "rows n"]:
        """Eq. 4 on a block of columns, but for the label. u has the bits of the forward's."""

        def along(values: Array) -> Array:
            return self.along_rows(values, x.shape[1])

        u = (x - along(rows.max)) * along(row_scale)
        e = jnp.exp2(u)
        d = along(rows.constant) * e
        return d if rows.slope is None else d + along(rows.slope) * (u * e)


def softcap(z: Any, cap: float, call: Call) -> Any:
    """The tanh of eq. 0, to the last digits of fp32: the hardware's own tanh has eleven bits."""
    return 1.0 - 2.0 / (jnp.exp2(z * (2.0 * LOG2E * call.logit_scale / cap)) + 1.0)


class LabelBelow(NamedTuple):
    """Where a tile holds the label of a row, below its floor: one column more beside those that reach it."""

    there: Bool[Array, "rows"]
    x: Float[Array, "rows"]

    @classmethod
    def of(cls, x: Array, target: Array, floor: Array) -> LabelBelow:
        """From the label's x, which is anything where the tile holds none, and its column, from the tile's first on."""
        return cls((target >= 0) & (target < TILE_N) & (x < floor), x)

    def or_else(self, value: float) -> Float[Array, "rows"]:
        """Its x, or ``value`` where it is not there."""
        return jnp.where(self.there, self.x, value)

    def highest(self, highest: Float[Array, "rows"]) -> Float[Array, "rows"]:
        """The largest x, from that of the columns that reach the floor."""
        return jnp.maximum(highest, self.or_else(FLOOR))

    def added(self, stats: ShardStatistics, row_scale: Float[Array, "rows"]) -> ShardStatistics:
        """``stats`` of the columns that reach the floor, relative to `highest`, with the label's."""
        u = (self.x - stats.max) * row_scale
        e = jnp.where(self.there, jnp.exp2(u), 0.0)
        there = {name: getattr(stats, name) for name in SUMS}
        sums: Any = {name: None if x is None else x + SUMS[name].term(u, e) for name, x in there.items()}
        return stats._replace(
            **sums,
            min=None if stats.min is None else jnp.minimum(stats.min, self.or_else(-PADDING)),
            support=None if stats.support is None else stats.support + jnp.where(self.there, 1.0, 0.0),
        )


def extent(x: Float[Array, "rows n"]) -> tuple[Float[Array, "rows"], Float[Array, "rows"]]:
    """The smallest number of each row of a block that is no `PADDING`, and how many are none."""
    counts = x > 0.5 * PADDING
    lowest = jnp.min(jnp.where(counts, x, -PADDING), axis=1)
    return lowest, jnp.sum(jnp.where(counts, 1.0, 0.0), axis=1)


def logits(call: Call, tuning: Any) -> Matmul:
    """The static part of a kernel that walks over logits: the product hidden · weightᵀ."""
    return Matmul(call, tuning, 1, call.hidden_dim)


def walk_logits(
    machine: Machine, matmul: Matmul, hidden: Any, weight: Any, span: Span, consume: Any, scratch: Any, *adapter: Any
) -> None:
    """`Machine.walk_tiles` over the logits of the live row groups and the span's vocabulary tiles."""
    how = Offset(column=span.offset), visit_all(matmul, span), consume, scratch
    machine.walk_tiles(matmul, hidden, weight, *how, *adapter)


def visit_all(matmul: Matmul, span: Span) -> VisitAll:
    """What visits the logits of the live row groups and the span's vocabulary tiles."""
    tuning, groups = matmul.tuning, row_groups(matmul, span.num_rows)
    shape = geometry(matmul.call, TILING)

    def column(number: Any) -> Any:
        if not shape.has_parts:
            return number * TILE_N
        first = first_tile(span)
        return _tiles.first_column(shape, first + number) - _tiles.first_column(shape, first)

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
    """Those of a contraction over H, and over the rank of an adapter."""
    tile_k = matmul.tuning.tile_k
    return -(-matmul.call.hidden_size // tile_k) + -(-matmul.call.rank // tile_k)


def walk_live_logits(
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
    """`Machine.walk_tiles` over the logits of a batch's entries; the blocks of a cluster take those of one group."""
    tuning = matmul.tuning

    def visit_live(visit: Visit, carry: Any) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            slot = info.index[0] * tuning.cluster + lax.axis_index("cluster")
            cell = cells[batch.entry + slot]
            number, row_block = order[lax.div(cell, jnp.int32(sizes.width))], row_block_of(sizes, cell)
            at = {"row_block": row_block, "vocabulary_tile": number, "slot": slot}
            return visit(Tile(row_block * ROW_BLOCK, number * TILE_N, num_steps(matmul), **at), carry)

        groups = lax.div(batch.num_entries, jnp.int32(tuning.cluster))
        return plgpu.nd_loop((groups,), collective_axes="sm", init_carry=carry)(tile)

    machine.walk_tiles(matmul, hidden, weight, Offset(), visit_live, consume, scratch)


def first_tile(span: Span) -> Int[Array, ""]:
    """The number of the span's first vocabulary tile, in the shard."""
    return lax.div(span.column, jnp.int32(TILE_N))
