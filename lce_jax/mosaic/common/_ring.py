"""The ring of stages in shared memory that holds the operands of a product, and the copies into it by TMA.

    copies     … wait until stage s is consumed, start its copies; s + 1 …
    products   … wait until stage s is produced, multiply, hand it back; s + 1 …

Steps are counted through all tiles of a block and all products of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    ROW_BLOCK,
    WARPGROUP_ROWS,
    Matmul,
    Offset,
    Product,
    Tile,
    Tuning,
    multiple_of,
    next_place,
    swizzled,
    widest_swizzle,
)


class Ring(NamedTuple):
    """The stages of a block in shared memory, and their barriers."""

    lhs: Any  # [stages, rows, tile_k], or [stages, tile_k, rows]: 128 rows, or 64 if the warpgroups take turns
    rhs: Any  # [stages, tile_k, n], or [stages, n, tile_k]
    produced: Any  # one set of barriers per turn, because a warpgroup waits only for the steps of its own turns
    consumed: Any  # the barriers after which stages are free


def make_ring(matmul: Matmul, lhs: Any, rhs: Any) -> Ring:
    """Returns the stages for a product, and their barriers."""
    tuning, itemsize = matmul.tuning, matmul.call.dtype.itemsize
    swizzles = [widest_swizzle(operand.shape[1], itemsize)[0] for operand in (lhs, rhs)]
    if matmul.lhs_k == 1 or matmul.rhs_k == 1:
        swizzles.append(tuning.tile_k * itemsize)
    swizzle = min(swizzles)  # wgmma takes one swizzle for both operands
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


def find_stage(matmul: Matmul, step: Any) -> Any:
    """Returns the stage of a step. It divides unsigned numbers, because signed ones need code for negative steps."""
    return lax.rem(jnp.asarray(step, jnp.int32).astype(jnp.uint32), jnp.uint32(matmul.tuning.stages)).astype(jnp.int32)


def wait_for_last(matmul: Matmul, ring: Ring, total: Any) -> None:
    """Waits until all ``total`` steps are consumed."""
    first = jnp.maximum(total - matmul.tuning.stages, 0)
    lax.fori_loop(first, total, lambda i, _: plgpu.barrier_wait(ring.consumed.at[find_stage(matmul, i)]), None)


def fetch_step(product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any, step: Any, _: None) -> None:
    """Starts the copies of one step as soon as its stage is free. TMA writes zeros for what is outside an operand."""
    matmul, lhs = product[:2]
    tuning, stage = matmul.tuning, find_stage(matmul, before + step)
    # The place is computed while the stage is still in use.
    located = None if tile.locate is None else tile.locate(_find_turn(tuning, tile, step)[1])
    pl.when(before + step >= tuning.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[stage]))
    turn, number = _find_turn(tuning, tile, step)
    produced = ring.produced.at[turn * tuning.stages + stage]
    place = next_place(matmul, offset, tile, number) if located is None else located
    rows, depth = pl.ds(place.row + turn * WARPGROUP_ROWS, ROW_BLOCK // tuning.turns), pl.ds(place.lhs_k, tuning.tile_k)
    source = lhs.at[rows, depth] if matmul.lhs_k == 1 else lhs.at[depth, rows]
    shared = "cluster" if tuning.cluster > 1 else None  # each block of a cluster copies a part for all its blocks
    plgpu.copy_gmem_to_smem(source, ring.lhs.at[stage], produced, collective_axes=shared if matmul.shares_lhs else None)
    columns = pl.ds(multiple_of(offset.column + tile.column, matmul.column_grain), tuning.tile_n)
    shared = None if matmul.shares_lhs else shared

    def copy(rhs: Any, k: Any) -> None:
        depth = pl.ds(pl.multiple_of(k, tuning.tile_k), tuning.tile_k)
        source = rhs.at[columns, depth] if matmul.rhs_k == 1 else rhs.at[depth, columns]
        plgpu.copy_gmem_to_smem(source, ring.rhs.at[stage], produced, collective_axes=shared)

    product.copy_rhs(place.rhs_k, copy)


def _find_turn(tuning: Tuning, tile: Tile, step: Any) -> tuple[Any, Any]:
    """Returns the warpgroup whose turn contains the step, and the step's number in the contraction."""
    turn = lax.div(step, jnp.int32(tile.num_steps)) if tuning.turns > 1 else 0
    return turn, tile.first_step + step - turn * tile.num_steps


def count_steps(product: Product, tile: Tile) -> Any:
    """Returns how many steps a block takes for one product of a tile."""
    return product.matmul.tuning.turns * product.part(tile).num_steps


def count_steps_before(products: Sequence[Product], number: int, tile: Tile, before: Any) -> Any:
    """Returns how many steps precede a tile's product ``number``. ``before``: how many precede the tile."""
    return functools.reduce(lambda total, product: total + count_steps(product, tile), products[:number], before)
