"""The gradients: dlogits chunk by chunk, each feeding two plain products that XLA gives to cuBLAS.

The chunks run in `lax.fori_loop`. XLA then fuses the weight's slice, the sum into dhidden and the update of dweight
into the products, and one chunk of dlogits is alive at a time. The first chunks come from the cache, if there is
one, the others from the recomputing kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat, _math
from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _cached, _config, _dlogits, _forward, _mean, _operands
from lce_jax.mosaic._cached import Cache
from lce_jax.mosaic._config import TILE_N
from lce_jax.mosaic._operands import Prepared

if TYPE_CHECKING:
    from jaxtyping import Array, Float

type Gradients = tuple[Float[Array, "T H"], Float[Array, "V H"]]  # fp32, and the weight's dtype


def gradients(
    operands: Operands, case: Case, rows: RowCoefficients, cache: Cache | None, interpret: Any = None
) -> Gradients:
    """Eq. 5 of the whole shard."""
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
        jnp.zeros(prepared.hidden.shape, jnp.float32),
        lax.empty(operands.weight.shape, case.dtype),  # every column is written
    )
    carry: Gradients = _compat.vary_like(start, (operands, rows, cache))
    for first, stop, dlogits in ((0, cached, from_cache), (cached, shape.tiles, recomputed)):
        carry = _walk_chunks(operands, prepared, case, first, stop, dlogits, carry)
    dhidden, dweight = carry
    dhidden = dhidden[: case.num_tokens]
    if shape.tail:
        dhidden, dweight = _add_tail(operands, case, rows, dhidden, dweight)
    if rows.uniform is not None:
        dhidden, dweight = _mean.add_gradients(operands, case, rows.uniform, dhidden, dweight)
    return dhidden, dweight


def _walk_chunks(
    operands: Operands,
    prepared: Prepared,
    case: Case,
    first: int,
    stop: int,
    dlogits: Callable[[Any, int], Array],
    carry: Gradients,
) -> Gradients:
    """Adds the part of vocabulary tiles [first, stop)."""
    if first == stop:
        return carry
    shape, vocab_dim = _config.geometry(case), case.options.vocab_dim
    columns = min(stop * TILE_N, shape.columns) - first * TILE_N
    chunk = _config.chunk_tiles(case, stop - first) * TILE_N
    whole, rest = divmod(columns, chunk)
    if whole and 0 < rest < TILE_N:  # a tile is the least that the kernel takes
        whole, rest = whole - 1, rest + chunk

    def step(tile: Any, size: int, carry: Gradients) -> Gradients:
        dhidden, dweight = carry
        d = dlogits(tile, size)
        start = tile * TILE_N
        weight = lax.dynamic_slice_in_dim(operands.weight, start, size, axis=vocab_dim)
        live = _math.live_columns(start, size, operands.num_columns)
        weight = _math.without_padding(weight, live, case.options)
        dhidden = dhidden + _dot(d, weight, 1, vocab_dim, jnp.float32)
        left, right = (d, prepared.hidden) if vocab_dim == 0 else (prepared.hidden, d)
        part = _dot(left, right, 0, 0, case.dtype)
        return dhidden, lax.dynamic_update_slice_in_dim(dweight, part, start, vocab_dim)

    if whole:
        tiles = chunk // TILE_N
        carry = lax.fori_loop(0, whole, lambda i, carry: step(first + i * tiles, chunk, carry), carry)
    if rest:
        carry = step(jnp.int32(first + whole * (chunk // TILE_N)), rest, carry)
    return carry


def _add_tail(operands: Operands, case: Case, rows: RowCoefficients, dhidden: Array, dweight: Array) -> Gradients:
    """The part of the columns that are no whole swizzle atom."""
    start = _config.geometry(case).columns
    z, dcap = _forward.tail_logits(operands, case)
    live = _forward.tail_mask(operands, case)
    d = _math.dlogits(z, dcap, rows, operands.targets - start, live).astype(case.dtype)
    weight = _math.without_padding(operands.weight[start:], live, case.options)
    dhidden = dhidden + _dot(d, weight, 1, 0, jnp.float32)
    part = _dot(d, operands.hidden, 0, 0, case.dtype)
    return dhidden, lax.dynamic_update_slice_in_dim(dweight, part, start, 0)


def _dot(left: Array, right: Array, left_dim: int, right_dim: int, dtype: Any) -> Array:
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)
