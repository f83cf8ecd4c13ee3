"""What both kernels share: the persistent grid, the walk over tiles of hidden·weightᵀ, and its operand pipeline.

A block is one memory warpgroup, which keeps the operand stages full by TMA, and two compute warpgroups, each with a
[64, 256] accumulator: 64 rows of the same 256 vocabulary columns. The memory warpgroup runs on into the next tile
while the compute warpgroups are in the epilogue of the last.
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
    STAGING_COLUMNS,
    STAGING_SLOTS,
    TILE_N,
    WARPGROUP_ROWS,
    Tiles,
)
from lce_jax.mosaic._operands import LOG2E

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

MEMORY_REGISTERS = 40  # a thread of the memory warpgroup; the compute warpgroups share the others
ACCUMULATOR = (WARPGROUP_ROWS, TILE_N)

MATRIX = plgpu.Layout.WGMMA
PER_ROW = MATRIX.reduce(1)
PER_COLUMN = MATRIX.reduce(0)


@dataclasses.dataclass(frozen=True)
class Grid:
    """One launch: tiles [first_tile, first_tile + num_tiles) of the vocabulary, ``walk`` of them per unit of work."""

    case: Case
    tiles: Tiles
    num_tiles: int
    walk: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of a product over H."""
        return self.case.hidden_size // self.tiles.tile_k

    @property
    def stages(self) -> int:
        """Operand buffers: no more than there are steps."""
        return min(self.tiles.stages, self.num_steps)

    @property
    def num_units(self) -> int:
        """Units of work per row block."""
        return -(-self.num_tiles // self.walk)

    @property
    def row_groups(self) -> int:
        """Row blocks, or pairs of them where two kernel blocks share their vocabulary tile."""
        return -(-_config.geometry(self.case).row_blocks // self.tiles.cluster)

    @property
    def num_clusters(self) -> int:
        """Clusters of kernel blocks that run at a time."""
        return self.case.core_count // self.tiles.cluster

    @property
    def least_groups(self) -> int:
        """The fewest row groups that give every cluster the two tiles that overlapping needs."""
        return -(-2 * self.num_clusters // self.num_units)

    @property
    def overlaps(self) -> bool:
        """Whether the operands of a tile are fetched during the epilogue of the one before."""
        return _config.steps_divide(self.case, self.tiles) and self.least_groups <= self.row_groups


class Tile(NamedTuple):
    """Where a warpgroup's accumulator lies."""

    row_block: Int[Array, ""]
    position: Int[Array, ""]  # of the vocabulary tile, in the launch
    step: Int[Array, ""] | int  # in its unit of work
    unit: Int[Array, ""]
    rows: Any  # slice of 64 tokens
    column: Int[Array, ""]  # the first, in the launch
    warpgroup: Int[Array, ""]


def walk_tiles(
    grid: Grid,
    hidden: Any,  # [T, H] in GMEM
    weight: Any,  # [V, H] or [H, V] in GMEM
    first_column: Any,
    live_groups: Any,
    context: Callable[[Tile, Callable[[], Float[Array, "64 256"]], Any], None],
    scratch: Any,
) -> None:
    """Calls ``context(tile, multiply, scratch)`` for every tile of the live row groups.

    ``context`` loads what its epilogue needs, calls ``multiply()`` for the tile's raw products, and consumes them.
    """
    by_vocab = grid.case.options.vocab_dim == 0

    def ignore(*_: Any) -> None: ...

    @functools.partial(
        pl.run_scoped,
        buffers=_operand_pipeline(grid, ignore, ignore, None).get_allocations(hidden, weight),
        scratch=scratch,
        collective_axes="wg",
    )
    def scope(buffers: Any, scratch: Any) -> None:
        warpgroup = lax.axis_index("wg")

        def unit(info: Any) -> None:
            group, unit = plgpu.planar_snake(
                info.index[0], (live_groups, grid.num_units), grid.tiles.minor, grid.tiles.snake
            )
            row_block = group * grid.tiles.cluster + lax.axis_index("cluster")
            first_row = row_block * ROW_BLOCK
            length = jnp.minimum(grid.walk, grid.num_tiles - unit * grid.walk)

            def step(i: Any) -> None:
                index = unit * grid.walk + i
                column = index * TILE_N
                tile = Tile(
                    row_block=row_block,
                    position=index,
                    step=i,
                    unit=unit,
                    rows=pl.ds(first_row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS),
                    column=column,
                    warpgroup=warpgroup,
                )
                columns = pl.ds(pl.multiple_of(first_column + column, ATOM_ROWS), TILE_N)
                pipeline = _operand_pipeline(
                    grid,
                    functools.partial(_multiply_step, grid, warpgroup),
                    lambda run: context(tile, functools.partial(_multiply, run), scratch),
                    _pipeline_state(info, i, length) if grid.overlaps else None,
                )
                pipeline(
                    hidden.at[pl.ds(first_row, ROW_BLOCK), :],
                    weight.at[columns, :] if by_vocab else weight.at[:, columns],
                    allocations=buffers,
                )

            if grid.walk == 1:
                step(0)
            else:
                lax.fori_loop(0, length, lambda i, _: step(i), None)

        plgpu.nd_loop((live_groups * grid.num_units,), collective_axes="sm")(unit)


def _operand_pipeline(grid: Grid, body: Any, context: Any, state: Any) -> Any:
    """The loop over H: the memory warpgroup's copies and the compute warpgroups' products."""
    tile_k, itemsize = grid.tiles.tile_k, grid.case.dtype.itemsize
    if grid.case.options.vocab_dim == 0:
        weight_block, weight_index, minor = (TILE_N, tile_k), (lambda k: (0, k)), tile_k
    else:
        weight_block, weight_index, minor = (tile_k, TILE_N), (lambda k: (k, 0)), grid.case.vocab_size
    transforms = swizzled(minor, itemsize)  # of both: wgmma takes one swizzle
    spec = functools.partial(plgpu.BlockSpec, memory_space=plgpu.SMEM, transforms=transforms)
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(grid.num_steps,),
        in_specs=[
            spec((ROW_BLOCK, tile_k), lambda k: (0, k)),
            spec(weight_block, weight_index, collective_axes=("cluster",) if grid.tiles.cluster > 1 else ()),
        ],
        memory_registers=MEMORY_REGISTERS,
        max_concurrent_steps=grid.stages,
        wg_axis="wg",
        num_compute_wgs=COMPUTE_WARPGROUPS,
        compute_context=context,
        pipeline_state=state,
    )


def _multiply(run_pipeline: Callable[[Any], Any]) -> Float[Array, "64 256"]:
    """The raw products of a tile, once the pipeline has run over H."""

    @functools.partial(pl.run_scoped, accumulator=plgpu.ACC(ACCUMULATOR, jnp.float32))
    def product(accumulator: Any) -> Any:
        run_pipeline(accumulator)
        return accumulator[...]

    return product


def _multiply_step(grid: Grid, warpgroup: Any, _: Any, hidden: Any, weight: Any, accumulator: Any) -> Any:
    """One step over H. Leaving its product in flight measured no faster: the other warpgroup fills the gap."""
    rows = hidden.at[pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
    plgpu.wgmma(accumulator, rows, weight.T if grid.case.options.vocab_dim == 0 else weight)
    plgpu.wgmma_wait(0)
    return accumulator


def _pipeline_state(info: Any, step: Any, length: Any) -> Any:
    """START for a block's first tile, STOP for its last, STEADY between."""
    state = plgpu.PipelinePipeline
    first = (info.local_index == 0) & (step == 0)
    last = (info.local_index == info.num_local_steps - 1) & (step == length - 1)
    return jnp.where(last, jnp.int32(state.STOP), jnp.where(first, jnp.int32(state.START), jnp.int32(state.STEADY)))


def swizzled(extent: int, itemsize: int) -> tuple[Any, ...]:
    """The transforms of a shared-memory tile whose minor dimension runs over ``extent`` columns of GMEM."""
    swizzle, minor = _config.minor_tile(extent, itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, minor)), plgpu.SwizzleTransform(swizzle)


def staging(columns: int, dtype: Any) -> Any:
    """Shared memory through which an epilogue sends a [T, columns] output: two slots per compute warpgroup."""
    shape = (COMPUTE_WARPGROUPS, STAGING_SLOTS, WARPGROUP_ROWS, STAGING_COLUMNS)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(columns, jnp.dtype(dtype).itemsize))


def send(values: Float[Array, "64 64"], slot: int, slots: Any, tile: Tile, output: Any, column: Any) -> None:
    """Rounds a block of columns and copies it to ``output[rows, column:]``; TMA drops what lies outside."""
    plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
    slots[tile.warpgroup, slot] = values.astype(output.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slots.at[tile.warpgroup, slot], output.at[tile.rows, pl.ds(column, STAGING_COLUMNS)])


def launch(body: Callable, outputs: list[jax.ShapeDtypeStruct], grid: Grid, name: str, interpret: Any) -> Callable:
    """The kernel on every multiprocessor."""
    return _compat.mosaic_kernel(
        body,
        out_type=outputs,
        grid=(grid.num_clusters,),
        grid_names=("sm",),
        cluster=(grid.tiles.cluster,),
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
    )


def load_rows(ref: Any, rows: Any) -> Float[Array, "64"]:
    """The part of a per-token vector for a slice of 64 tokens, from GMEM."""
    return plgpu.load(ref.at[rows], layout=PER_ROW, optimized=False)


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


def live_groups(grid: Grid, num_rows: Int[Array, ""] | None) -> Int[Array, ""]:
    """The row groups to compute: those with live rows, but no fewer than overlapping needs."""
    if num_rows is None:
        return jnp.int32(grid.row_groups)
    least = grid.least_groups if grid.overlaps else 0
    return jnp.maximum(-(-num_rows // (grid.tiles.cluster * ROW_BLOCK)), least).astype(jnp.int32)
