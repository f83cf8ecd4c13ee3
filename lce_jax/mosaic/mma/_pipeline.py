"""Tiles of a product by mma.sync, the instruction that all GPUs since Ampere have.

A block is two warpgroups, which copy the operands themselves: beside a third one, for copies, a thread would have 168
registers, fewer than an accumulator of 128 and the operands need.

A warp reads its operands from shared memory into registers, for each of its tiles anew. A warp of 16 rows and 256
columns, as wgmma's results lie, would read 272 numbers for 16 x 256 products: more than shared memory gives in the time
of the products. So each warpgroup multiplies all 128 rows with half of the columns, 160 numbers for the 32 x 128
products of a warp. Then they exchange halves, and each holds 64 rows, as every epilogue expects them.

    multiplied     | rows 0-63   | 0 | 1 |        held     | 0 | 0 |
                   | rows 64-127 | 0 | 1 |                 | 1 | 1 |

Where a tile of one head waits for the other's, it waits in global memory, a place for each block: shared memory has no
room for its 128 KiB. They stay in L2. Written and read, they are 4 % of the operands' bytes at H 4096.
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
from lce_jax.mosaic.common._epilogue import HELD
from lce_jax.mosaic.common._heads import HELD_SHAPE, HeldTile
from lce_jax.mosaic.common._ring import Ring, stage_of, steps_before
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

DEPTH = 16  # of one mma.sync: what it multiplies is loaded just before, where the swizzle lets a step be cut


class Exchange(NamedTuple):
    """Where the warpgroups exchange their halves."""

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
    """As that of `lce_jax.mosaic.sm90`, but a tile's copies begin after the epilogue of the tile before it."""

    def multiplied(tile: Tile, multiply: Sequence[Callable[[], Float[Array, "64 n"]]], scratch: Any) -> None:
        # First of all: what an epilogue loads before it multiplies would take registers meanwhile.
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
    """As that of `lce_jax.mosaic.sm90`."""
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
                product, done = products[number], steps_before(products, number, tile, before)
                return _exchanged(*_multiply(copies, product, ring, offset, product.part(tile), done), exchange)

            consume(tile, [functools.partial(multiply, number) for number in range(len(products))], scratch)
            return steps_before(products, len(products), tile, before)

        copies.end(matmul, ring, visit_all(visit, jnp.int32(0)))


def walk_heads(
    copies: Copies, products: Sequence[Product], offset: Offset, visit_all: VisitAll, consume: Any, held: Any
) -> None:
    """`walk_products` with the memory in which tiles wait for a scratch, there already."""
    walk_products(copies, products, offset, visit_all, lambda tile, multiply, _: consume(tile, multiply, held))


def hold(copies: Copies, held: Any, x: Float[Array, "64 256"]) -> HeldTile:
    """``x``, of which each thread will read what it writes itself."""

    def load(part: Any) -> Array:
        copies.fence()  # as Hopper's
        return plgpu.load(part, layout=HELD.layout, optimized=False)

    return HeldTile.of(x, held.at[lax.axis_index("sm"), lax.axis_index("wg")], load)


def _multiply(
    copies: Copies, product: Product, ring: Ring, offset: Offset, tile: Tile, before: Any
) -> tuple[Float[Array, "64 n/2"], Float[Array, "64 n/2"]]:
    """This warpgroup's columns of the first 64 rows, and of the others.

    A step's copies start once both have done the step whose stage it takes.
    """
    matmul, warpgroup = product.matmul, lax.axis_index("wg")
    ahead, half = matmul.tuning.stages - 1, matmul.tuning.tile_n // COMPUTE_WARPGROUPS
    columns = pl.ds(pl.multiple_of(warpgroup * half, half), half)
    start = functools.partial(copies.start, product, ring, offset, tile, before)
    lax.fori_loop(0, jnp.minimum(tile.num_steps, ahead), lambda i, _: start(i), None)

    depths = [slice(first, first + DEPTH) for first in range(0, matmul.tuning.tile_k, DEPTH)]

    def lhs_of(first: int, stage: Any) -> Iterator[Array]:
        rows = slice(first, first + WARPGROUP_ROWS)
        if matmul.lhs_k == 0:
            return (ring.lhs.at[stage, depth, rows].T[...] for depth in depths)
        whole = ring.lhs.at[stage, rows, :][...]
        return (whole[:, depth] for depth in depths)

    def rhs_of(stage: Any) -> Iterator[Array]:
        if matmul.rhs_k == 0:
            return (ring.rhs.at[stage, depth, columns][...] for depth in depths)
        whole = ring.rhs.at[stage, columns, :].T[...]
        return (whole[depth] for depth in depths)

    def step(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        stage = stage_of(matmul, before + i)
        copies.wait(product, ring, tile, before, i)
        pl.when(i + ahead < tile.num_steps)(lambda: start(i + ahead))
        for *lhs, rhs in zip(lhs_of(0, stage), lhs_of(WARPGROUP_ROWS, stage), rhs_of(stage), strict=True):
            sums = tuple(plgpu.mma(x, rows, rhs) for x, rows in zip(sums, lhs, strict=True))
        copies.release(ring, stage)
        return sums

    zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, half), jnp.float32), HELD.layout)
    return lax.fori_loop(0, tile.num_steps, step, (zeros, zeros))


def _exchanged(first: Array, second: Array, exchange: Exchange) -> Float[Array, "64 n"]:
    """This warpgroup's rows, half of whose columns the other has multiplied. ``first``, ``second``: of `_multiply`."""
    warpgroup = lax.axis_index("wg")
    is_first = plgpu.layout_cast(lax.broadcast_in_dim(warpgroup, first.shape, ()), HELD.layout) == 0
    given, found = jnp.where(is_first, second, first), []
    for i, start in enumerate(range(0, given.shape[1], EXCHANGED)):
        # Of two slots in turn: who writes one has passed the barrier before which the other has read it.
        exchange.slots.at[warpgroup, i % 2][...] = given[:, start : start + EXCHANGED]
        plgpu.barrier_arrive(exchange.written)
        plgpu.barrier_wait(exchange.written)
        found.append(plgpu.load(exchange.slots.at[1 - warpgroup, i % 2], layout=HELD.layout))
    received = jnp.concatenate(found, axis=1)
    return jnp.concatenate([jnp.where(is_first, first, received), jnp.where(is_first, received, second)], axis=1)


def kernel(matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, **more: Any) -> Callable:
    """``body`` on every multiprocessor, as that of `lce_jax.mosaic.sm90`, with one block in each cluster."""
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
    """`kernel`, ``body`` given last where tiles wait: an output that nobody is given."""
    held = jax.ShapeDtypeStruct((matmul.clusters, *HELD_SHAPE), jnp.float32)
    run = kernel(matmul, body, [*outputs, held], name, **more)
    return lambda *operands: run(*operands)[:-1]
