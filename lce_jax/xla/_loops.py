"""The two loops of programs of plain XLA: over chunks of tokens, and over tiles of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _jax

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool


class Chunk(NamedTuple):
    """Some of the tokens."""

    start: Any
    size: int
    new: Bool[Array, "t"]  # which of them no earlier chunk had

    def take[A](self, tree: A) -> A:
        """Their part of [T, ...] arrays."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start, self.size), tree)

    def put[A](self, whole: A, part: A) -> A:
        """``whole`` with their part written."""
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, self.start, 0), whole, part)


def over_chunks[C](num_tokens: int, size: int, num_rows: Any, body: Callable[[Chunk, C], C], carry: C) -> C:
    """``carry = body(chunk, carry)`` over chunks of ``size`` tokens, as far as ``num_rows`` reaches; None: over all.

    The last chunk reaches back into the one before, to stay whole: one body serves all, and none has so few tokens that
    XLA would compute its products otherwise.
    """
    rows = num_tokens if num_rows is None else num_rows

    def step(i: Array, carry: C) -> C:
        start = jnp.minimum(i * size, num_tokens - size)
        return body(Chunk(start, size, start + jnp.arange(size, dtype=jnp.int32) >= i * size), carry)

    return lax.fori_loop(0, (rows + size - 1) // size, step, carry)


def by_chunks[R](function: Callable[[Any], R], per_token: Any, size: int, num_rows: Any, like: Any) -> R:
    """``function(per_token)`` of [T, ...] arrays, computed by `over_chunks`; 0 where no chunk has been.

    ``like`` varies over the axes that the results do.
    """
    return keeping_by_chunks(lambda own, _, kept: (function(own), kept), per_token, size, num_rows, like, None)[0]


def keeping_by_chunks[R, K](
    function: Callable[[Any, Any, K], tuple[R, K]], per_token: Any, size: int, num_rows: Any, like: Any, kept: K
) -> tuple[R, K]:
    """`by_chunks` of ``function(per_token, first, kept)``, which also returns ``kept`` with what it writes.

    ``first`` is the chunk's first token.
    """
    num_tokens = jax.tree.leaves(per_token)[0].shape[0]
    if size >= num_tokens:
        return function(per_token, 0, kept)

    def chunk(own: Chunk, carry: tuple[R, K]) -> tuple[R, K]:
        results, kept = carry
        part, kept = function(own.take(per_token), own.start, kept)
        return own.put(results, part), kept

    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[:size], per_token), 0, kept)[0])
    empty = jax.tree.map(lambda x: jnp.zeros((num_tokens, *x.shape[1:]), x.dtype), shapes)
    return over_chunks(num_tokens, size, num_rows, chunk, (_jax.vary_like(empty, (per_token, like)), kept))


def over_columns[C](columns: int, tile_v: int, kept: int, body: Callable[[Any, int, bool, C], C], carry: C) -> C:
    """``carry = body(start, size, is_kept, carry)`` over the vocabulary: the remainder, then whole tiles in loops.

    A loop depends on the remainder. The other way round, XLA could start the remainder early and hold its tile. The
    tiles of the first ``kept`` columns are kept.
    """
    whole, rest = divmod(columns, tile_v)
    if rest:
        carry = body(jnp.int32(0), rest, kept > 0, carry)
    last_kept = max(kept - rest, 0) // tile_v
    for first, last, is_kept in ((0, last_kept, True), (last_kept, whole, False)):
        if first < last:
            carry = lax.fori_loop(first, last, lambda i, c, own=is_kept: body(rest + i * tile_v, tile_v, own, c), carry)
    return carry
