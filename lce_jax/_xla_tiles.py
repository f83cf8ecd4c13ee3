"""How programs of plain XLA walk over tiles of tokens and of the vocabulary, and the product of a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jaxtyping import Array, Int


def walk_vocabulary[C](columns: int, tile_v: int, body: Callable[[Any, int, C], C], carry: C) -> C:
    """``carry = body(start, size, carry)`` over the vocabulary: first the remainder, then whole tiles in a loop.

    The loop depends on the remainder. The other way round, XLA could start the remainder early and hold its tile.
    """
    whole, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, carry)
    return lax.fori_loop(0, whole, lambda i, c: body(rest + i * tile_v, tile_v, c), carry) if whole else carry


def num_token_tiles(num_rows: Int[Array, ""] | None, tile_t: int, num_tokens: int) -> Any:
    """How many tiles of ``tile_t`` tokens hold the first ``num_rows``; None: all of them."""
    rows = num_tokens if num_rows is None else num_rows
    return (rows + tile_t - 1) // tile_t


def token_start(i: Array, tile_t: int, num_tokens: int) -> tuple[Array, Array]:
    """Where tile ``i`` starts, and its first row that no earlier tile had: the last tile reaches back to stay whole."""
    start = jnp.minimum(i * tile_t, num_tokens - tile_t)
    return start, i * tile_t - start


def dot(left: Array, right: Array, left_dim: int, right_dim: int, precision: PrecisionLike, dtype: jnp.dtype) -> Array:
    """The matrix product that sums over ``left_dim`` and ``right_dim``, summed and returned in ``dtype``."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)


def gradient_dtype(case: Case) -> jnp.dtype:
    """The dtype of the gradient products' operands: float32 on a CPU, where dlogits are never rounded to 16 bits."""
    return case.stat_dtype if case.device.platform == "cpu" else case.dtype
