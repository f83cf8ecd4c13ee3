"""Logits of given columns per token, each a dot product with one row of the weight: no pass over the vocabulary.

The rows of the weight are gathered for a chunk of tokens at a time. XLA fuses gather, product and sum on a GPU, and
where it does not, a chunk bounds the gathered rows.
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

GATHERED_BYTES = 32 << 20  # of the rows of the weight that one chunk gathers
BLOCK_PAIRS = 128  # whose sums are one product
# Where XLA fuses the gather, a chunk holds nothing and its size is that of a launch: for 64 candidates at (4096, 4096,
# 151936) on an H200 a forward takes 1.140 of one without at 32 MiB, 1.073 at 128, 1.055 at 512, 1.053 at once.
FUSED_BYTES = 512 << 20


def chunk_tokens(num_columns: int, hidden_size: int, itemsize: int, gathered_bytes: int | None = None) -> int:
    """Tokens whose rows of the weight are gathered at a time."""
    most = GATHERED_BYTES if gathered_bytes is None else gathered_bytes
    return max(1, most // (num_columns * hidden_size * itemsize))


def plan(call: Call) -> Plan:
    """What `explain` says of `lce_jax.linear_logits`: the call's candidates are the ids."""
    num_ids, stat, item = call.num_candidates, call.stat_dtype.itemsize, call.dtype.itemsize
    size = min(max(call.num_tokens, 1), chunk_tokens(max(num_ids, 1), call.hidden_size, item))
    rows = size * num_ids * call.hidden_size * item
    held = rows + _walk.copied_bytes(call) if num_ids and call.num_tokens else 0
    return Plan(
        implementation="xla",
        refused={},
        call=call,
        tiles={"tokens": size},
        forward_bytes=held,
        backward_bytes=held + (_walk.sum_bytes(call) if held else 0),
        kept_bytes=call.num_tokens * num_ids * stat,
        logits_bytes=call.num_tokens * call.columns * stat,
        notes=(
            f"linear_logits: {num_ids} ids per token, {call.num_tokens * num_ids:,} products with one row of the "
            f"weight each, at most {format_bytes(rows)} of rows at a time; a GPU stores none of the forward's",
        ),
    )


def products(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    columns: Int[Array, "T K"],
    call: Call,
    dtype: Any,
    num_rows: Int[Array, ""] | None = None,
    gathered_bytes: int | None = None,
) -> Float[Array, "T K"]:
    """H · w of each token's columns, summed in ``dtype``; 0 for the column -1 and, by chunks, after ``num_rows``."""
    size = chunk_tokens(columns.shape[1], hidden.shape[1], weight.dtype.itemsize, gathered_bytes)

    def chunk(per_token: tuple[Array, Array]) -> Array:
        return _products(per_token[0], weight, per_token[1], call, dtype)

    return _walk.by_chunks(chunk, (hidden, columns), size, num_rows, (weight, num_rows))


def _products(hidden: Array, weight: Array, columns: Array, call: Call, dtype: Any) -> Float[Array, "T K"]:
    """A product and a sum, not a ``dot_general``, whose operand XLA would have to store."""
    rows = _rows_of(weight, columns, call).astype(dtype)
    wide = hidden.astype(dtype)
    if call.vocab_dim == 0:
        raw = jnp.sum(wide[:, None, :] * rows, axis=2)
    else:
        raw = jnp.sum(wide.T[:, :, None] * rows, axis=0)
    return jnp.where(columns >= 0, raw, 0.0)


def _rows_of(weight: Array, columns: Array, call: Call) -> Array:
    """The weight's row of each column, along `Options.vocab_dim`."""
    if weight.shape[1] == 1 and call.vocab_dim == 1:  # XLA of JAX 0.12.0 reads past it on CPUs
        weight = jnp.pad(weight, ((0, 0), (0, 1)))
    return jnp.take(weight, columns, axis=call.vocab_dim, mode="clip")


def dhidden(
    terms: Float[Array, "T K"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], call: Call
) -> Float[Array, "T H"]:
    """Σ_k terms · w of each token's columns, summed in the dtype of ``terms``."""
    size = chunk_tokens(terms.shape[1], weight.shape[call.hidden_dim], weight.dtype.itemsize)

    def chunk(per_token: tuple[Array, Array]) -> Array:
        own, at = per_token
        rows = _rows_of(weight, at, call).astype(terms.dtype)
        rows = rows if call.vocab_dim == 0 else jnp.moveaxis(rows, 0, 2)
        return jnp.sum(jnp.where((at >= 0)[:, :, None], own[:, :, None] * rows, 0.0), axis=1)

    return _walk.by_chunks(chunk, (terms, columns), size, None, weight)


class Pairs(NamedTuple):
    """The (token, column) pairs of a call, sorted by column; those without a column come last, as column V."""

    columns: Int[Array, "N"]
    tokens: Int[Array, "N"]
    terms: Float[Array, "N"]
    ends: Bool[Array, "N"]  # whether a pair is the last of its column


def sorted_pairs(terms: Float[Array, "T K"], columns: Int[Array, "T K"], num_columns: int, multiple: int) -> Pairs:
    """The pairs, padded to a multiple of ``multiple``. The sort is stable, so each column has its tokens in order."""
    places = jnp.where(columns < 0, num_columns, columns).reshape(-1)
    order = jnp.arange(places.shape[0], dtype=jnp.int32)
    places, order = lax.sort((places, order), num_keys=1, is_stable=True)
    tokens, flat = order // columns.shape[1], terms.reshape(-1)[order]
    missing = -places.shape[0] % multiple
    places = jnp.pad(places, (0, missing), constant_values=num_columns)
    tokens, flat = (jnp.pad(x, (0, missing)) for x in (tokens, flat))
    return Pairs(places, tokens, flat, jnp.append(places[1:] != places[:-1], True))


def _running_sums(columns: Int[Array, "n"], values: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """The sum of the values of a column up to each of its pairs: after the step of 2ⁿ, of the last 2ⁿ⁺¹ of them.

    A fixed order of additions, which a scatter that adds to one place many times does not have on a GPU. A loop,
    because XLA would hold the values of all steps at once.
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


def _places(columns: Array, ends: Array, num_columns: int) -> Array:
    """Where the sum of a column goes, from its last pair; every other pair gets a place of its own outside."""
    outside = num_columns + jnp.arange(columns.shape[0], dtype=jnp.int32)
    return jnp.where(ends & (columns < num_columns), columns, outside)


def dbias(terms: Float[Array, "T K"], columns: Int[Array, "T K"], num_columns: int) -> Float[Array, "V"]:
    """The sum of the terms of each column."""
    pairs = sorted_pairs(terms, columns, num_columns, 1)
    places = _places(pairs.columns, pairs.ends, num_columns)
    empty = jnp.zeros((num_columns,), terms.dtype)
    return empty.at[places].set(_running_sums(pairs.columns, pairs.terms), mode="drop", unique_indices=True)


def dweight(
    terms: Float[Array, "T K"], hidden: Float[Array, "T H"], columns: Int[Array, "T K"], weight: Array, call: Call
) -> Float[Array, "V H"]:
    """Σ terms · h of each column, summed in the dtype of ``terms`` and rounded once; two runs are bitwise equal.

    The sorted pairs go by chunks, and a chunk by blocks, each a matrix product. The sum of a column that the next block
    or chunk continues goes on with it, and the others are written, each once.
    """
    num_columns = weight.shape[call.vocab_dim]
    terms, columns = _jax.vary_like((terms, columns), (terms, hidden, columns, weight))  # as what is carried does
    shape = blocks(terms.size, hidden.shape[1], terms.dtype.itemsize)
    pairs = sorted_pairs(terms, columns, num_columns, shape.size)

    def body(i: Any, carry: Any) -> Any:
        written, last, column = carry
        own = Pairs(*(lax.dynamic_slice_in_dim(x, i * shape.size, shape.size) for x in pairs))
        sums, last = _sums_of_blocks(own, hidden, shape, num_columns, last, column)
        places = _places(own.columns, own.ends, num_columns)
        rounded = sums.astype(weight.dtype)
        if call.vocab_dim == 0:
            written = written.at[places].set(rounded, mode="drop", unique_indices=True)
        else:
            written = written.at[:, places].set(rounded.T, mode="drop", unique_indices=True)
        return written, last, own.columns[-1]

    start = jnp.zeros_like(weight), jnp.zeros((hidden.shape[1],), terms.dtype), jnp.int32(-1)
    start = _jax.vary_like(start, terms)
    return lax.fori_loop(0, pairs.columns.shape[0] // shape.size, body, start)[0]


class Blocks(NamedTuple):
    """How the pairs of a chunk lie."""

    number: int
    pairs: int  # of each

    @property
    def size(self) -> int:
        """Pairs of a chunk."""
        return self.number * self.pairs


def blocks(num_pairs: int, hidden_size: int, itemsize: int) -> Blocks:
    """Blocks whose sums take `GATHERED_BYTES`, or fewer: chunks of the same size, as few as that leaves."""
    pairs = min(BLOCK_PAIRS, num_pairs)
    blocks = -(-num_pairs // pairs)
    chunks = -(-blocks // max(1, chunk_tokens(1, hidden_size, itemsize) // pairs))
    return Blocks(-(-blocks // chunks), pairs)


def _sums_of_blocks(
    own: Pairs, hidden: Float[Array, "T H"], shape: Blocks, num_columns: int, last: Float[Array, "H"], column: Any
) -> tuple[Float[Array, "n H"], Float[Array, "H"]]:
    """Of each pair of a chunk the sum of its column so far, with ``last``, what ``column`` had before; and the last."""
    rows = jnp.where((own.columns < num_columns)[:, None], hidden[own.tokens], 0)  # NaN of no column cannot spread
    columns, terms, rows = (x.reshape(shape.number, shape.pairs, *x.shape[1:]) for x in (own.columns, own.terms, rows))
    sums = _sums_so_far(columns, terms, rows)
    # The same again over blocks: of what their last columns have so far.
    ends = jnp.append(column, columns[:, -1])
    carried = _sums_so_far(ends, jnp.ones_like(ends, own.terms.dtype), jnp.concatenate([last[None], sums[:, -1]]))
    continues = columns == ends[:-1, None]
    sums += jnp.where(continues[:, :, None], carried[:-1, None], 0.0)
    return sums.reshape(shape.size, -1), carried[-1]


def _sums_so_far(
    columns: Int[Array, "*b n"], terms: Float[Array, "*b n"], values: Float[Array, "*b n H"]
) -> Float[Array, "*b n H"]:
    """Of each place Σ terms · values over the places up to it that have its column, in the terms' dtype.

    Beside values in bfloat16 a float32 term is the sum of two bfloat16 numbers, 16 bits of it. At (4096, 4096, 151936)
    and 64 ids per token on an H200, dweight takes 1.24 of one `hidden @ weight.T` so, and 2.03 with float32 products.
    """
    same = jnp.tril(columns[..., :, None] == columns[..., None, :])
    if values.dtype == jnp.bfloat16 and terms.dtype == jnp.float32:
        high = lax.reduce_precision(terms, 8, 7)  # not two casts, which XLA may leave out
        parts = [jnp.where(same, x[..., None, :], 0.0).astype(jnp.bfloat16) for x in (high, terms - high)]
        factors, values = jnp.concatenate(parts, axis=-1), jnp.concatenate([values, values], axis=-2)
        return jnp.matmul(factors, values, preferred_element_type=jnp.float32)
    factors = jnp.where(same, terms[..., None, :], 0.0)
    return jnp.matmul(factors, values.astype(terms.dtype), precision="highest")
