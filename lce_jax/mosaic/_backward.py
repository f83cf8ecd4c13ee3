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
from lce_jax.mosaic._config import ATOM_ROWS, TILE_N
from lce_jax.mosaic._operands import Prepared, Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

type Carry = tuple[Float[Array, "splits Tp Hp"], Float[Array, "V H"]]  # parts of dhidden, and dweight


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: Cache | None,
    may_round_dhidden: bool,
    may_overwrite_cache: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """Eq. 5 of the whole shard: dhidden, anything on rows that are not live, and dweight in the weight's dtype.

    dhidden is in fp32, or in the weight's dtype where that is allowed and one launch computes all of it.
    """
    shape = _config.geometry(case)
    prepared = _operands.prepare(operands, case)
    factors = _operands.row_factors(rows, shape.padded_tokens)
    cached = 0 if cache is None else cache.max.shape[0]
    overwrites = may_overwrite_cache and _config.can_overwrite_cache(case)

    def recomputed(span: Array, columns: int, weight: Array) -> Array:
        return _dlogits.dlogits(prepared, weight, case, factors, span, columns, interpret)

    def from_cache(span: Array, columns: int, weight: Array) -> Array:
        del weight
        assert cache is not None
        return _cached.dlogits(prepared, case, factors, cache, span, columns, overwrites, interpret)

    parts = []
    if cached:
        tiles = cached if overwrites else _config.chunk_tiles(case, cached)
        parts.append((range(0, cached, tiles), from_cache))
    if cached < shape.tiles:
        parts.append((range(cached, shape.tiles, _config.chunk_tiles(case, shape.tiles - cached)), recomputed))
    has_rest = bool(shape.tail) or operands.num_columns is not None
    adds = sum(len(chunks) for chunks, _ in parts) > 1  # else each tile of dhidden's parts is written once
    rounds = may_round_dhidden and not (adds or has_rest or rows.uniform is not None)
    carry: Carry = _compat.vary_like(_start(operands, case, adds, rounds), (operands, rows, cache))
    for chunks, dlogits in parts:
        carry = _walk_chunks(operands, prepared, case, chunks, dlogits, carry, adds, interpret)
    sums, dweight = carry
    dhidden = sums[0] if sums.shape[0] == 1 else jnp.sum(sums, axis=0)
    dhidden = dhidden[: case.num_tokens, : case.hidden_size]
    if has_rest:
        dhidden, dweight = _add_rest(operands, prepared, case, rows._replace(uniform=None), dhidden, dweight, interpret)
    if rows.uniform is not None:
        dhidden, dweight = _mean.add_gradients(operands, case, rows.uniform, dhidden, dweight)
    return dhidden, dweight


def _start(operands: Operands, case: Case, adds: bool, rounds: bool) -> Carry:
    """What the chunks begin with: memory for dhidden's parts, zero if they are added up, and for dweight."""
    shape, parts = _config.geometry(case), _config.sums_shape(case)
    sums = (jnp.zeros if adds else lax.empty)(parts, case.dtype if rounds and parts[0] == 1 else jnp.float32)
    # The kernels write whole tiles, `_add_rest` what it adds. Padding may leave a tail behind both.
    complete = operands.num_columns is None or not shape.tail or shape.columns % TILE_N
    return sums, (lax.empty if complete else jnp.zeros)(operands.weight.shape, case.dtype)


def _walk_chunks(
    operands: Operands,
    prepared: Prepared,
    case: Case,
    chunks: range,
    dlogits: Callable[[Array, int, Array], Array],
    carry: Carry,
    adds: bool,
    interpret: Any,
) -> Carry:
    """Adds the part of a range of vocabulary tiles (or writes it), the range's step of them at a time."""
    covered = _covered_columns(operands, case)
    columns = chunks.step * TILE_N
    in_place = case.vocab_size % ATOM_ROWS == 0  # else, as TMA counts whole atoms of rows, copies of each chunk

    def step(first: Any, carry: Carry) -> Carry:
        sums, dweight = carry
        column, num_tiles = first * TILE_N, jnp.minimum(chunks.stop - first, chunks.step)
        depth = jnp.clip(covered - column, 0, num_tiles * TILE_N)
        origin = column if in_place else 0
        span = Span(prepared.num_rows, prepared.num_columns, column, num_tiles, depth, origin).pack()
        weight, target = prepared.weight, dweight
        if not in_place:
            places = column + jnp.arange(columns, dtype=jnp.int32)
            weight = jnp.take(weight, places, axis=0, mode="clip")
            target = _compat.vary_like(lax.empty(weight.shape, case.dtype), carry)
        d = dlogits(span, columns, weight)
        sums = _products.update_dhidden(sums, d, weight, case, span, adds, interpret)
        written = _products.write_dweight(target, d, prepared.hidden, case, span, interpret)
        if in_place:
            return sums, written
        places = jnp.where(places < column + num_tiles * TILE_N, places, places + case.vocab_size)  # or none
        return sums, dweight.at[places].set(written, mode="drop", indices_are_sorted=True, unique_indices=True)

    if len(chunks) == 1:
        return step(jnp.int32(chunks.start), carry)
    return lax.fori_loop(0, len(chunks), lambda i, carry: step(chunks.start + i * chunks.step, carry), carry)


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
    d = jnp.pad(d, ((0, shape.tokens - case.num_tokens), (0, -width % TILE_N)))
    span = Span(shape.tokens, case.vocab_size, covered, d.shape[1] // TILE_N, origin=covered).pack()
    return dhidden, _products.write_dweight(dweight, d, prepared.hidden, case, span, interpret)


def _dot(left: Array, right: Array, right_dim: int) -> Float[Array, "m n"]:
    """A product in fp32; the last dimension of ``left`` is contracted."""
    return lax.dot_general(left, right, (((1,), (right_dim,)), ((), ())), preferred_element_type=jnp.float32)
