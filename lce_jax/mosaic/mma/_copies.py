"""Copies of mma.sync's operands into shared memory: by TMA, or by cp.async on GPUs before Hopper.

With TMA, one thread starts the copy of a tile. TMA counts the bytes that have arrived, and fills rows and columns
outside an array with zeros. With cp.async, every thread copies 16 bytes at a time, waits for its own copies, and must
stay inside the array. So hidden states are padded to whole row blocks, and the weight to halves of a tile
(`Tiling.atom`). In place of columns that a tile lacks, others are copied, which are in no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._ring import Ring, fetch_step, find_stage, make_ring, wait_for_last
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    STAGING_COLUMNS,
    WARPGROUP_ROWS,
    Matmul,
    Offset,
    Product,
    StepPlace,
    Tile,
    next_place,
)


class Copies(NamedTuple):
    """What a walk over tiles does with copies. Both warpgroups call these operations.

    Attributes:
        ring: ``(matmul, lhs, rhs)`` returns the stages.
        start: ``(product, ring, offset, tile, before, step)`` starts the copies of a step.
        wait: ``(product, ring, tile, before, step)`` waits until both operands of a step have arrived.
        release: ``(ring, stage)`` releases a stage that this warpgroup has read.
        end: ``(matmul, ring, total)`` waits for all ``total`` steps, and for the stores of epilogues.
        fence: ``()`` is a barrier of the warpgroup.
    """

    ring: Callable[..., Ring]
    start: Callable[..., None]
    wait: Callable[..., None]
    release: Callable[[Ring, Any], None]
    end: Callable[[Matmul, Ring, Any], None]
    fence: Callable[[], None]


def _start_tma(product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any, step: Any) -> None:
    is_first = lax.axis_index("wg") == 0
    pl.when(is_first)(lambda: fetch_step(product, ring, offset, tile, before, step, None))


def _wait_tma(product: Product, ring: Ring, tile: Tile, before: Any, step: Any) -> None:
    del tile
    plgpu.barrier_wait(ring.produced.at[find_stage(product.matmul, before + step)])


def _end_tma(matmul: Matmul, ring: Ring, total: Any) -> None:
    is_first = lax.axis_index("wg") == 0
    pl.when(is_first)(lambda: wait_for_last(matmul, ring, total))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


BY_TMA = Copies(
    ring=make_ring,
    start=_start_tma,
    wait=_wait_tma,
    release=lambda ring, stage: plgpu.barrier_arrive(ring.consumed.at[stage]),
    end=_end_tma,
    fence=lambda: plgpu.commit_smem(),
)


def _ring_cp_async(matmul: Matmul, lhs: Any, rhs: Any) -> Ring:
    """Makes a ring, whose barriers wait until both warpgroups have copied their part and finished the previous step."""
    produced = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=matmul.tuning.stages)
    return make_ring(matmul, lhs, rhs)._replace(produced=produced, consumed=None)


def _start_cp_async(product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any, step: Any) -> None:
    """Copies, in each warpgroup, half of lhs and the columns of rhs that this warpgroup multiplies."""
    matmul, lhs, rhs = product[:3]
    tile_k, half, width = matmul.tuning.tile_k, matmul.tuning.tile_n // COMPUTE_WARPGROUPS, _piece(matmul, rhs)
    warpgroup, stage, number = lax.axis_index("wg"), find_stage(matmul, before + step), tile.first_step + step
    place: StepPlace = next_place(matmul, offset, tile, number) if tile.locate is None else tile.locate(number)

    def copy(k: int, source: Any, rows: Any, depth: Any, stages: Any, to: Any, size: int) -> None:
        """Copies ``size`` rows of an operand whose dimension ``k`` is contracted."""
        depth, rows, to = pl.ds(depth, tile_k), pl.ds(rows, size), pl.ds(pl.multiple_of(to, size), size)
        every = slice(None)
        where, slot = ((rows, depth), (to, every)) if k == 1 else ((depth, rows), (every, to))
        destination = stages.at[(stage, *slot)]
        plgpu.copy_gmem_to_smem(source.at[where], destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    lhs_row = warpgroup * WARPGROUP_ROWS
    copy(matmul.lhs_k, lhs, place.row + lhs_row, place.lhs_k, ring.lhs, lhs_row, WARPGROUP_ROWS)

    def copy_rhs(rhs: Any, k: Any) -> None:
        # Outside the weight are only rows of an active tile with dlogits of zero, and columns that are in no result.
        depth = pl.multiple_of(jnp.minimum(k, rhs.shape[matmul.rhs_k] - tile_k), tile_k)
        for first in range(0, half, width):
            to = warpgroup * half + first
            columns = jnp.minimum(offset.column + tile.column + to, rhs.shape[1 - matmul.rhs_k] - width)
            copy(matmul.rhs_k, rhs, pl.multiple_of(columns, width), depth, ring.rhs, to, width)

    product.copy_rhs(place.rhs_k, copy_rhs)


def _piece(matmul: Matmul, rhs: Any) -> int:
    """Returns how many columns of rhs a copy has, so that each copy lies completely inside rhs or outside."""
    half = matmul.tuning.tile_n // COMPUTE_WARPGROUPS
    return half if rhs.shape[1 - matmul.rhs_k] % half == 0 else STAGING_COLUMNS


def _wait_cp_async(product: Product, ring: Ring, tile: Tile, before: Any, step: Any) -> None:
    """Waits for a step's copies, each of which is a group of cp.async. The last steps wait for all groups."""
    matmul = product.matmul
    later = matmul.tuning.stages - 2
    copies = 1 + matmul.tuning.tile_n // COMPUTE_WARPGROUPS // _piece(matmul, product.rhs)
    lax.cond(
        step + later < tile.num_steps,
        lambda: plgpu.wait_gmem_to_smem(later * copies),
        lambda: plgpu.wait_gmem_to_smem(0),
    )
    produced = ring.produced.at[find_stage(matmul, before + step)]
    plgpu.barrier_arrive(produced)
    plgpu.barrier_wait(produced)


BY_CP_ASYNC = Copies(
    ring=_ring_cp_async,
    start=_start_cp_async,
    wait=_wait_cp_async,
    release=lambda *_: None,
    end=lambda *_: None,
    fence=lambda: plgpu.wait_gmem_to_smem(0),
)
