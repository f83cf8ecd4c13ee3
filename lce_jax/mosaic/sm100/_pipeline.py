"""What the kernels with tensor cores share: the persistent blocks, their walk over tiles, the pipeline of operands.

A block is two warpgroups. In the first, one warp copies tiles of both operands into a ring of stages by TMA, and one
warp issues the products into tensor memory (TMEM). The second warpgroup has the epilogue. Each of the three walks over
all tiles of the block by itself, so copies run ahead across tiles. Two accumulators take turns:

    copies     steps of tile 0 | steps of tile 1 | steps of tile 2 …     as far ahead as there are stages
    products     tile 0 → slot 0 | tile 1 → slot 1 | tile 2 → slot 0 …   once that is drained
    epilogue                     | slot 0          | slot 1 …

Four sets of barriers order them. ``full``: a stage holds its operands. ``empty``: the products that read it are done.
``done``: a tile's products are. ``drained``: the epilogue has read the accumulator.

In a cluster two blocks multiply together: each has its 128 rows of lhs and half of rhs in shared memory, the first one
issues for both, and each reads its own rows of the result. Both halves of rhs are read by both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._machine import Matmul, Offset, Tile, VisitAll, multiple_of, next_place, swizzled
from lce_jax.mosaic.common._tiles import ROW_BLOCK
from lce_jax.mosaic.sm100._hardware import ACCUMULATORS, WARPGROUPS

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


class Before(NamedTuple):
    """What a walk carries from tile to tile."""

    steps: Any
    tiles: Any

    def __add__(self, num_steps: Any) -> Before:
        """After one more tile of so many steps."""
        return Before(self.steps + num_steps, self.tiles + 1)

    @classmethod
    def zero(cls) -> Before:
        """Before the first tile."""
        return cls(jnp.int32(0), jnp.int32(0))


class Product(NamedTuple):
    """A tile in tensor memory, all of its products done."""

    accumulator: Any  # [128, tile_n]
    drained: Any
    num_steps: Any

    def load(self, start: Any, width: int, layout: Any) -> Float[Array, "128 width"]:
        """Some of its columns, in registers."""
        return plgpu.async_load_tmem(self.accumulator.at[:, pl.ds(start, width)], layout=layout)

    def release(self) -> None:
        """Nothing of it is read after this."""
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(self.drained)


def walk_tiles(
    matmul: Matmul,
    lhs: Any,
    rhs: Any,
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Callable[[], Product], Any], None],
    scratch: Any = None,
) -> None:
    """Calls ``consume(tile, multiply, scratch)`` in the epilogue's warpgroup for every tile that ``visit_all`` visits.

    ``consume`` loads what its epilogue needs, calls ``multiply()`` for the tile, reads it and releases it.
    """

    @functools.partial(pl.run_scoped, ring=_ring(matmul, lhs, rhs), scratch=scratch, collective_axes="wg")
    def run(ring: Ring, scratch: Any) -> None:
        def copy_and_issue() -> None:
            tuning = matmul.tuning
            # A warp cannot say it, but knows what was said before.
            known = Offset(multiple_of(offset.column, tuning.tile_n), multiple_of(offset.k, tuning.tile_k))

            def work(warp: Any) -> None:
                pl.when(warp == 0)(lambda: _copy_all(matmul, ring, lhs, rhs, known, visit_all))
                pl.when(warp == 1)(lambda: _multiply_all(matmul, ring, visit_all))

            plgpu.warp_map(work)

        def drain() -> None:
            def visit(tile: Tile, before: Before) -> Before:
                def multiply() -> Product:
                    slot, accumulator = _accumulator(matmul, ring, before)
                    plgpu.barrier_wait(ring.done.at[slot])
                    return Product(accumulator, ring.drained.at[slot], tile.num_steps)

                consume(tile, multiply, scratch)
                return before + tile.num_steps

            visit_all(visit, Before.zero())

        lax.cond(lax.axis_index("wg") == 0, copy_and_issue, drain)


class Ring(NamedTuple):
    """The stages of a block in shared memory, its accumulators in tensor memory, and their barriers."""

    lhs: Any  # [stages, 128, tile_k], or [stages, tile_k, 128]
    rhs: Any  # [stages, tile_k, n], or [stages, n, tile_k]: n is half of a tile's columns where two blocks share them
    accumulators: Any  # [128, ACCUMULATORS · tile_n]
    full: Any
    empty: Any
    done: Any
    drained: Any


def _ring(matmul: Matmul, lhs: Any, rhs: Any) -> Ring:
    tuning, itemsize = matmul.tuning, matmul.case.dtype.itemsize
    columns, pair = tuning.tile_n // tuning.cluster, tuning.cluster > 1
    lhs_tile = (ROW_BLOCK, tuning.tile_k) if matmul.lhs_k == 1 else (tuning.tile_k, ROW_BLOCK)
    rhs_tile = (columns, tuning.tile_k) if matmul.rhs_k == 1 else (tuning.tile_k, columns)
    ordered = {"num_arrivals": 1, "orders_tensor_core": True}
    accumulators = {"num_barriers": ACCUMULATORS, **ordered}
    return Ring(
        lhs=plgpu.SMEM((tuning.stages, *lhs_tile), lhs.dtype, transforms=swizzled(lhs.shape[1], itemsize)),
        rhs=plgpu.SMEM((tuning.stages, *rhs_tile), rhs.dtype, transforms=swizzled(rhs.shape[1], itemsize)),
        accumulators=plgpu.TMEM((ROW_BLOCK, ACCUMULATORS * tuning.tile_n), jnp.float32, collective=pair),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tuning.stages),
        empty=plgpu.Barrier(num_barriers=tuning.stages, **ordered),
        done=plgpu.Barrier(**accumulators),
        drained=plgpu.ClusterBarrier(collective_axes=("cluster",), **accumulators)
        if pair
        else plgpu.Barrier(**accumulators),
    )


def _stage(matmul: Matmul, step: Any) -> Any:
    return lax.rem(step, jnp.int32(matmul.tuning.stages))


def _accumulator(matmul: Matmul, ring: Ring, before: Before) -> tuple[Any, Any]:
    """The slot of a tile's accumulator, and the accumulator."""
    slot, tile_n = lax.rem(before.tiles, jnp.int32(ACCUMULATORS)), matmul.tuning.tile_n
    return slot, ring.accumulators.at[:, pl.ds(slot * tile_n, tile_n)]


def _copy_all(matmul: Matmul, ring: Ring, lhs: Any, rhs: Any, offset: Offset, visit_all: VisitAll) -> None:
    """Starts the copies of every step once its stage is empty; TMA fills what lies outside with zeros."""

    def visit(tile: Tile, before: Before) -> Before:
        def step(i: Any, _: None) -> None:
            _copy(matmul, ring, lhs, rhs, offset, tile, i, before.steps + i)

        lax.fori_loop(0, tile.num_steps, step, None)
        return before + tile.num_steps

    total = visit_all(visit, Before.zero()).steps
    # A block must not exit before the products that read its operands, which its neighbour may have issued, are done.
    first = jnp.maximum(total - matmul.tuning.stages, 0)
    lax.fori_loop(first, total, lambda i, _: plgpu.barrier_wait(ring.empty.at[_stage(matmul, i)]), None)


def _copy(matmul: Matmul, ring: Ring, lhs: Any, rhs: Any, offset: Offset, tile: Tile, number: Any, step: Any) -> None:
    tuning, stage = matmul.tuning, _stage(matmul, step)
    number = tile.first_step + number
    place = next_place(matmul, offset, tile, number) if tile.locate is None else tile.locate(number)
    pl.when(step >= tuning.stages)(lambda: plgpu.barrier_wait(ring.empty.at[stage]))
    first_row = place.row - lax.axis_index("cluster") * ROW_BLOCK if tuning.cluster > 1 else place.row
    rows, depth = pl.ds(first_row, tuning.cluster * ROW_BLOCK), pl.ds(place.lhs_k, tuning.tile_k)
    source, split = (lhs.at[rows, depth], 0) if matmul.lhs_k == 1 else (lhs.at[depth, rows], 1)
    plgpu.copy_gmem_to_smem(source, ring.lhs.at[stage], ring.full.at[stage], **_half(matmul, split))
    columns = pl.ds(offset.column + tile.column, tuning.tile_n)
    depth = pl.ds(place.rhs_k, tuning.tile_k)
    source, split = (rhs.at[columns, depth], 0) if matmul.rhs_k == 1 else (rhs.at[depth, columns], 1)
    plgpu.copy_gmem_to_smem(source, ring.rhs.at[stage], ring.full.at[stage], **_half(matmul, split))


def _half(matmul: Matmul, dim: int) -> dict[str, Any]:
    """Of a pair, each block gets half of what is copied, and the barrier of the first one counts both."""
    if matmul.tuning.cluster == 1:
        return {}
    return {"collective_axes": "cluster", "leader_tracked": plgpu.CopyPartition.PARTITIONED(dim)}


def _multiply_all(matmul: Matmul, ring: Ring, visit_all: VisitAll) -> None:
    """Issues every tile's products once its accumulator is drained, by the first block of a pair for both."""
    axis = "cluster" if matmul.tuning.cluster > 1 else None

    def visit(tile: Tile, before: Before) -> Before:
        slot, accumulator = _accumulator(matmul, ring, before)
        pl.when(before.tiles >= ACCUMULATORS)(lambda: plgpu.barrier_wait(ring.drained.at[slot]))

        def step(i: Any, _: None) -> None:
            stage = _stage(matmul, before.steps + i)
            plgpu.barrier_wait(ring.full.at[stage])
            lhs = ring.lhs.at[stage] if matmul.lhs_k == 1 else ring.lhs.at[stage].T
            rhs = ring.rhs.at[stage].T if matmul.rhs_k == 1 else ring.rhs.at[stage]
            plgpu.tcgen05_mma(accumulator, lhs, rhs, ring.empty.at[stage], accumulate=i > 0, collective_axis=axis)

        def issue() -> None:
            lax.fori_loop(0, tile.num_steps, step, None)
            plgpu.tcgen05_commit_arrive(ring.done.at[slot], collective_axis=axis)

        pl.when(lax.axis_index("cluster") == 0)(issue)
        return before + tile.num_steps

    total = visit_all(visit, Before.zero()).tiles
    # A block must not exit before its neighbour has arrived at its barriers for the last time.
    first, slots = jnp.maximum(total - ACCUMULATORS, 0), jnp.int32(ACCUMULATORS)
    lax.fori_loop(first, total, lambda i, _: plgpu.barrier_wait(ring.drained.at[lax.rem(i, slots)]), None)


def kernel(matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, **more: Any) -> Callable:
    """``body`` on every multiprocessor. Axes: "sm" is the cluster, "cluster" the block in it, "wg" the warpgroup."""
    return _pallas.kernel(
        body,
        out_type=outputs,
        grid=(matmul.clusters,),
        grid_names=("sm",),
        cluster=(matmul.tuning.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Automatic barriers are for threads that read back what they wrote to shared memory. None here does.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # a thread holds whole rows
        ),
        kernel_name=name,
        **more,
    )
