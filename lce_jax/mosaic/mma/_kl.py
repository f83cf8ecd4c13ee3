"""A tile of one head waits for the other's in global memory, each block's in a place of its own.

Shared memory has no room for its 128 KiB. They stay in L2, and of the operands' traffic they are 4 % at H 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._pallas import plgpu
from lce_jax.mosaic.common._tiles import Matmul, Offset, Product, VisitAll
from lce_jax.mosaic.mma import _pipeline
from lce_jax.mosaic.mma._copies import Copies
from lce_jax.mosaic.sm90._kl import HELD_SHAPE, HeldTile

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float


def kernel(matmul: Matmul, body: Callable, outputs: list[jax.ShapeDtypeStruct], name: str, **more: Any) -> Callable:
    """That of `_pipeline`, ``body`` given last an output that nobody is given."""
    held = jax.ShapeDtypeStruct((matmul.clusters, *HELD_SHAPE), jnp.float32)
    run = _pipeline.kernel(matmul, body, [*outputs, held], name, **more)
    return lambda *operands: run(*operands)[:-1]


def walk_products(
    copies: Copies, products: Sequence[Product], offset: Offset, visit_all: VisitAll, consume: Callable, held: Any
) -> None:
    """That of `_pipeline`, with what is there already for a scratch."""
    _pipeline.walk_products(copies, products, offset, visit_all, lambda *of_tile: consume(*of_tile[:2], held))


def hold(copies: Copies, held: Any, x: Float[Array, "64 256"]) -> HeldTile:
    """In global memory, where each thread reads what it has written itself."""

    def load(part: Any) -> Array:
        copies.fence()  # as on Hopper, for the registers
        return plgpu.load(part, layout=_pipeline.HELD.layout, optimized=False)

    return HeldTile.of(x, held.at[lax.axis_index("sm"), lax.axis_index("wg")], load)
