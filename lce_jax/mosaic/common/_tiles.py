"""The sizes that all generations have in common: of tiles, and of pieces of shared memory and the whole of it.

What a walk over tiles needs to know, and what it asks of a generation that multiplies them.

In which order the tiles of a product are taken: what runs side by side shares operands in L2, and ends together.

A launch gives its tiles in turn to the clusters of blocks that run at the same time: one wave of tiles after the other.

A vocabulary in parts, as the forward's kernels see it: where each part's tiles lie, and where they end.

    columns    |      part 0      |      part 1      |
    tiles      |   0   |   1   |..|   2   |   3   |..|       tiles 1 and 3 are ragged

The tiles are numbered through all parts. Labels come as places in the row of tiles (`Geometry.place`). So only the
weight and the padding are found by column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._operands import Geometry, Tiling, geometry
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int


ROW_BLOCK = 128  # rows of a tile, of one block: two wgmma of 64 rows each on Hopper
TILE_N = 256  # the largest N of wgmma and of tcgen05.mma
STAGING_BYTES = 128  # of a row that an epilogue sends out at a time: the widest swizzle
STAGING_COLUMNS = STAGING_BYTES // 2  # 16-bit numbers in those bytes
ATOM_ROWS = 8  # rows of the smallest swizzled piece; TMA copies whole ones
SCALED = 4096  # numbers that a block multiplies, where a kernel multiplies many by one
COLUMN_GRAIN = 16  # the narrowest swizzle, 32 bytes of 16-bit numbers: a minor dimension must be a multiple of it
SMEM_ALIGNMENT = 1024  # of every allocation in a kernel
BARRIER_BYTES = 8
WARPGROUP_ROWS = 64  # of a tile, in the registers of a warpgroup: the M of one wgmma
# A third leaves 128 registers a thread, fewer than the accumulator and its epilogue need.
COMPUTE_WARPGROUPS = ROW_BLOCK // WARPGROUP_ROWS
KL_HELD_BYTES = ROW_BLOCK * TILE_N * 4  # of the tiles of one head that wait for the other's

# Waves of tiles that reading and writing one token's dhidden takes: 8 H bytes at 4.3 TB/s against 2 · 128 · 256 · H
# operations of one multiprocessor at 5.5 TFLOP/s (H200).
DHIDDEN_WAVES = (8 / 4.3e12) / (2 * ROW_BLOCK * TILE_N / 5.5e12)

TILING = Tiling(row_block=ROW_BLOCK, tile=TILE_N, atom=ATOM_ROWS, most_clustered=2)


def live_shape(call: Call) -> tuple[int, int]:
    """That of the tiles that `select` finds live: vocabulary tiles, and a row block for each thread."""
    shape = geometry(call, TILING)
    return shape.num_tiles, -(-shape.row_blocks // ROW_BLOCK) * ROW_BLOCK


def widest_swizzle(extent: int, itemsize: int) -> tuple[int, int]:
    """The widest swizzle, in bytes, and its elements that divide ``extent`` columns."""
    swizzle = next(s for s in (128, 64, 32) if extent * itemsize % s == 0)
    return swizzle, swizzle // itemsize


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The free choices of one kernel. Everything else follows from the shapes."""

    tile_k: int
    stages: int  # buffers of one [ROW_BLOCK / turns, tile_k] and one [tile_n, tile_k] operand tile each
    cluster: int = 1  # 1 or 2: kernel blocks, one below the other, that load each tile of rhs once between them
    snake: int = 16  # row blocks (``minor`` 0) or tiles of columns (1) at a time, for L2 to reuse: 16 x 8 is square
    minor: int = 0  # 0: row blocks, 1: vocabulary tiles
    in_flight: int = 0  # steps, 0 or 1, that are still multiplied while a warpgroup waits for the next operands
    turns: int = 1  # 2: the warpgroups multiply one after the other, each during the other's epilogue
    slots: int = 2  # staging slots of each warpgroup, where tiles are stored
    tile_n: int = TILE_N  # columns of a tile; the kernels of logits know TILE_N only

    def __post_init__(self) -> None:
        """Refuses what the kernels are not written for."""
        if self.cluster not in (1, 2) or self.in_flight not in (0, 1) or self.turns not in (1, 2):
            raise ValueError(f"cluster and turns must be 1 or 2, in_flight 0 or 1, got {self}")
        if self.stages <= self.in_flight:
            raise ValueError(f"more stages are needed than steps in flight, got {self}")
        if self.slots < 1 or self.tile_n // STAGING_COLUMNS % self.slots or self.snake % self.cluster:
            raise ValueError(f"slots must divide a tile's blocks of columns, and snake by cluster, got {self}")

    def smem_bytes(self, itemsize: int, staged: bool, held: int = 0) -> int:
        """Shared memory of a block: operand stages, their barriers and, where tiles are stored, the staging slots.

        ``held``: the bytes of a tile that waits.
        """
        sizes = [
            self.stages * ROW_BLOCK // self.turns * self.tile_k * itemsize,
            self.stages * self.tile_n * self.tile_k * itemsize,
            held,
        ]
        if staged:
            sizes.append(COMPUTE_WARPGROUPS * self.slots * WARPGROUP_ROWS * STAGING_BYTES)
        barriers = (1 + self.turns) * self.stages * BARRIER_BYTES  # consumed and produced
        return sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size in sizes) + barriers


def stages_output(call: Call, kernel: str) -> bool:
    """Whether a kernel stores tiles of its result through slots: the forward for a cache only, those of a KL never."""
    return not kernel.startswith("kl") and (kernel != "forward" or call.cache_budget > 0)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static part of a kernel: its tuning, and which dimension of lhs and of rhs is contracted."""

    call: Call
    tuning: Tuning
    lhs_k: int
    rhs_k: int
    shares_lhs: bool = False  # the operand that the blocks of a cluster share: their tiles lie side by side, not below

    @property
    def clusters(self) -> int:
        """Those that run at the same time. Each takes a tile for each of its blocks: all together a wave of tiles."""
        return self.call.device.core_count // self.tuning.cluster

    @property
    def column_grain(self) -> int:
        """What the first column of every tile of rhs is a multiple of."""
        return math.gcd(self.tuning.tile_n, self.call.vocab_part_size or 0)


class StepPlace(NamedTuple):
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
    locate: Callable[[Any], StepPlace] | None = None  # where the operands of a step lie; None: one after the other


class Product(NamedTuple):
    """One of the products of a tile, whose operands go through the same stages."""

    matmul: Matmul
    lhs: Any
    rhs: Any
    num_steps: int | None = None  # None: those of the tile
    adapter: Any = None  # B of an adapter, which takes the place of rhs after the steps over H

    def part(self, tile: Tile) -> Tile:
        """The tile as this product takes it."""
        return tile if self.num_steps is None else tile._replace(num_steps=self.num_steps)

    def copy_rhs(self, k: Any, copy: Callable[[Any, Any], None]) -> None:
        """``copy(rhs, k)``, or after the steps over H of the adapter."""
        if self.adapter is None:
            copy(self.rhs, k)
            return
        size = self.matmul.call.hidden_size
        assert size % self.matmul.tuning.tile_k == 0, "a step over H would have columns of lhs that are of the others"
        pl.when(k < size)(lambda: copy(self.rhs, k))
        pl.when(k >= size)(lambda: copy(self.adapter, k - size))


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


def next_place(matmul: Matmul, offset: Offset, tile: Tile, number: Any) -> StepPlace:
    """Where the operands of a contraction lie that takes one step after the other."""
    k = number * matmul.tuning.tile_k
    return StepPlace(tile.row, k, offset.k + k)


def swizzled(extent: int, itemsize: int) -> tuple[Any, ...]:
    """The transforms of a shared-memory tile whose minor dimension runs over ``extent`` columns of GMEM."""
    swizzle, minor = widest_swizzle(extent, itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, minor)), plgpu.SwizzleTransform(swizzle)


def snake_index(tuning: Tuning, index: Any, row_groups: Any, columns: Any) -> tuple[Any, Any]:
    """The (row group, tile of columns) of a linear index, in the order that reuses the most of L2."""
    along = tuning.snake // tuning.cluster if tuning.minor == 0 else tuning.snake
    # The number itself, but not to LLVM, which would divide few of them as numbers of 16 bits. For that ptxas calls a
    # function, and in what is yet to be linked, as JAX 0.12 has it compiled, no wgmma then overlaps with another.
    columns = jnp.maximum(jnp.asarray(columns, jnp.int32), -jnp.asarray(row_groups, jnp.int32))
    return plgpu.planar_snake(index, (row_groups, columns), tuning.minor, along)


def turning_snake_index(tuning: Tuning, clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """The (list, tile of columns) of a linear index, where lists are contracted for all tiles, the longest first.

    As `snake_index`, a band of lists for one tile of columns, then for the next. But every other wave takes them
    backwards, counted by where their tile of columns begins, so that no cluster gets the longest of each.
    """
    of_list, of_tile = snake_index(tuning, index, lists, tiles)
    along = tuning.snake // tuning.cluster
    band, place = lax.div(of_list, jnp.int32(along)), lax.rem(of_list, jnp.int32(along))
    width = jnp.minimum(jnp.int32(along), lists - band * along)
    tiles_before = jnp.where(lax.rem(band, jnp.int32(2)) == 0, of_tile, tiles - 1 - of_tile)
    begin = band * along * tiles + tiles_before * width
    wave = lax.div(begin + clusters // 2, jnp.int32(clusters))  # the nearest
    return band * along + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, width - 1 - place, place), of_tile


def longest_first_index(clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """The same, all tiles of one list, then those of the next. Every other wave is taken backwards."""
    wave, place = lax.div(index, jnp.int32(clusters)), lax.rem(index, jnp.int32(clusters))
    last = jnp.minimum(jnp.int32(clusters), lists * tiles - wave * clusters) - 1
    index = wave * clusters + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, last - place, place)
    return lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))


class Parted(NamedTuple):
    """How `join` groups the tiles of a vocabulary in parts: a group ends where its part does."""

    groups: int  # of a launch, at most
    tiles: int  # of a part


def first_column(shape: Geometry, tile: Any) -> Int[Array, ""]:
    """`Geometry.column`, in a kernel."""
    return tile * TILE_N - _part(shape, tile) * shape.overhang


def edge(shape: Geometry, tile: Any, num_columns: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """What masks of padding are given of a tile: columns counted from its part's first one, and where its mask begins.

    The part in which padding begins has the second mask. In a part of nothing but padding every tile is like one after
    the tile with the first padding column.
    """
    part = _part(shape, tile)
    live = jnp.clip(num_columns - part * shape.part_columns, 0, shape.part_columns)
    column = (tile - part * shape.part_tiles) * TILE_N
    start = jnp.where(live < shape.part_columns, 2 * TILE_N, 0)
    return jnp.where(live > 0, column, TILE_N), live, mask, start


def tiles_of_group(parted: Parted, group: int, first: Any, number: Any, num_tiles: Any) -> tuple[Any, Any]:
    """Where the tiles of a launch's group begin and stop, if the shard's group ``first`` is the launch's first one."""
    groups = -(-parted.tiles // group)  # of a part

    def first_tile(of: Any) -> Any:
        return of * group - lax.div(of, jnp.int32(groups)) * (groups * group - parted.tiles)

    begin = first_tile(first + number) - first_tile(first)
    left = parted.tiles - lax.rem(first + number, jnp.int32(groups)) * group
    return begin, jnp.minimum(begin + jnp.minimum(left, group), num_tiles)


def _part(shape: Geometry, tile: Any) -> Int[Array, ""]:
    return lax.div(tile, jnp.int32(shape.part_tiles))
