"""Computes a few logits per token, each a dot product with a row of the weight, without a pass over the vocabulary.

Each chunk of tokens in turn gathers its rows of the weight. On a GPU, XLA fuses the gather, the product and the sum. On
other devices, the chunk size limits the memory of the gathered rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._statistics import expand_like
from lce_jax.types import _jax
from lce_jax.types._types import Call, Plan
from lce_jax.types.scalars import format_bytes
from lce_jax.xla import _walk

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int

GATHERED_BYTES = 32 << 20  # the bytes of the weight rows that a chunk gathers
BLOCK_PAIRS = 128  # the number of (token, column) pairs whose sums one matrix product computes
# Where XLA fuses the gather, no rows are stored, and this only limits the work of one launch. At (4096, 4096, 151936)
# on an H200, 64 candidates make a forward longer by a factor of 1.140 with 32 MiB, 1.073 with 128 MiB, 1.055 with 512
# MiB, and 1.053 with a single chunk.
FUSED_BYTES = 512 << 20


def choose_chunk_tokens(num_columns: int, hidden_size: int, itemsize: int, gathered_bytes: int | None = None) -> int:
    """Returns the number of tokens per chunk. Only one chunk's rows of the weight are gathered at a time."""
    most = GATHERED_BYTES if gathered_bytes is None else gathered_bytes
    return max(1, most // (num_columns * hidden_size * itemsize))


def plan(call: Call) -> Plan:
    """Returns the plan of `lce_jax.linear_logits`. The ids count as candidates of ``call``."""
    num_ids, stat, item = call.num_candidates, call.stat_dtype.itemsize, call.dtype.itemsize
    size = min(max(call.num_tokens, 1), choose_chunk_tokens(max(num_ids, 1), call.hidden_size, item))
    rows = size * num_ids * call.hidden_size * item
    copies = rows + _walk.copied_bytes(call) if num_ids and call.num_tokens else 0
    return Plan(
        implementation="xla",
        refused={},
        call=call,
        tiles={"tokens": size},
        forward_bytes=copies,
        backward_bytes=copies + (_walk.sum_bytes(call) if copies else 0),
        kept_bytes=call.num_tokens * num_ids * stat,
        logits_bytes=call.num_tokens * call.columns * stat,
        notes=(
            f"linear_logits: {num_ids} ids per token, {call.num_tokens * num_ids:,} products with one row of the "
            f"weight each, at most {format_bytes(rows)} of rows at a time; the forward on a GPU stores no rows",
        ),
    )


def compute_products(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    columns: Int[Array, "T K"],
    call: Call,
    dtype: Any,
    num_rows: Int[Array, ""] | None = None,
    gathered_bytes: int | None = None,
) -> Float[Array, "T K"]:
    """Computes the products h · w of each token and its columns, summed in ``dtype``.

    The result is 0 for the column -1, and in chunks that begin after the first ``num_rows`` rows.
    """
    size = choose_chunk_tokens(columns.shape[1], hidden.shape[1], weight.dtype.itemsize, gathered_bytes)

    def chunk(per_token: tuple[Array, Array]) -> Array:
        return _compute_products(per_token[0], weight, per_token[1], call, dtype)

    return _walk.map_chunks(chunk, (hidden, columns), size, num_rows, (weight, num_rows))


def _compute_products(hidden: Array, weight: Array, columns: Array, call: Call, dtype: Any) -> Float[Array, "T K"]:
    """Computes products and their sum. A ``dot_general`` would make XLA store the gathered rows."""
    rows = _take_rows(weight, columns, call).astype(dtype)
    wide = hidden.astype(dtype)
    if call.vocab_dim == 0:
        raw = jnp.sum(wide[:, None, :] * rows, axis=2)
    else:
        raw = jnp.sum(wide.T[:, :, None] * rows, axis=0)
    return jnp.where(columns >= 0, raw, 0.0)


def _take_rows(weight: Array, columns: Array, call: Call) -> Array:
    """Gathers the weight's row of each column."""
    if weight.shape[1] == 1 and call.vocab_dim == 1:  # on CPUs, XLA in JAX 0.12.0 reads past the end
        weight = jnp.pad(weight, ((0, 0), (0, 1)))
    return jnp.take(weight, columns, axis=call.vocab_dim, mode="clip")


def compute_dhidden(
    terms: Float[Array, "T K"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], call: Call
) -> Float[Array, "T H"]:
    """Computes Σ_k terms · w over each token's columns, summed in the dtype of ``terms``."""
    size = choose_chunk_tokens(terms.shape[1], weight.shape[call.hidden_dim], weight.dtype.itemsize)

    def chunk(per_token: tuple[Array, Array]) -> Array:
        terms, columns = per_token
        rows = _take_rows(weight, columns, call).astype(terms.dtype)
        rows = rows if call.vocab_dim == 0 else jnp.moveaxis(rows, 0, 2)
        return jnp.sum(jnp.where((columns >= 0)[:, :, None], terms[:, :, None] * rows, 0.0), axis=1)

    return _walk.map_chunks(chunk, (terms, columns), size, None, weight)


class Pairs(NamedTuple):
    """The (token, column) pairs of a call, sorted by column.

    Pairs with the column -1 get the column V, and come last.
    """

    columns: Int[Array, "N"]
    tokens: Int[Array, "N"]
    terms: Float[Array, "N"]
    ends: Bool[Array, "N"]  # whether a pair is the last pair of its column


def sort_pairs(terms: Float[Array, "T K"], columns: Int[Array, "T K"], num_columns: int, multiple: int) -> Pairs:
    """Sorts the pairs by column and then by token, and pads their count to a multiple of ``multiple``."""
    flat_columns = jnp.where(columns < 0, num_columns, columns).reshape(-1)
    order = jnp.arange(flat_columns.shape[0], dtype=jnp.int32)
    flat_columns, order = lax.sort((flat_columns, order), num_keys=1, is_stable=True)
    tokens, flat = order // columns.shape[1], terms.reshape(-1)[order]
    missing = -flat_columns.shape[0] % multiple
    flat_columns = jnp.pad(flat_columns, (0, missing), constant_values=num_columns)
    tokens, flat = (jnp.pad(x, (0, missing)) for x in (tokens, flat))
    return Pairs(flat_columns, tokens, flat, jnp.append(flat_columns[1:] != flat_columns[:-1], True))


def _sum_columns(columns: Int[Array, "n"], values: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """Computes for each pair the sum of the values of all pairs up to this pair that have the same column.

    After the step of distance 2ⁿ, each sum covers the last 2ⁿ⁺¹ pairs. So the order of additions is fixed, unlike in a
    scatter that adds repeatedly to one element on a GPU. The steps are a loop, because otherwise XLA would keep the
    values of all steps.
    """
    size = columns.shape[0]

    def before(x: Array, step: Any, none: Any) -> Array:
        padded = jnp.concatenate([jnp.full_like(x, none), x])
        return lax.dynamic_slice_in_dim(padded, size - step, size)

    def body(i: Any, values: Array) -> Array:
        step = jnp.left_shift(jnp.int32(1), i)
        same = before(columns, step, -1) == columns
        return values + jnp.where(expand_like(same, values), before(values, step, 0.0), 0.0)

    return lax.fori_loop(0, (size - 1).bit_length(), body, _jax.vary_like(values, columns))


def _find_targets(columns: Array, ends: Array, num_columns: int) -> Array:
    """Returns the index at which each pair's sum is written: the column if the pair is its last, else out of range."""
    outside = num_columns + jnp.arange(columns.shape[0], dtype=jnp.int32)
    return jnp.where(ends & (columns < num_columns), columns, outside)


def compute_dbias(terms: Float[Array, "T K"], columns: Int[Array, "T K"], num_columns: int) -> Float[Array, "V"]:
    """Computes the sum of each column's terms."""
    pairs = sort_pairs(terms, columns, num_columns, 1)
    targets = _find_targets(pairs.columns, pairs.ends, num_columns)
    empty = jnp.zeros((num_columns,), terms.dtype)
    return empty.at[targets].set(_sum_columns(pairs.columns, pairs.terms), mode="drop", unique_indices=True)


def compute_dweight(
    terms: Float[Array, "T K"], hidden: Float[Array, "T H"], columns: Int[Array, "T K"], weight: Array, call: Call
) -> Float[Array, "V H"]:
    """Computes Σ terms · h of each column, summed in the dtype of ``terms`` in a fixed order, and rounded once.

    Sorted pairs are processed in chunks, and a chunk in blocks, one matrix product per block. If a column continues in
    the next block or chunk, its sum is carried on. Each finished sum is written once.
    """
    num_columns = weight.shape[call.vocab_dim]
    terms, columns = _jax.vary_like((terms, columns), (terms, hidden, columns, weight))  # as the carry does
    shape = choose_blocks(terms.size, hidden.shape[1], terms.dtype.itemsize)
    pairs = sort_pairs(terms, columns, num_columns, shape.size)

    def body(i: Any, carry: Any) -> Any:
        written, last, column = carry
        chunk = Pairs(*(lax.dynamic_slice_in_dim(x, i * shape.size, shape.size) for x in pairs))
        sums, last = _sum_blocks(chunk, hidden, shape, num_columns, last, column)
        targets = _find_targets(chunk.columns, chunk.ends, num_columns)
        rounded = sums.astype(weight.dtype)
        if call.vocab_dim == 0:
            written = written.at[targets].set(rounded, mode="drop", unique_indices=True)
        else:
            written = written.at[:, targets].set(rounded.T, mode="drop", unique_indices=True)
        return written, last, chunk.columns[-1]

    start = jnp.zeros_like(weight), jnp.zeros((hidden.shape[1],), terms.dtype), jnp.int32(-1)
    start = _jax.vary_like(start, terms)
    return lax.fori_loop(0, pairs.columns.shape[0] // shape.size, body, start)[0]


class Blocks(NamedTuple):
    """How a chunk of pairs is divided into blocks."""

    number: int
    pairs: int  # the number of pairs per block

    @property
    def size(self) -> int:
        """The number of pairs per chunk."""
        return self.number * self.pairs


def choose_blocks(num_pairs: int, hidden_size: int, itemsize: int) -> Blocks:
    """Divides pairs into the fewest equal chunks whose sums fit in `GATHERED_BYTES`, and each chunk into blocks."""
    pairs = min(BLOCK_PAIRS, num_pairs)
    blocks = -(-num_pairs // pairs)
    chunks = -(-blocks // max(1, choose_chunk_tokens(1, hidden_size, itemsize) // pairs))
    return Blocks(-(-blocks // chunks), pairs)


def _sum_blocks(
    chunk: Pairs, hidden: Float[Array, "T H"], shape: Blocks, num_columns: int, last: Float[Array, "H"], column: Any
) -> tuple[Float[Array, "n H"], Float[Array, "H"]]:
    """Computes for each pair of a chunk the sum of the pair's column so far. Returns these sums, and the last one.

    ``last`` is the sum of ``column`` before the chunk.
    """
    has_column = chunk.columns < num_columns  # NaN in a pair without a column must not spread
    rows = jnp.where(has_column[:, None], hidden[chunk.tokens], 0)
    columns, terms, rows = (
        x.reshape(shape.number, shape.pairs, *x.shape[1:]) for x in (chunk.columns, chunk.terms, rows)
    )
    sums = _sum_prefixes(columns, terms, rows)
    # The same over blocks: the sum of a block's last column is carried to the next block.
    ends = jnp.append(column, columns[:, -1])
    carried = _sum_prefixes(ends, jnp.ones_like(ends, chunk.terms.dtype), jnp.concatenate([last[None], sums[:, -1]]))
    continues = columns == ends[:-1, None]
    sums += jnp.where(continues[:, :, None], carried[:-1, None], 0.0)
    return sums.reshape(shape.size, -1), carried[-1]


def _sum_prefixes(
    columns: Int[Array, "*b n"], terms: Float[Array, "*b n"], values: Float[Array, "*b n H"]
) -> Float[Array, "*b n H"]:
    """Computes for each pair Σ terms · values over the pairs of the same column up to this pair, in the terms' dtype.

    If the values are bfloat16, a float32 term is split into two bfloat16 numbers, which together hold 16 bits of it. At
    (4096, 4096, 151936) and 64 ids per token on an H200, dweight takes 1.24 times as long as `hidden @ weight.T`; with
    float32 products it would take 2.03 times as long.
    """
    same = jnp.tril(columns[..., :, None] == columns[..., None, :])
    if values.dtype == jnp.bfloat16 and terms.dtype == jnp.float32:
        high = lax.reduce_precision(terms, 8, 7)  # not by casts, which XLA may remove
        parts = [jnp.where(same, x[..., None, :], 0.0).astype(jnp.bfloat16) for x in (high, terms - high)]
        factors, values = jnp.concatenate(parts, axis=-1), jnp.concatenate([values, values], axis=-2)
        return jnp.matmul(factors, values, preferred_element_type=jnp.float32)
    factors = jnp.where(same, terms[..., None, :], 0.0)
    return jnp.matmul(factors, values.astype(terms.dtype), precision="highest")
