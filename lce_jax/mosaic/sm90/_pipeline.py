"""Computes tiles of a product by wgmma: persistent blocks, their walk over tiles, and the pipeline of operands.

A block has one memory warpgroup, which copies tiles of both operands into a ring of stages by TMA, and two compute
warpgroups, each with a [64, n] accumulator for 64 of a tile's 128 rows. n is 256, or 192 if such tiles are all full.

    memory     … wait until stage s is consumed, start its copies; s + 1 …
    compute    … wait until stage s is produced, multiply, hand it back; s + 1 …

The steps are counted through all tiles of a block. So the next tile's operands arrive during a tile's epilogue, however
many steps a tile has. A step has a [128, k] tile of lhs and an [n, k] tile of rhs if both compute warpgroups share it.
Then their epilogues run at the same time, and the tensor cores idle meanwhile. Or the warpgroups take turns, and each
has steps of 64 rows for itself:

    shared     multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
               multiply 0 | multiply 0 | epilogue 0 | multiply 1 …
    turns      multiply 0 | epilogue 0 | multiply 1 | epilogue 1 …
                (waiting) | multiply 0 | epilogue 0 | multiply 1 …

Only the ring orders the turns: the second warpgroup's operands arrive after those of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._epilogue_steps import ACCUMULATOR
from lce_jax.mosaic.common._heads import HELD_SHAPE, HeldTile
from lce_jax.mosaic.common._ring import (
    Ring,
    count_steps,
    count_steps_before,
    fetch_step,
    find_stage,
    make_ring,
    wait_for_last,
)
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    STAGING_COLUMNS,
    WARPGROUP_ROWS,
    Matmul,
    Offset,
    Product,
    Tile,
    VisitAll,
    swizzled,
)
from lce_jax.mosaic.sm90._tuning import COMPUTE_REGISTERS, MEMORY_REGISTERS

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
    adapter: Any = None,
) -> None:
    """Calls ``consume(tile, multiply, scratch)`` in both compute warpgroups for every tile that ``visit_all`` visits.

    ``consume`` loads the operands of its epilogue, and calls ``multiply()`` for its 64 rows of the product.
    """
    one = [Product(matmul, lhs, rhs, adapter=adapter)]
    walk_products(one, offset, visit_all, lambda tile, multiply, scratch: consume(tile, multiply[0], scratch), scratch)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the epilogues' stores


def walk_products(
    products: Sequence[Product],
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Sequence[Callable[[], Float[Array, "64 n"]]], Any], None],
    scratch: Any = None,
) -> None:
    """Like `walk_tiles`, but with several products per tile, which ``consume`` must compute in order.

    The loop carry of ``visit_all`` is the number of steps before a tile. All products have the same tuning.
    """
    matmul = products[0].matmul

    @functools.partial(pl.run_scoped, ring=make_ring(*products[0][:3]), scratch=scratch, collective_axes="wg")
    def run(ring: Any, scratch: Any) -> None:
        def fetch() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def visit(tile: Tile, before: Any) -> Any:
                for product in products:
                    step = functools.partial(fetch_step, product, ring, offset, product.part(tile), before)
                    lax.fori_loop(0, count_steps(product, tile), step, None)
                    before = before + count_steps(product, tile)
                return before

            # A block must not exit before its cluster's copies into its memory are complete.
            wait_for_last(matmul, ring, visit_all(visit, jnp.int32(0)))

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def visit(tile: Tile, before: Any) -> Any:
                multiply = [functools.partial(_multiply, products, i, ring, tile, before) for i in range(len(products))]
                consume(tile, multiply, scratch)
                return count_steps_before(products, len(products), tile, before)

            visit_all(visit, jnp.int32(0))

        lax.cond(lax.axis_index("wg") == COMPUTE_WARPGROUPS, fetch, compute)


def _multiply(products: Sequence[Product], number: int, ring: Ring, tile: Tile, before: Any) -> Float[Array, "64 n"]:
    """Computes this warpgroup's part of one product of a tile."""
    before = count_steps_before(products, number, tile, before)
    matmul, tile = products[number].matmul, products[number].part(tile)
    tuning, warpgroup = matmul.tuning, lax.axis_index("wg")
    in_flight = tuning.in_flight
    # ``turn`` selects some of the tile's steps, and ``part`` some of a step's rows.
    turn, part = (warpgroup, 0) if tuning.turns > 1 else (0, warpgroup)
    rows = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
    before = before + turn * tile.num_steps

    def release(step: Any) -> None:
        plgpu.barrier_arrive(ring.consumed.at[find_stage(matmul, before + step)])

    @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((WARPGROUP_ROWS, tuning.tile_n), jnp.float32))
    def product(accumulator: Any) -> Any:
        def step(i: Any, _: None) -> None:
            stage = find_stage(matmul, before + i)
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
    """Returns a kernel of ``body`` on all multiprocessors. Axes: "sm" for clusters, "cluster" for blocks, "wg"."""
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
            # Automatic barriers are for threads that read shared memory that they wrote. No thread here does.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # row sums only need shuffles within four lanes
        ),
        kernel_name=name,
        **more,
    )


def kernel_of_heads(matmul: Matmul, body: Callable[..., None], *arguments: Any, **more: Any) -> Callable[..., Any]:
    """Like `kernel`, but the last argument of ``body`` is shared memory for a held tile of each compute warpgroup."""
    held = plgpu.SMEM(HELD_SHAPE, jnp.float32, transforms=swizzled(STAGING_COLUMNS, 4))
    return kernel(matmul, lambda *refs: body(*refs, held), *arguments, **more)


def hold(held: Any, x: Float[Array, "64 256"]) -> HeldTile:
    """Holds a tile in shared memory."""
    blocks = held.at[lax.axis_index("wg")]
    plgpu.commit_smem()  # all threads have read the previous tile

    def load(part: Any) -> Array:
        # This barrier keeps loads apart. If the compiler loaded the whole tile at once, registers would spill.
        plgpu.commit_smem()
        return _pallas.load(part, ACCUMULATOR.layout, optimized=True)

    return HeldTile.of(x, blocks, load)
