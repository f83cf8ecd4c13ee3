"""What a walk over tiles needs to know, and what it asks of a generation that multiplies them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tiles import ATOM_ROWS, ROW_BLOCK, widest_swizzle

if TYPE_CHECKING:
    from lce_jax._shapes import Int


class Tiles(Protocol):
    """What a walk reads of a tuning, whatever else a generation has in it."""

    @property
    def tile_k(self) -> int:
        """The depth of a step."""

    @property
    def tile_n(self) -> int:
        """The columns of a tile."""

    @property
    def cluster(self) -> int:
        """The blocks of a cluster, 1 or 2."""

    @property
    def snake(self) -> int:
        """Row blocks (``minor`` 0) or tiles of columns (1) at a time."""

    @property
    def minor(self) -> int:
        """0: row blocks, 1: vocabulary tiles."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static part of a kernel: its tuning, and which dimension of lhs and of rhs is contracted."""

    case: Case
    tuning: Any  # a generation's own, `Tiles` at least
    lhs_k: int
    rhs_k: int
    shares_lhs: bool = False  # the operand that the blocks of a cluster share: their tiles lie side by side, not below

    @property
    def clusters(self) -> int:
        """Those that run at the same time. Each takes a tile for each of its blocks: all together a wave of tiles."""
        return self.case.device.core_count // self.tuning.cluster

    @property
    def column_grain(self) -> int:
        """What the first column of every tile of rhs is a multiple of."""
        return math.gcd(self.tuning.tile_n, self.case.options.vocab_part_size or 0)


class Place(NamedTuple):
    """Where a step's operands lie."""

    row: Any  # of lhs
    lhs_k: Any
    rhs_k: Any


class Tile(NamedTuple):
    """One [128, n] tile of a product, a contraction of ``num_steps`` steps."""

    row: Int[Any, ""]  # of lhs, and of the result
    column: Any  # of rhs, counted from the walk's offset
    num_steps: Any
    first_step: Any = 0
    row_block: Any = None  # of a tile of logits
    vocabulary_tile: Any = None  # of a tile of logits: its number in the launch
    split: Any = None  # of a tile of dhidden: which part of the contraction it is
    slot: Any = None  # of a live tile of logits: the slot of its dlogits
    written: Any = None  # of a live tile of dweight: the column of the result, where that is not the one of rhs
    locate: Callable[[Any], Place] | None = None  # where the operands of a step lie; None: one after the other


class Product(NamedTuple):
    """One of the products of a tile, whose operands go through the same stages."""

    matmul: Matmul
    lhs: Any
    rhs: Any
    num_steps: int | None = None  # None: those of the tile

    def part(self, tile: Tile) -> Tile:
        """The tile as this product takes it."""
        return tile if self.num_steps is None else tile._replace(num_steps=self.num_steps)


class Offset(NamedTuple):
    """Where in rhs the columns and the contraction begin: multiples of `Matmul.column_grain`."""

    column: Any = 0
    k: Any = 0


# Calls ``visit(tile, carry) -> carry`` for the block's tiles in order, the first with the carry that is given.
type Visit = Callable[[Tile, Any], Any]
type VisitAll = Callable[[Visit, Any], Any]


def multiple_of(x: Any, factor: int) -> Any:
    """``pl.multiple_of``, which a number that is known already does not need, and which cannot be lowered for it."""
    return x if isinstance(x, int) else pl.multiple_of(x, factor)


def ceil_div(x: Any, y: int) -> Int[Any, ""]:
    """The quotient, rounded up; of traced numbers too."""
    return lax.div(jnp.asarray(x, jnp.int32) + (y - 1), jnp.int32(y))


def row_groups(matmul: Matmul, num_rows: Any) -> Int[Any, ""]:
    """The clusters of row blocks that hold the first ``num_rows`` rows of lhs."""
    return ceil_div(num_rows, matmul.tuning.cluster * ROW_BLOCK)


def next_place(matmul: Matmul, offset: Offset, tile: Tile, number: Any) -> Place:
    """Where the operands of a contraction lie that takes one step after the other."""
    k = number * matmul.tuning.tile_k
    return Place(tile.row, k, offset.k + k)


def swizzled(extent: int, itemsize: int) -> tuple[Any, ...]:
    """The transforms of a shared-memory tile whose minor dimension runs over ``extent`` columns of GMEM."""
    swizzle, minor = widest_swizzle(extent, itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, minor)), plgpu.SwizzleTransform(swizzle)
