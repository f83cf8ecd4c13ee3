"""The gradients: dlogits chunk by chunk, each feeding the two products of `_products`.

The chunks run in `lax.fori_loop`, one of them alive at a time. The first come from the cache, if there is one, in one
chunk that takes its place wherever it may; the others from the recomputing kernel. What the kernels leave out, a few
columns at the end of the vocabulary, goes through plain XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math
from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _cached, _config, _dlogits, _mean, _operands, _products
from lce_jax.mosaic._cached import Cache
from lce_jax.mosaic._config import ATOM_ROWS, ROW_BLOCK, TILE_N
from lce_jax.mosaic._operands import Prepared

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

type Carry = tuple[Float[Array, "splits Tp Hp"], Float[Array, "V H"]]  # fp32 parts of dhidden, and dweight


def gradients(
    operands: Operands, case: Case, rows: RowCoefficients, cache: Cache | None, interpret: Any = None
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """Eq. 5 of the whole shard: dhidden in fp32, anything on rows that are not live, dweight in the weight's dtype."""
    shape = _config.geometry(case)
    prepared = _operands.prepare(operands, case)
    factors = _operands.row_factors(rows, shape.padded_tokens)
    cached = 0 if cache is None else cache.max.shape[0]

    def recomputed(first_tile: Any, columns: int) -> Array:
        return _dlogits.dlogits(prepared, case, factors, first_tile, columns, interpret)

    def from_cache(first_tile: Any, columns: int) -> Array:
        assert cache is not None
        return _cached.dlogits(prepared, case, factors, cache, first_tile, columns, interpret)

    start = (
        jnp.zeros(_config.sums_shape(case), jnp.float32),
        lax.empty(operands.weight.shape, case.dtype),  # every column is written
    )
    carry: Carry = _compat.vary_like(start, (operands, rows, cache))
    if cached:
        tiles = cached if _config.overwrites_cache(case) else _config.chunk_tiles(case, cached)
        carry = _walk_chunks(operands, prepared, case, range(0, cached, tiles), from_cache, carry, interpret)
    if cached < shape.tiles:
        tiles = _config.chunk_tiles(case, shape.tiles - cached)
        carry = _walk_chunks(operands, prepared, case, range(cached, shape.tiles, tiles), recomputed, carry, interpret)
    sums, dweight = carry
    dhidden = jnp.sum(sums, axis=0)[: case.num_tokens, : case.hidden_size]
    if shape.tail or operands.num_columns is not None:
        dhidden, dweight = _add_rest(operands, prepared, case, rows._replace(uniform=None), dhidden, dweight, interpret)
    if rows.uniform is not None:
        dhidden, dweight = _mean.add_gradients(operands, case, rows.uniform, dhidden, dweight)
    return dhidden, dweight


def _walk_chunks(
    operands: Operands,
    prepared: Prepared,
    case: Case,
    chunks: range,
    dlogits: Callable[[Any, int], Array],
    carry: Carry,
    interpret: Any,
) -> Carry:
    """Adds the part of a range of vocabulary tiles, the range's step of them at a time."""
    first, tiles = chunks.start, chunks.step
    covered = _covered_columns(operands, case)
    columns = min(chunks.stop * TILE_N, _config.geometry(case).columns) - first * TILE_N
    chunk = tiles * TILE_N
    whole, rest = divmod(columns, chunk)
    if whole and 0 < rest < TILE_N:  # not worth a chunk of its own
        whole, rest = whole - 1, rest + chunk

    def step(tile: Any, size: int, carry: Carry) -> Carry:
        sums, dweight = carry
        start = tile * TILE_N
        depth = jnp.clip(covered - start, 0, size)
        d = dlogits(tile, size)
        if case.vocab_size % ATOM_ROWS == 0:
            sums = _products.add_dhidden(sums, d, prepared.weight, case, start, depth, prepared.num_rows, interpret)
            dweight = _products.write_dweight(dweight, d, prepared.hidden, case, start, prepared.num_rows, interpret)
            return sums, dweight
        # TMA counts whole atoms of rows: copies of the chunk alone.
        weight = lax.dynamic_slice_in_dim(prepared.weight, start, size)
        part = _compat.vary_like(lax.empty(weight.shape, case.dtype), carry)
        sums = _products.add_dhidden(sums, d, weight, case, 0, depth, prepared.num_rows, interpret)
        part = _products.write_dweight(part, d, prepared.hidden, case, 0, prepared.num_rows, interpret)
        return sums, lax.dynamic_update_slice_in_dim(dweight, part, start, 0)

    if whole == 1:
        carry = step(jnp.int32(first), chunk, carry)
    elif whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: step(first + i * tiles, chunk, carry), carry)
    if rest:
        carry = step(jnp.int32(first + whole * tiles), rest, carry)
    return carry


def _covered_columns(operands: Operands, case: Case) -> Int[Array, ""] | int:
    """The columns that the products contract: all, or no step with padding in it, for 0 · NaN would be NaN."""
    columns, step = _config.geometry(case).columns, _config.tiles(case, "dhidden").tile_k
    if operands.num_columns is None:
        return columns
    return jnp.minimum(operands.num_columns, columns) // step * step


def _add_rest(
    operands: Operands,
    prepared: Prepared,
    case: Case,
    rows: RowCoefficients,
    dhidden: Array,
    dweight: Array,
    interpret: Any,
) -> tuple[Array, Array]:
    """The part of the true columns behind those that the products cover: fewer than a step and a tail."""
    shape, options = _config.geometry(case), case.options
    covered = _covered_columns(operands, case)
    width = shape.tail
    if operands.num_columns is not None:
        width += _config.tiles(case, "dhidden").tile_k
    column = covered + jnp.arange(width, dtype=jnp.int32)
    live = column < (case.vocab_size if operands.num_columns is None else operands.num_columns)
    weight = jnp.take(operands.weight, column, axis=options.vocab_dim, mode="clip")
    weight = _math.without_padding(weight, live, options)
    raw = _dot(operands.hidden, weight, options.hidden_dim)
    z, dcap = _math.transform_logits(raw, options, operands.inverse_temperature)
    d = _math.dlogits(z, dcap, rows, operands.targets - covered, live).astype(case.dtype)
    dhidden = dhidden + _dot(d, weight, options.vocab_dim)
    if case.vocab_size % ATOM_ROWS:
        part = _dot(d.T, operands.hidden, 0).astype(case.dtype)
        return dhidden, dweight.at[column].set(part, mode="drop")
    # XLA (0.11.2) cannot compile an update behind a kernel's; behind these columns are zeros and the end.
    d = jnp.pad(d, ((0, shape.tokens - case.num_tokens), (0, -width % ROW_BLOCK)))
    return dhidden, _products.write_dweight(dweight, d, prepared.hidden, case, covered, shape.tokens, interpret)


def _dot(left: Array, right: Array, right_dim: int) -> Float[Array, "m n"]:
    """A product in fp32; the last dimension of ``left`` is contracted."""
    return lax.dot_general(left, right, (((1,), (right_dim,)), ((), ())), preferred_element_type=jnp.float32)
