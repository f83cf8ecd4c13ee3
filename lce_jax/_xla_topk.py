"""The most likely tokens by plain XLA: the logits of one chunk of tokens at a time, and a selection from them.

A chunk has all columns of the shard, so its sums and its selection are those of whole rows. The weight is read once per
chunk: a few hundred tokens keep the product bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _largest, _math
from lce_jax._largest import Largest
from lce_jax._statistics import MASKED
from lce_jax._types import Case, Operands

if TYPE_CHECKING:
    from jaxtyping import Array, Float

CHUNK_BYTES, CHUNK_BYTES_ON_CPU = 160 << 20, 32 << 20  # of logits in the statistics' dtype
GRAIN = 128  # a chunk has a multiple of as many tokens


def chunk_tokens(case: Case) -> int:
    """Tokens whose logits exist at a time."""
    budget = CHUNK_BYTES_ON_CPU if case.device.platform == "cpu" else CHUNK_BYTES
    most = budget // (case.vocab_size * case.stat_dtype.itemsize)
    return min(case.num_tokens, max(most // GRAIN * GRAIN, GRAIN))


def largest(operands: Operands, case: Case) -> Largest:
    """The k largest x of each token, of all columns of the shard or of the first k columns if it has fewer."""
    size, num_tokens = chunk_tokens(case), case.num_tokens
    if size == num_tokens:
        return _of_rows(operands, case)

    def body(i: Any, found: Largest) -> Largest:
        start = jnp.minimum(i * size, num_tokens - size)  # the last chunk reaches back to stay whole
        part = _of_rows(_rows(operands, start, size), case)
        return jax.tree.map(lambda whole, x: lax.dynamic_update_slice_in_dim(whole, x, start, 0), found, part)

    shapes = jax.eval_shape(lambda: _of_rows(_rows(operands, 0, size), case))
    empty = jax.tree.map(lambda x: jnp.zeros((num_tokens, *x.shape[1:]), x.dtype), shapes)
    rows = num_tokens if operands.num_rows is None else operands.num_rows
    return lax.fori_loop(0, (rows + size - 1) // size, body, _compat.vary_like(empty, operands))


def _rows(operands: Operands, start: Any, size: int) -> Operands:
    """The operands of some tokens."""
    per_token = (operands.hidden, operands.inverse_temperature, operands.raw_scale)
    taken = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), per_token)
    return operands._replace(hidden=taken[0], inverse_temperature=taken[1], raw_scale=taken[2])


def _of_rows(operands: Operands, case: Case) -> Largest:
    dims = (((1,), (case.options.hidden_dim,)), ((), ()))
    raw = lax.dot_general(
        operands.hidden, operands.weight, dims, precision=case.options.precision, preferred_element_type=case.stat_dtype
    )
    return of_products(raw, operands, case, _largest.largest)


def of_products(raw: Float[Array, "t V"], operands: Operands, case: Case, select: Callable[..., Any]) -> Largest:
    """The k largest x of tokens whose raw products are ``raw``; ``select`` is `_largest.largest`, or does the same."""
    options = case.options
    raw = raw if operands.bias is None else raw + operands.bias[None, :]
    x = _math.unscaled_logits(raw, options, operands.raw_scale)
    if options.logit_scale == 0.0:  # all logits are equal, whatever the products are
        x = jnp.zeros_like(x)
    live = _math.live_columns(0, case.vocab_size, operands.num_columns)
    x = x if live is None else jnp.where(live[None, :], x, -jnp.inf)
    found, columns = select(x, min(options.top_k, case.vocab_size))
    m = jnp.maximum(found[:, :1], MASKED)
    scale = _math.row_scale(options, operands.inverse_temperature)
    u = jnp.minimum(x - m, 0.0) * (scale if isinstance(scale, float | int) else scale[:, None])
    e = jnp.exp(u) if live is None else jnp.where(live[None, :], jnp.exp(u), 0.0)
    return Largest(found, columns, jnp.sum(e, axis=1))
