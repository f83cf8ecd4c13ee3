"""What all kernels with tensor cores share about tiles: their sizes, tunings, and the order in which they are computed.

* The sizes of tiles and of pieces of shared memory, which are equal for all generations.
* `Tuning`, `Matmul`, `Tile` and `Product`: what a walk over tiles needs to know.
* The order of a product's tiles. A launch gives its tiles to the clusters of blocks that run concurrently, one wave of
  tiles after the other. Tiles that run concurrently should share operands in L2 and end together.
* The tiles of a vocabulary that is cut into parts (``vocab_part_size``), as the forward's kernels see them:

    columns    |      part 0      |      part 1      |
    tiles      |   0   |   1   |..|   2   |   3   |..|       tiles 1 and 3 are ragged

The tiles are numbered consecutively through all parts. A label is given as its place among all tiles
(`Geometry.place`), so only the weight and the padding are located by column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._operands import Geometry, Tiling, make_geometry
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int


ROW_BLOCK = 128  # rows of a tile, which one block computes: by two wgmma of 64 rows each on Hopper
TILE_N = 256  # the largest N of wgmma and of tcgen05.mma
STAGING_BYTES = 128  # bytes of a row that an epilogue stores at a time: the widest swizzle
STAGING_COLUMNS = STAGING_BYTES // 2  # how many 16-bit numbers these bytes hold
ATOM_ROWS = 8  # rows of the smallest swizzled piece; TMA copies whole pieces
SCALED = 4096  # how many numbers a block of the kernel `_tokens.scale` multiplies
COLUMN_GRAIN = 16  # a minor dimension must be a multiple of it: the narrowest swizzle, 32 bytes, in 16-bit numbers
SMEM_ALIGNMENT = 1024  # the alignment in bytes of every allocation in shared memory
BARRIER_BYTES = 8
WARPGROUP_ROWS = 64  # rows of a tile in the registers of a warpgroup: the M of one wgmma
# With a third compute warpgroup, a thread has 128 registers, fewer than the accumulator and its epilogue need.
COMPUTE_WARPGROUPS = ROW_BLOCK // WARPGROUP_ROWS
KL_HELD_BYTES = ROW_BLOCK * TILE_N * 4  # the bytes of a block's held tile, which waits for the other head's tile

# The time to read and write one token's dhidden, 8 H bytes at 4.3 TB/s, divided by the time of a wave, in which each
# multiprocessor computes one tile: 2 · 128 · 256 · H operations at 5.5 TFLOP/s (H200).
DHIDDEN_WAVES = (8 / 4.3e12) / (2 * ROW_BLOCK * TILE_N / 5.5e12)

TILING = Tiling(row_block=ROW_BLOCK, tile=TILE_N, atom=ATOM_ROWS, most_clustered=2)


def active_tiles_shape(call: Call) -> tuple[int, int]:
    """Returns the shape of the mask of active tiles: [vocabulary tiles, row blocks padded to one per thread]."""
    shape = make_geometry(call, TILING)
    return shape.num_tiles, -(-shape.row_blocks // ROW_BLOCK) * ROW_BLOCK


def widest_swizzle(extent: int, itemsize: int) -> tuple[int, int]:
    """Returns the widest swizzle, in bytes and in elements, that divides ``extent`` columns."""
    swizzle = next(s for s in (128, 64, 32) if extent * itemsize % s == 0)
    return swizzle, swizzle // itemsize


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuning parameters of one kernel. Everything else follows from the shapes."""

    tile_k: int
    stages: int  # buffers, each with a [ROW_BLOCK / turns, tile_k] tile of lhs and a [tile_n, tile_k] tile of rhs
    cluster: int = 1  # how many blocks, one below the other, together load each tile of rhs only once: 1 or 2
    snake: int = 16  # row blocks (``minor`` 0) or tiles of columns (1) that L2 reuses: 16 x 8 is square
    minor: int = 0  # 0: row blocks, 1: vocabulary tiles
    in_flight: int = 0  # how many steps still multiply while a warpgroup waits for the next operands: 0 or 1
    turns: int = 1  # if 2, the warpgroups multiply in turn, each during the other's epilogue
    slots: int = 2  # staging slots of each warpgroup, if the kernel stores tiles
    tile_n: int = TILE_N  # columns of a tile; kernels of logits support only TILE_N

    def __post_init__(self) -> None:
        """Refuses values that the kernels do not support."""
        if self.cluster not in (1, 2) or self.in_flight not in (0, 1) or self.turns not in (1, 2):
            raise ValueError(f"cluster and turns must be 1 or 2, in_flight 0 or 1, got {self}")
        if self.stages <= self.in_flight:
            raise ValueError(f"more stages are needed than steps in flight, got {self}")
        if self.slots < 1 or self.tile_n // STAGING_COLUMNS % self.slots or self.snake % self.cluster:
            raise ValueError(f"slots must divide a tile's blocks of columns, and snake by cluster, got {self}")

    def smem_bytes(self, itemsize: int, staged: bool, held: int = 0) -> int:
        """Returns the bytes of shared memory of a block: the operands' stages, their barriers, and staging slots.

        ``staged``: whether the kernel stores tiles through the slots. ``held``: the bytes of a held tile.
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
    """Whether a kernel stages its output in shared memory. The forward does if it caches tiles; KL kernels do not."""
    return not kernel.startswith("kl") and (kernel != "forward" or call.cache_budget > 0)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static part of a kernel: its tuning, and the contracted dimensions of lhs and rhs."""

    call: Call
    tuning: Tuning
    lhs_k: int
    rhs_k: int
    shares_lhs: bool = False  # the blocks of a cluster share lhs instead of rhs: their tiles lie side by side

    @property
    def clusters(self) -> int:
        """How many clusters run at a time. Each block computes a tile, and all clusters together a wave of tiles."""
        return self.call.device.core_count // self.tuning.cluster

    @property
    def column_grain(self) -> int:
        """A number that divides the first column of every tile of rhs."""
        return math.gcd(self.tuning.tile_n, self.call.vocab_part_size or 0)


class StepPlace(NamedTuple):
    """Where a step's operands begin."""

    row: Any  # the first row of lhs
    lhs_k: Any  # the place in the contracted dimension of lhs
    rhs_k: Any  # the place in the contracted dimension of rhs


class Tile(NamedTuple):
    """One [128, n] tile of a product, whose contraction has ``num_steps`` steps."""

    row: Int[Any, ""]  # the first row in lhs and in the result
    column: Any  # the first column in rhs, relative to the walk's offset
    num_steps: Any
    first_step: Any = 0
    row_block: Any = None  # in tiles of logits, the number of the row block
    vocabulary_tile: Any = None  # in tiles of logits, the number of the vocabulary tile in the launch
    split: Any = None  # in tiles of dhidden, the number of the contraction's split
    slot: Any = None  # in active tiles of logits, the slot of the dlogits
    written: Any = None  # in active tiles of dweight, the column in the result, if it differs from that in rhs
    locate: Callable[[Any], StepPlace] | None = None  # finds the operands of a step; None if these are consecutive


class Product(NamedTuple):
    """One of the products of a tile. The products of a tile share the stages."""

    matmul: Matmul
    lhs: Any
    rhs: Any
    num_steps: int | None = None  # None stands for the steps of the tile
    adapter: Any = None  # B of an adapter, which takes the place of rhs after the steps over H

    def part(self, tile: Tile) -> Tile:
        """Returns the tile with the number of steps of this product."""
        return tile if self.num_steps is None else tile._replace(num_steps=self.num_steps)

    def copy_rhs(self, k: Any, copy: Callable[[Any, Any], None]) -> None:
        """Calls ``copy(rhs, k)`` in the steps over H, and copies from the adapter in the steps after these."""
        if self.adapter is None:
            copy(self.rhs, k)
            return
        size = self.matmul.call.hidden_size
        assert size % self.matmul.tuning.tile_k == 0, "a step over H would reach into the columns of u"
        pl.when(k < size)(lambda: copy(self.rhs, k))
        pl.when(k >= size)(lambda: copy(self.adapter, k - size))


class Offset(NamedTuple):
    """Where the columns and the contraction begin in rhs: multiples of `Matmul.column_grain`."""

    column: Any = 0
    k: Any = 0


# A `VisitAll` calls ``carry = visit(tile, carry)`` for each of the block's tiles, in order.
type Visit = Callable[[Tile, Any], Any]
type VisitAll = Callable[[Visit, Any], Any]


def multiple_of(x: Any, factor: int) -> Any:
    """Returns ``x``, marked by ``pl.multiple_of`` if it is traced; a static number cannot be marked."""
    return x if isinstance(x, int) else pl.multiple_of(x, factor)


def ceil_div(x: Any, y: int) -> Int[Any, ""]:
    """Returns the quotient, rounded up. ``x`` may be traced."""
    return lax.div(jnp.asarray(x, jnp.int32) + (y - 1), jnp.int32(y))


def row_groups(matmul: Matmul, num_rows: Any) -> Int[Any, ""]:
    """Returns how many row groups hold the first ``num_rows`` rows of lhs. A row group is the row blocks of a cluster.

    Unmasked rows come first, so kernels that visit only these row groups skip the tiles of masked rows.
    """
    return ceil_div(num_rows, matmul.tuning.cluster * ROW_BLOCK)


def next_place(matmul: Matmul, offset: Offset, tile: Tile, number: Any) -> StepPlace:
    """Returns where the operands of step ``number`` begin, if the steps of the contraction are consecutive."""
    k = number * matmul.tuning.tile_k
    return StepPlace(tile.row, k, offset.k + k)


def swizzled(extent: int, itemsize: int) -> tuple[Any, ...]:
    """Returns the transforms of a tile in shared memory, whose minor dimension has ``extent`` columns."""
    swizzle, minor = widest_swizzle(extent, itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, minor)), plgpu.SwizzleTransform(swizzle)


def snake_index(tuning: Tuning, index: Any, row_groups: Any, columns: Any) -> tuple[Any, Any]:
    """Returns the (row group, tile of columns) of a linear index, in the order that reuses operands in L2 most."""
    along = tuning.snake // tuning.cluster if tuning.minor == 0 else tuning.snake
    # The maximum is ``columns`` itself, but LLVM does not know that. Without the maximum, it divides small
    # numbers in 16 bits, for which ptxas calls a function. With a call, wgmmas do not overlap in relocatable code, the
    # code that JAX 0.12 compiles.
    columns = jnp.maximum(jnp.asarray(columns, jnp.int32), -jnp.asarray(row_groups, jnp.int32))
    return plgpu.planar_snake(index, (row_groups, columns), tuning.minor, along)


def turning_snake_index(tuning: Tuning, clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """Returns the (list, tile of columns) of a linear index, if each list is contracted for all tiles of columns.

    The lists are sorted, the longest first. A band of lists runs for one tile of columns, then for the next. Every
    second wave takes the band backwards, so that no cluster gets the longest list in each wave.
    """
    of_list, of_tile = snake_index(tuning, index, lists, tiles)
    along = tuning.snake // tuning.cluster
    band, place = lax.div(of_list, jnp.int32(along)), lax.rem(of_list, jnp.int32(along))
    width = jnp.minimum(jnp.int32(along), lists - band * along)
    tiles_before = jnp.where(lax.rem(band, jnp.int32(2)) == 0, of_tile, tiles - 1 - of_tile)
    begin = band * along * tiles + tiles_before * width
    wave = lax.div(begin + clusters // 2, jnp.int32(clusters))  # the nearest wave
    return band * along + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, width - 1 - place, place), of_tile


def longest_first_index(clusters: int, index: Any, lists: Any, tiles: Any) -> tuple[Any, Any]:
    """Like `turning_snake_index`, but all tiles of a list come before those of the next list."""
    wave, place = lax.div(index, jnp.int32(clusters)), lax.rem(index, jnp.int32(clusters))
    last = jnp.minimum(jnp.int32(clusters), lists * tiles - wave * clusters) - 1
    index = wave * clusters + jnp.where(lax.rem(wave, jnp.int32(2)) == 1, last - place, place)
    return lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))


class Parted(NamedTuple):
    """How `join` groups the tiles of a vocabulary that is cut into parts: no group has tiles of two parts."""

    groups: int  # how many groups a launch has at most
    tiles: int  # how many tiles a part has


def first_column(shape: Geometry, tile: Any) -> Int[Array, ""]:
    """Computes `Geometry.column` in a kernel."""
    return tile * TILE_N - _part(shape, tile) * shape.overhang


def edge(shape: Geometry, tile: Any, num_columns: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the arguments of `mask_padding` for a tile, with columns relative to its part, and where its mask starts.

    The part in which padding begins uses the second mask. In a part that is only padding, every tile is like a tile
    after the one with the first padding column.
    """
    part = _part(shape, tile)
    unpadded = jnp.clip(num_columns - part * shape.part_columns, 0, shape.part_columns)
    column = (tile - part * shape.part_tiles) * TILE_N
    start = jnp.where(unpadded < shape.part_columns, 2 * TILE_N, 0)
    return jnp.where(unpadded > 0, column, TILE_N), unpadded, mask, start


def tiles_of_group(parted: Parted, group: int, first: Any, number: Any, num_tiles: Any) -> tuple[Any, Any]:
    """Returns where a group's tiles begin and stop in a launch. ``first``: the number of the launch's first group."""
    groups = -(-parted.tiles // group)  # how many groups a part has

    def first_tile(of: Any) -> Any:
        return of * group - lax.div(of, jnp.int32(groups)) * (groups * group - parted.tiles)

    begin = first_tile(first + number) - first_tile(first)
    left = parted.tiles - lax.rem(first + number, jnp.int32(groups)) * group
    return begin, jnp.minimum(begin + jnp.minimum(left, group), num_tiles)


def _part(shape: Geometry, tile: Any) -> Int[Array, ""]:
    return lax.div(tile, jnp.int32(shape.part_tiles))
