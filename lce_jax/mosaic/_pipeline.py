"""What the kernels with tensor cores share: the persistent blocks, their walk over tiles, the pipeline of operands.

A block is one memory warpgroup, which copies tiles of both operands into a ring of stages by TMA, and two compute
warpgroups, each with a [64, 256] accumulator: 64 of a tile's 128 rows.

    memory     … wait until stage s is consumed, start its copies; s + 1 …
    compute    … wait until stage s is produced, multiply, hand it back; s + 1 …

The steps are counted through all tiles of a block. So the next tile's operands arrive during the epilogue of the last,
however many steps a tile has. The two warpgroups share every step, a [128, k] tile of lhs and a [256, k] tile of rhs,
and with it the time of their epilogues, when the tensor cores rest; or they take turns, each with steps of its own:

    shared     multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
               multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
    turns      multiply 0 | epilogue 0 | multiply 1 | epilogue 1 …
                (waiting) | multiply 0 | epilogue 0 | multiply 1 …

Nothing but the ring orders the turns: the second warpgroup's operands stand behind those of the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat
from lce_jax._compat import pl, plgpu
from lce_jax._types import Case, Options
from lce_jax.mosaic import _config
from lce_jax.mosaic._config import (
    ATOM_ROWS,
    COMPUTE_WARPGROUPS,
    ROW_BLOCK,
    STAGING_BYTES,
    TILE_N,
    WARPGROUP_ROWS,
    Tiles,
)
from lce_jax.mosaic._operands import LOG2E, RowFactors, Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

MEMORY_REGISTERS = 40  # a thread of the memory warpgroup; the compute warpgroups share the others
COMPUTE_REGISTERS = (512 - MEMORY_REGISTERS) // COMPUTE_WARPGROUPS // 8 * 8
ACCUMULATOR = (WARPGROUP_ROWS, TILE_N)

MATRIX = plgpu.Layout.WGMMA
PER_ROW = MATRIX.reduce(1)
PER_COLUMN = MATRIX.reduce(0)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static part of a kernel: its tiles, and which dimension of lhs and of rhs is contracted."""

    case: Case
    tiles: Tiles
    lhs_k: int
    rhs_k: int


class Tile(NamedTuple):
    """One [128, 256] tile of a product, a contraction of ``num_steps`` steps."""

    row: Int[Array, ""]  # of lhs, and of the result
    column: Int[Array, ""]  # of rhs, wherever its first one is
    num_steps: Any
    first_step: Any = 0
    place: Any = None  # what else the epilogue needs to know

    @property
    def rows(self) -> Any:
        """The 64 rows of this warpgroup."""
        return pl.ds(self.row + lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)


class Origin(NamedTuple):
    """Where in rhs the columns and the contraction begin: multiples of TILE_N."""

    column: Any = 0
    k: Any = 0


type Visit = Callable[[Tile, Any], Any]  # takes a tile and the steps before it, returns the steps up to the next


def walk_tiles(
    matmul: Matmul,
    lhs: Any,
    rhs: Any,
    origin: Origin,
    tiles: Callable[[Visit], Any],
    consume: Callable[[Tile, Callable[[], Float[Array, "64 256"]], Any], None],
    scratch: Any = None,
) -> None:
    """Calls ``consume(tile, multiply, scratch)`` in both compute warpgroups for every tile that ``tiles`` visits.

    ``consume`` loads what its epilogue needs, calls ``multiply()`` for its 64 rows of the product, and uses them.
    ``tiles(visit)`` calls ``visit`` for the block's tiles in order, from 0 steps on, and returns what the last did.
    """

    @functools.partial(pl.run_scoped, ring=_ring(matmul, lhs, rhs), scratch=scratch, collective_axes="wg")
    def run(ring: Any, scratch: Any) -> None:
        def fetch() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def visit(tile: Tile, before: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    _fetch(matmul, ring, lhs, rhs, origin, tile, i, before)

                steps = matmul.tiles.turns * tile.num_steps
                lax.fori_loop(0, steps, step, None)
                return before + steps

            # A block must not leave before its neighbour's copies into it have landed.
            total = tiles(visit)
            first = jnp.maximum(total - matmul.tiles.stages, 0)
            lax.fori_loop(first, total, lambda i, _: plgpu.barrier_wait(ring.consumed.at[_stage(matmul, i)]), None)

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def visit(tile: Tile, before: Any) -> Any:
                consume(tile, lambda: _multiply(matmul, ring, tile, before), scratch)
                return before + matmul.tiles.turns * tile.num_steps

            tiles(visit)

        lax.cond(lax.axis_index("wg") == COMPUTE_WARPGROUPS, fetch, compute)


class Ring(NamedTuple):
    """The stages of a block in shared memory, and their barriers."""

    lhs: Any  # [stages, rows, tile_k], or [stages, tile_k, rows]: 128 rows, 64 where the warpgroups take turns
    rhs: Any  # [stages, tile_k, 256], or [stages, 256, tile_k]
    produced: Any  # a warpgroup sees its own turns alone, so each turn has barriers of its own
    consumed: Any


def _ring(matmul: Matmul, lhs: Any, rhs: Any) -> Ring:
    tiles, itemsize = matmul.tiles, matmul.case.dtype.itemsize
    swizzle = min(_config.minor_tile(operand.shape[1], itemsize)[0] for operand in (lhs, rhs))  # wgmma takes one
    transforms = swizzled(swizzle // itemsize, itemsize)
    rows = ROW_BLOCK // tiles.turns
    lhs_tile = (rows, tiles.tile_k) if matmul.lhs_k == 1 else (tiles.tile_k, rows)
    rhs_tile = (TILE_N, tiles.tile_k) if matmul.rhs_k == 1 else (tiles.tile_k, TILE_N)
    counts = {"num_arrivals": COMPUTE_WARPGROUPS // tiles.turns, "num_barriers": tiles.stages}
    shared = tiles.cluster > 1
    return Ring(
        plgpu.SMEM((tiles.stages, *lhs_tile), lhs.dtype, transforms=transforms),
        plgpu.SMEM((tiles.stages, *rhs_tile), rhs.dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=2, num_barriers=tiles.turns * tiles.stages),
        plgpu.ClusterBarrier(collective_axes=("cluster",), **counts) if shared else plgpu.Barrier(**counts),
    )


def _stage(matmul: Matmul, step: Any) -> Any:
    return lax.rem(step, jnp.int32(matmul.tiles.stages))


def _fetch(matmul: Matmul, ring: Ring, lhs: Any, rhs: Any, origin: Origin, tile: Tile, step: Any, before: Any) -> None:
    """Starts the copies of one step once its stage is free; TMA fills what lies outside with zeros."""
    tiles, stage = matmul.tiles, _stage(matmul, before + step)
    pl.when(before + step >= tiles.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[stage]))
    turn = lax.div(step, jnp.int32(tile.num_steps)) if tiles.turns > 1 else 0
    produced = ring.produced.at[turn * tiles.stages + stage]
    k = (tile.first_step + step - turn * tile.num_steps) * tiles.tile_k
    rows, depth = pl.ds(tile.row + turn * WARPGROUP_ROWS, ROW_BLOCK // tiles.turns), pl.ds(k, tiles.tile_k)
    source = lhs.at[rows, depth] if matmul.lhs_k == 1 else lhs.at[depth, rows]
    plgpu.copy_gmem_to_smem(source, ring.lhs.at[stage], produced)
    columns = pl.ds(pl.multiple_of(origin.column + tile.column, TILE_N), TILE_N)
    depth = pl.ds(pl.multiple_of(origin.k + k, tiles.tile_k), tiles.tile_k)
    source = rhs.at[columns, depth] if matmul.rhs_k == 1 else rhs.at[depth, columns]
    shared = "cluster" if tiles.cluster > 1 else None  # each block of a cluster fetches its part for all
    plgpu.copy_gmem_to_smem(source, ring.rhs.at[stage], produced, collective_axes=shared)


def _multiply(matmul: Matmul, ring: Ring, tile: Tile, before: Any) -> Float[Array, "64 256"]:
    """This warpgroup's part of a tile."""
    tiles, warpgroup = matmul.tiles, lax.axis_index("wg")
    in_flight = tiles.in_flight
    turn, part = (warpgroup, 0) if tiles.turns > 1 else (0, warpgroup)  # of the tile's steps, of a step's rows
    rows = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
    before = before + turn * tile.num_steps

    def release(step: Any) -> None:
        plgpu.barrier_arrive(ring.consumed.at[_stage(matmul, before + step)])

    @functools.partial(pl.run_scoped, accumulator=plgpu.ACC(ACCUMULATOR, jnp.float32))
    def product(accumulator: Any) -> Any:
        def step(i: Any, _: None) -> None:
            stage = _stage(matmul, before + i)
            plgpu.barrier_wait(ring.produced.at[turn * tiles.stages + stage])
            lhs = ring.lhs.at[stage, rows, :] if matmul.lhs_k == 1 else ring.lhs.at[stage, :, rows].T
            rhs = ring.rhs.at[stage].T if matmul.rhs_k == 1 else ring.rhs.at[stage]
            plgpu.wgmma(accumulator, lhs, rhs)
            plgpu.wgmma_wait(in_flight)
            if in_flight:
                pl.when(i > 0)(lambda: release(i - 1))
            else:
                release(i)

        lax.fori_loop(0, tile.num_steps, step, None)
        if in_flight:
            plgpu.wgmma_wait(0)
            pl.when(jnp.int32(tile.num_steps) > 0)(lambda: release(tile.num_steps - 1))
        return accumulator[...]

    return product


def snake_index(tiles: Tiles, index: Any, rows: Any, columns: Any) -> tuple[Any, Any]:
    """The (row group, column) of a linear index, in the order that reuses the most of L2."""
    along = tiles.snake // tiles.cluster if tiles.minor == 0 else tiles.snake
    return plgpu.planar_snake(index, (rows, columns), tiles.minor, along)


class Place(NamedTuple):
    """Where a tile of logits stands."""

    row_block: Int[Array, ""]
    position: Int[Array, ""]  # of the vocabulary tile, in the launch


def logits(case: Case, kernel: str) -> Matmul:
    """The static part of a kernel that walks over logits: the product hidden · weightᵀ."""
    return Matmul(case, _config.tiles(case, kernel), 1, 1 - case.options.vocab_dim)


def walk_logits(matmul: Matmul, hidden: Any, weight: Any, span: Span, consume: Any, scratch: Any) -> None:
    """`walk_tiles` over the logits of the live row groups and the span's vocabulary tiles."""
    tiles, groups = matmul.tiles, row_groups(matmul, span.num_rows)
    num_steps = -(-matmul.case.hidden_size // tiles.tile_k)

    def visit_all(visit: Visit) -> Any:
        def tile(info: Any, carry: Any) -> Any:
            group, position = snake_index(tiles, info.index[0], groups, span.num_tiles)
            row_block = group * tiles.cluster + lax.axis_index("cluster")
            place = Place(row_block, position)
            return visit(Tile(row_block * ROW_BLOCK, position * TILE_N, num_steps, place=place), carry)

        return plgpu.nd_loop((groups * span.num_tiles,), collective_axes="sm", init_carry=jnp.int32(0))(tile)

    walk_tiles(matmul, hidden, weight, Origin(column=span.origin), visit_all, consume, scratch)


def ceil_div(x: Any, y: int) -> Int[Array, ""]:
    """The least number of ``y`` that hold ``x``, in a kernel too."""
    return lax.div(jnp.asarray(x, jnp.int32) + (y - 1), jnp.int32(y))


def row_groups(matmul: Matmul, num_rows: Any) -> Int[Array, ""]:
    """The clusters of row blocks that hold the first ``num_rows`` rows of lhs."""
    return ceil_div(num_rows, matmul.tiles.cluster * ROW_BLOCK)


def kernel(
    matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, interpret: Any, **more: Any
) -> Callable:
    """``body`` on every multiprocessor: its cluster "sm", its place there "cluster", its warpgroups "wg"."""
    return _compat.mosaic_kernel(
        body,
        out_type=outputs,
        grid=(matmul.case.device.core_count // matmul.tiles.cluster,),
        grid_names=("sm",),
        cluster=(matmul.tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No thread reads back what it wrote to shared memory, which is what automatic barriers are for.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # row sums need shuffles within four lanes only
        ),
        kernel_name=name,
        interpret=interpret,
        **more,
    )


def swizzled(extent: int, itemsize: int) -> tuple[Any, ...]:
    """The transforms of a shared-memory tile whose minor dimension runs over ``extent`` columns of GMEM."""
    swizzle, minor = _config.minor_tile(extent, itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, minor)), plgpu.SwizzleTransform(swizzle)


def staging(matmul: Matmul, columns: int, dtype: Any) -> Any:
    """Shared memory through which an epilogue sends a [T, columns] output: the slots of each compute warpgroup."""
    itemsize = jnp.dtype(dtype).itemsize
    width = STAGING_BYTES // itemsize
    slots = matmul.tiles.slots if columns > width else 1  # `send` sends one block of a tile there
    shape = (COMPUTE_WARPGROUPS, slots, WARPGROUP_ROWS, width)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(columns, itemsize))


def send(
    values: Float[Array, "64 n"], block: int, slots: Any, rows: Any, output: Any, column: Any, add: bool = False
) -> None:
    """Rounds a block of columns and copies it to ``output[rows, column:]``, or adds it there.

    TMA drops what lies outside.
    """
    count, width = slots.shape[1], slots.shape[3]
    if block > 0 and output.shape[1] <= width:
        return  # Mosaic (0.11.2, 0.12.0) would write over block 0: it drops the index into a dimension of one block
    slot = slots.at[lax.axis_index("wg"), block % count]
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    slot[...] = values.astype(output.dtype)
    plgpu.commit_smem()
    columns = pl.ds(pl.multiple_of(column, width), width)
    plgpu.copy_smem_to_gmem(slot, output.at[rows, columns], reduction_op="add" if add else None)


def load_rows(ref: Any, rows: Any) -> Float[Array, "64"]:
    """The part of a per-token vector for a slice of 64 tokens, from GMEM."""
    return plgpu.load(ref.at[rows], layout=PER_ROW, optimized=False)


def load_factors(factors: Any, rows: Any) -> RowFactors:
    """That part of the stacked `RowFactors`."""
    shift, target, constant = (load_rows(factors.at[i], rows) for i in range(3))
    return RowFactors(shift, target, constant, load_rows(factors.at[3], rows) if factors.shape[0] == 4 else None)


def along_rows(values: Float[Array, "64"], columns: int = TILE_N) -> Float[Array, "64 n"]:
    """One value per row, broadcast."""
    return lax.broadcast_in_dim(values, (WARPGROUP_ROWS, columns), (0,))


def without_padding(z: Float[Array, "64 256"], column: Any, num_columns: Any, mask: Any, value: float) -> Any:
    """The tile with ``value`` on its padding columns, whatever they held.

    Only a tile that holds padding looks. The mask says it for the ragged tile, then for a tile of nothing but padding:
    a comparison with an iota would cost every tile, for the compiler hoists it out of the branch.
    """

    def replace() -> Array:
        ragged = lax.div(num_columns, TILE_N) * TILE_N
        start = jnp.clip(column - ragged, 0, TILE_N)
        padding = plgpu.load(mask.at[pl.ds(start, TILE_N)], layout=PER_COLUMN, optimized=False)
        padding = lax.broadcast_in_dim(padding, ACCUMULATOR, (1,))
        return jnp.where(padding > 0, value, z)

    return lax.cond(column + TILE_N > num_columns, replace, lambda: z)


def softcap(z: Any, cap: float, options: Options) -> Any:
    """The tanh of eq. 0, to the last digits of fp32: the hardware's own tanh has eleven bits."""
    return 1.0 - 2.0 / (jnp.exp2(z * (2.0 * LOG2E * options.logit_scale / cap)) + 1.0)
