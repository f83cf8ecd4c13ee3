"""Computes tiles of a product by mma.sync, the instruction that all GPUs since Ampere have.

A block has two warpgroups, which copy the operands themselves. With a third warpgroup for copies, a thread would have
168 registers, fewer than an accumulator of 128 and the operands need.

A warp loads the operands of each of its tiles from shared memory into registers. In the layout of wgmma, a warp has 16
rows and 256 columns. It would load 272 numbers for 16 x 256 products, more than shared memory provides in that time.
So each warpgroup multiplies all 128 rows with half of the columns, and a warp loads 160 numbers for 32 x 128 products.
Then the warpgroups exchange halves, so that each holds 64 rows, as the epilogues expect.

    multiplied     | rows 0-63   | 0 | 1 |        held     | 0 | 0 |
                   | rows 64-127 | 0 | 1 |                 | 1 | 1 |

Held tiles of one head are in global memory, with a place for each block, because shared memory has no room for their
128 KiB. They stay in L2. Their stores and loads are 4 % of the operands' bytes at H 4096.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._epilogue_steps import ACCUMULATOR
from lce_jax.mosaic.common._heads import HELD_SHAPE, HeldTile
from lce_jax.mosaic.common._ring import Ring, count_steps_before, find_stage
from lce_jax.mosaic.common._tiles import (
    COMPUTE_WARPGROUPS,
    WARPGROUP_ROWS,
    Matmul,
    Offset,
    Product,
    Tile,
    VisitAll,
    swizzled,
)
from lce_jax.mosaic.mma._copies import Copies
from lce_jax.mosaic.mma._tuning import EXCHANGED

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float

DEPTH = 16  # the depth of one mma.sync; its operands are loaded just before it, if the swizzle lets a step be split


class Exchange(NamedTuple):
    """Shared memory in which the warpgroups exchange their halves."""

    slots: Any  # [warpgroups, 2, 64, EXCHANGED] in float32
    written: Any  # a barrier


def walk_tiles(
    copies: Copies,
    matmul: Matmul,
    lhs: Any,
    rhs: Any,
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Callable[[], Float[Array, "64 n"]], Any], None],
    scratch: Any = None,
    adapter: Any = None,
) -> None:
    """Like `walk_tiles` of `lce_jax.mosaic.sm90`, but a tile's copies begin after the previous tile's epilogue."""

    def multiplied(tile: Tile, multiply: Sequence[Callable[[], Float[Array, "64 n"]]], scratch: Any) -> None:
        # The product is computed first, because values that an epilogue loaded before it would occupy registers.
        product = multiply[0]()
        consume(tile, lambda: product, scratch)

    walk_products(copies, [Product(matmul, lhs, rhs, adapter=adapter)], offset, visit_all, multiplied, scratch)


def walk_products(
    copies: Copies,
    products: Sequence[Product],
    offset: Offset,
    visit_all: VisitAll,
    consume: Callable[[Tile, Sequence[Callable[[], Float[Array, "64 n"]]], Any], None],
    scratch: Any = None,
) -> None:
    """Like `walk_products` of `lce_jax.mosaic.sm90`."""
    matmul = products[0].matmul
    shape = (COMPUTE_WARPGROUPS, 2, WARPGROUP_ROWS, EXCHANGED)
    slots = plgpu.SMEM(shape, jnp.float32, transforms=swizzled(EXCHANGED, 4))
    exchange = Exchange(slots, plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS))

    @functools.partial(
        pl.run_scoped, ring=copies.ring(*products[0][:3]), exchange=exchange, scratch=scratch, collective_axes="wg"
    )
    def run(ring: Ring, exchange: Exchange, scratch: Any) -> None:
        def visit(tile: Tile, before: Any) -> Any:
            def multiply(number: int) -> Float[Array, "64 n"]:
                product, done = products[number], count_steps_before(products, number, tile, before)
                return _exchange(*_multiply(copies, product, ring, offset, product.part(tile), done), exchange)

            consume(tile, [functools.partial(multiply, number) for number in range(len(products))], scratch)
            return count_steps_before(products, len(products), tile, before)

        copies.end(matmul, ring, visit_all(visit, jnp.int32(0)))


def walk_heads(
    copies: Copies, products: Sequence[Product], offset: Offset, visit_all: VisitAll, consume: Any, held: Any
) -> None:
    """Calls `walk_products` with the memory for held tiles as scratch."""
    walk_products(copies, products, offset, visit_all, lambda tile, multiply, _: consume(tile, multiply, held))


def hold(copies: Copies, held: Any, x: Float[Array, "64 256"]) -> HeldTile:
    """Holds a tile in global memory. Each thread reads only what it has written itself."""

    def load(part: Any) -> Array:
        copies.fence()  # it keeps loads apart, as on Hopper, so that registers do not spill
        return _pallas.load(part, ACCUMULATOR.layout)

    return HeldTile.of(x, held.at[lax.axis_index("sm"), lax.axis_index("wg")], load)


def _multiply(
    copies: Copies, product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any
) -> tuple[Float[Array, "64 n/2"], Float[Array, "64 n/2"]]:
    """Computes this warpgroup's columns of the product: of the tile's first 64 rows, and of the other 64 rows.

    A step's copies start after both warpgroups have finished the previous step in the same stage.
    """
    matmul, warpgroup = product.matmul, lax.axis_index("wg")
    ahead, half = matmul.tuning.stages - 1, matmul.tuning.tile_n // COMPUTE_WARPGROUPS
    columns = pl.ds(pl.multiple_of(warpgroup * half, half), half)
    start = functools.partial(copies.start, product, ring, offset, tile, before)
    lax.fori_loop(0, jnp.minimum(tile.num_steps, ahead), lambda i, _: start(i), None)

    depths = [slice(first, first + DEPTH) for first in range(0, matmul.tuning.tile_k, DEPTH)]

    def load_lhs(first: int, stage: Any) -> Iterator[Array]:
        rows = slice(first, first + WARPGROUP_ROWS)
        if matmul.lhs_k == 0:
            return (ring.lhs.at[stage, depth, rows].T[...] for depth in depths)
        stored = ring.lhs.at[stage, rows, :][...]
        return (stored[:, depth] for depth in depths)

    def load_rhs(stage: Any) -> Iterator[Array]:
        if matmul.rhs_k == 0:
            return (ring.rhs.at[stage, depth, columns][...] for depth in depths)
        stored = ring.rhs.at[stage, columns, :].T[...]
        return (stored[depth] for depth in depths)

    def step(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        stage = find_stage(matmul, before + i)
        copies.wait(product, ring, tile, before, i)
        pl.when(i + ahead < tile.num_steps)(lambda: start(i + ahead))
        for *lhs, rhs in zip(load_lhs(0, stage), load_lhs(WARPGROUP_ROWS, stage), load_rhs(stage), strict=True):
            sums = tuple(plgpu.mma(x, rows, rhs) for x, rows in zip(sums, lhs, strict=True))
        copies.release(ring, stage)
        return sums

    zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, half), jnp.float32), ACCUMULATOR.layout)
    return lax.fori_loop(0, tile.num_steps, step, (zeros, zeros))


def _exchange(first: Array, second: Array, exchange: Exchange) -> Float[Array, "64 n"]:
    """Exchanges halves of the columns for halves of the rows. ``first`` and ``second`` come from `_multiply`."""
    warpgroup = lax.axis_index("wg")
    is_first = plgpu.layout_cast(lax.broadcast_in_dim(warpgroup, first.shape, ()), ACCUMULATOR.layout) == 0
    sent, parts = jnp.where(is_first, second, first), []
    for i, start in enumerate(range(0, sent.shape[1], EXCHANGED)):
        # Two slots alternate. Before a warpgroup writes a slot, it passes a barrier after the other has read the slot.
        exchange.slots.at[warpgroup, i % 2][...] = sent[:, start : start + EXCHANGED]
        plgpu.barrier_arrive(exchange.written)
        plgpu.barrier_wait(exchange.written)
        parts.append(_pallas.load(exchange.slots.at[1 - warpgroup, i % 2], ACCUMULATOR.layout, optimized=True))
    received = jnp.concatenate(parts, axis=1)
    return jnp.concatenate([jnp.where(is_first, first, received), jnp.where(is_first, received, second)], axis=1)


def kernel(matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, **more: Any) -> Callable:
    """Returns a kernel of ``body`` on all multiprocessors, as on Hopper, but with one block per cluster."""
    return _pallas.kernel(
        body,
        out_type=outputs,
        grid=(matmul.clusters, 1),
        grid_names=("sm", "cluster"),
        num_threads=COMPUTE_WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name=name,
        **more,
    )


def kernel_of_heads(matmul: Matmul, body: Callable, outputs: list[Any], name: str, **more: Any) -> Callable:
    """Like `kernel`, but ``body`` gets memory for held tiles as its last argument: an output that is not returned."""
    held = jax.ShapeDtypeStruct((matmul.clusters, *HELD_SHAPE), jnp.float32)
    run = kernel(matmul, body, [*outputs, held], name, **more)
    return lambda *operands: run(*operands)[:-1]
