"""What the kernels with tensor cores share: the persistent blocks, their walk over tiles, the pipeline of operands.

A block is one memory warpgroup, which copies tiles of both operands into a ring of stages by TMA, and two compute
warpgroups, each with a [64, n] accumulator: 64 of a tile's 128 rows. n is 256, or 192 in products that fill such tiles.

    memory     … wait until stage s is consumed, start its copies; s + 1 …
    compute    … wait until stage s is produced, multiply, hand it back; s + 1 …

The steps are counted through all tiles of a block. So the next tile's operands arrive during the epilogue of the tile
before it, however many steps a tile has. The two warpgroups share every step, a [128, k] tile of lhs and an [n, k]
tile of rhs. Then their epilogues run at the same time too, while the tensor cores idle. Or they take turns, each with
steps of its own:

    shared     multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
               multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
    turns      multiply 0 | epilogue 0 | multiply 1 | epilogue 1 …
                (waiting) | multiply 0 | epilogue 0 | multiply 1 …

Nothing but the ring orders the turns: the second warpgroup's operands come after those of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tiles import (
    ROW_BLOCK,
    Matmul,
    Offset,
    Product,
    Tile,
    VisitAll,
    multiple_of,
    next_place,
    swizzled,
    widest_swizzle,
)
from lce_jax.mosaic.sm90._tuning import COMPUTE_REGISTERS, COMPUTE_WARPGROUPS, MEMORY_REGISTERS, WARPGROUP_ROWS, Tuning

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


def walk_tiles(
    matmul: Matmul,
    lhs: Any,
    rhs: Any,
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Callable[[], Float[Array, "64 n"]], Any], None],
    scratch: Any = None,
    beside: Any = None,
) -> None:
    """Calls ``consume(tile, multiply, scratch)`` in both compute warpgroups for every tile that ``visit_all`` visits.

    ``consume`` loads what its epilogue needs, calls ``multiply()`` for its 64 rows of the product, and uses them.
    """
    one = [Product(matmul, lhs, rhs, beside=beside)]
    walk_products(one, offset, visit_all, lambda tile, multiply, own: consume(tile, multiply[0], own), scratch)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the epilogues' stores


def walk_products(
    products: Sequence[Product],
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Sequence[Callable[[], Float[Array, "64 n"]]], Any], None],
    scratch: Any = None,
) -> None:
    """`walk_tiles` with several products of each tile, which ``consume`` must ask for in turn.

    What ``visit_all`` carries from tile to tile are the steps before it. The products have one tuning.
    """
    matmul = products[0].matmul

    @functools.partial(pl.run_scoped, ring=ring_of(*products[0][:3]), scratch=scratch, collective_axes="wg")
    def run(ring: Any, scratch: Any) -> None:
        def fetch() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def visit(tile: Tile, before: Any) -> Any:
                for product in products:
                    step = functools.partial(fetch_step, product, ring, offset, product.part(tile), before)
                    lax.fori_loop(0, _steps(product, tile), step, None)
                    before = before + _steps(product, tile)
                return before

            # A block must not exit before its neighbour's copies into it have landed.
            wait_for_last(matmul, ring, visit_all(visit, jnp.int32(0)))

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def visit(tile: Tile, before: Any) -> Any:
                multiply = [functools.partial(_multiply, products, i, ring, tile, before) for i in range(len(products))]
                consume(tile, multiply, scratch)
                return steps_before(products, len(products), tile, before)

            visit_all(visit, jnp.int32(0))

        lax.cond(lax.axis_index("wg") == COMPUTE_WARPGROUPS, fetch, compute)


def _steps(product: Product, tile: Tile) -> Any:
    """Those of a block in a product of a tile."""
    return product.matmul.tuning.turns * product.part(tile).num_steps


def steps_before(products: Sequence[Product], number: int, tile: Tile, before: Any) -> Any:
    """Those before a product of a tile, ``before`` being those before the tile."""
    return functools.reduce(lambda total, product: total + _steps(product, tile), products[:number], before)


class Ring(NamedTuple):
    """The stages of a block in shared memory, and their barriers."""

    lhs: Any  # [stages, rows, tile_k], or [stages, tile_k, rows]: 128 rows, 64 where the warpgroups take turns
    rhs: Any  # [stages, tile_k, n], or [stages, n, tile_k]
    produced: Any  # one set of barriers per turn, because a warpgroup waits for its own turns only
    consumed: Any


def ring_of(matmul: Matmul, lhs: Any, rhs: Any) -> Ring:
    """The stages of a product."""
    tuning, itemsize = matmul.tuning, matmul.case.dtype.itemsize
    swizzles = [widest_swizzle(operand.shape[1], itemsize)[0] for operand in (lhs, rhs)]
    if matmul.lhs_k == 1 or matmul.rhs_k == 1:
        swizzles.append(tuning.tile_k * itemsize)
    swizzle = min(swizzles)  # wgmma takes one
    transforms = swizzled(swizzle // itemsize, itemsize)
    rows = ROW_BLOCK // tuning.turns
    lhs_tile = (rows, tuning.tile_k) if matmul.lhs_k == 1 else (tuning.tile_k, rows)
    rhs_tile = (tuning.tile_n, tuning.tile_k) if matmul.rhs_k == 1 else (tuning.tile_k, tuning.tile_n)
    counts = {"num_arrivals": COMPUTE_WARPGROUPS // tuning.turns, "num_barriers": tuning.stages}
    shared = tuning.cluster > 1
    return Ring(
        plgpu.SMEM((tuning.stages, *lhs_tile), lhs.dtype, transforms=transforms),
        plgpu.SMEM((tuning.stages, *rhs_tile), rhs.dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=2, num_barriers=tuning.turns * tuning.stages),
        plgpu.ClusterBarrier(collective_axes=("cluster",), **counts) if shared else plgpu.Barrier(**counts),
    )


def stage_of(matmul: Matmul, step: Any) -> Any:
    """That of a step, counted through all tiles. None is negative, which the compiler does not know of itself."""
    return lax.rem(jnp.asarray(step, jnp.int32).astype(jnp.uint32), jnp.uint32(matmul.tuning.stages)).astype(jnp.int32)


def wait_for_last(matmul: Matmul, ring: Ring, total: Any) -> None:
    """Until the last of so many steps are done, whose stages nothing has taken since."""
    first = jnp.maximum(total - matmul.tuning.stages, 0)
    lax.fori_loop(first, total, lambda i, _: plgpu.barrier_wait(ring.consumed.at[stage_of(matmul, i)]), None)


def fetch_step(product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any, step: Any, _: None) -> None:
    """Starts the copies of one step once its stage is free; TMA fills what lies outside with zeros."""
    matmul, lhs = product[:2]
    tuning, stage = matmul.tuning, stage_of(matmul, before + step)
    found = None if tile.locate is None else tile.locate(_of_turn(tuning, tile, step)[1])  # while the stage is in use
    pl.when(before + step >= tuning.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[stage]))
    turn, number = _of_turn(tuning, tile, step)
    produced = ring.produced.at[turn * tuning.stages + stage]
    place = next_place(matmul, offset, tile, number) if found is None else found
    rows, depth = pl.ds(place.row + turn * WARPGROUP_ROWS, ROW_BLOCK // tuning.turns), pl.ds(place.lhs_k, tuning.tile_k)
    source = lhs.at[rows, depth] if matmul.lhs_k == 1 else lhs.at[depth, rows]
    shared = "cluster" if tuning.cluster > 1 else None  # each block of a cluster fetches one part for all of them
    plgpu.copy_gmem_to_smem(source, ring.lhs.at[stage], produced, collective_axes=shared if matmul.shares_lhs else None)
    columns = pl.ds(multiple_of(offset.column + tile.column, matmul.column_grain), tuning.tile_n)
    shared = None if matmul.shares_lhs else shared

    def copy(rhs: Any, k: Any) -> None:
        depth = pl.ds(pl.multiple_of(k, tuning.tile_k), tuning.tile_k)
        source = rhs.at[columns, depth] if matmul.rhs_k == 1 else rhs.at[depth, columns]
        plgpu.copy_gmem_to_smem(source, ring.rhs.at[stage], produced, collective_axes=shared)

    product.copy_rhs(place.rhs_k, copy)


def _of_turn(tuning: Tuning, tile: Tile, step: Any) -> tuple[Any, Any]:
    """Which warpgroup's turn a step is in, and its number in the contraction."""
    turn = lax.div(step, jnp.int32(tile.num_steps)) if tuning.turns > 1 else 0
    return turn, tile.first_step + step - turn * tile.num_steps


def _multiply(products: Sequence[Product], number: int, ring: Ring, tile: Tile, before: Any) -> Float[Array, "64 n"]:
    """This warpgroup's part of one of the products of a tile."""
    before = steps_before(products, number, tile, before)
    matmul, tile = products[number].matmul, products[number].part(tile)
    tuning, warpgroup = matmul.tuning, lax.axis_index("wg")
    in_flight = tuning.in_flight
    turn, part = (warpgroup, 0) if tuning.turns > 1 else (0, warpgroup)  # of the tile's steps, of a step's rows
    rows = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
    before = before + turn * tile.num_steps

    def release(step: Any) -> None:
        plgpu.barrier_arrive(ring.consumed.at[stage_of(matmul, before + step)])

    @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((WARPGROUP_ROWS, tuning.tile_n), jnp.float32))
    def product(accumulator: Any) -> Any:
        def step(i: Any, _: None) -> None:
            stage = stage_of(matmul, before + i)
            plgpu.barrier_wait(ring.produced.at[turn * tuning.stages + stage])
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


def kernel(matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, **more: Any) -> Callable:
    """``body`` on every multiprocessor. Axes: "sm" is the cluster, "cluster" the block in it, "wg" the warpgroup."""
    return _pallas.kernel(
        body,
        out_type=outputs,
        grid=(matmul.clusters,),
        grid_names=("sm",),
        cluster=(matmul.tuning.cluster,),
        cluster_names=("cluster",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Automatic barriers are for threads that read back what they wrote to shared memory. None here does.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # row sums need shuffles within four lanes only
        ),
        kernel_name=name,
        **more,
    )
