"""Logits of a few chosen columns per token, each a dot product with one row of the weight: no pass over the vocabulary.

The rows of the weight are gathered for a chunk of tokens at a time. XLA fuses gather, product and sum on a GPU, and
where it does not, a chunk bounds the gathered rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math
from lce_jax._types import Case, Operands, Options

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

GATHERED_BYTES = 32 << 20  # of the rows of the weight that one chunk gathers


def chunk_tokens(num_columns: int, hidden_size: int, itemsize: int) -> int:
    """Tokens whose rows of the weight are gathered at a time."""
    return max(1, GATHERED_BYTES // (num_columns * hidden_size * itemsize))


def gathered_bytes(case: Case) -> int:
    """What the gathered rows of one chunk of candidates take, if XLA does not fuse them."""
    columns = case.options.num_candidates
    if not columns:
        return 0
    tokens = chunk_tokens(columns, case.hidden_size, case.dtype.itemsize)
    return min(tokens, case.num_tokens) * columns * case.hidden_size * case.dtype.itemsize


def products(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    columns: Int[Array, "T K"],
    options: Options,
    dtype: Any,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T K"]:
    """H · w of each token's columns, summed in ``dtype``; 0 for the column -1 and, by chunks, after ``num_rows``."""
    num_tokens = hidden.shape[0]
    size = chunk_tokens(columns.shape[1], hidden.shape[1], weight.dtype.itemsize)
    if size >= num_tokens:
        return _products(hidden, weight, columns, options, dtype)

    def body(i: Any, found: Array) -> Array:
        start = jnp.minimum(i * size, num_tokens - size)  # the last chunk reaches back to stay whole
        chunk = [lax.dynamic_slice_in_dim(x, start, size) for x in (hidden, columns)]
        part = _products(chunk[0], weight, chunk[1], options, dtype)
        return lax.dynamic_update_slice_in_dim(found, part, start, 0)

    rows = num_tokens if num_rows is None else num_rows
    empty = _compat.vary_like(jnp.zeros(columns.shape, dtype), (hidden, weight, columns, num_rows))
    return lax.fori_loop(0, (rows + size - 1) // size, body, empty)


def _products(hidden: Array, weight: Array, columns: Array, options: Options, dtype: Any) -> Float[Array, "T K"]:
    """A product and a sum, not a ``dot_general``, whose operand XLA would have to store."""
    rows = jnp.take(weight, columns, axis=options.vocab_dim, mode="clip").astype(dtype)
    wide = hidden.astype(dtype)
    if options.vocab_dim == 0:
        raw = jnp.sum(wide[:, None, :] * rows, axis=2)
    else:
        raw = jnp.sum(wide.T[:, :, None] * rows, axis=0)
    return jnp.where(columns >= 0, raw, 0.0)


def candidate_logits(operands: Operands, case: Case) -> Float[Array, "T K"]:
    """The logits z of the candidates that this shard owns, -inf at the others."""
    columns, options = operands.candidates, case.options
    assert columns is not None
    raw = products(operands.hidden, operands.weight, columns, options, case.stat_dtype, operands.num_rows)
    z, _ = _math.transform_logits(raw, options, operands.inverse_temperature, operands.raw_scale)
    return jnp.where(columns >= 0, z, -jnp.inf)
