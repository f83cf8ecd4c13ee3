"""The forward and the backward of `lce_jax.linear_logits`. A shard computes a dot product for each id that it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _describe
from lce_jax.call._describe import Rows
from lce_jax.mathematics import _logprobs
from lce_jax.mesh import _collectives
from lce_jax.run import _shard
from lce_jax.run._partitioning import ArraySharding, Program, head_sharding
from lce_jax.run._runner import Capability, run_program
from lce_jax.types._types import Call, Primals
from lce_jax.xla import _logits

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


def forward(call: Call, primals: Primals, rows: Rows, differentiated: bool) -> tuple[Array, Array | None]:
    """Returns the logits [..., K]; and for the backward, their derivatives with respect to the raw products."""

    def run(call: Call, primals: Primals, rows: Rows) -> tuple[Array, Array | None]:
        z, slope = _forward(call, primals, rows)
        return z, slope if differentiated else None

    operands = head_sharding(call.vocab_dim), ArraySharding.TOKENS
    return run_program(
        call, Program(run, operands, (ArraySharding.RESULTS, ArraySharding.TOKENS), joins=True), primals, rows
    )


def backward(call: Call, primals: Primals, rows: Rows, slope: Array, cotangent: Array) -> Primals:
    """Returns the gradients of the operands."""
    head = head_sharding(call.vocab_dim)
    program = Program(_backward, (head, ArraySharding.TOKENS, ArraySharding.TOKENS, ArraySharding.RESULTS), head)
    return run_program(call, program, primals, rows, slope, cotangent)


def _make_empty_results(call: Call, rows: Rows) -> Array:
    assert rows.candidates is not None
    return jnp.zeros(rows.candidates.shape, call.stat_dtype)


LOGITS = Capability(forward, backward, _make_empty_results)


def _forward(call: Call, primals: Primals, rows: Rows) -> tuple[Float[Array, "*b K"], Float[Array, "*b K"]]:
    """Returns the logits and their slopes. Both are 0 for ids of -1 or outside the vocabulary, and in masked rows."""
    assert rows.candidates is not None
    shape, dtype = rows.candidates.shape, call.stat_dtype
    rows = _describe.flatten_tokens(rows, rows.labels.ndim)
    columns, wrong = _find_columns(call, primals, rows), _describe.find_invalid_rows(rows)
    hidden = _shard.flatten_operands(call, primals).hidden
    raw = _logits.compute_products(hidden, primals.weight, columns, call, dtype)
    if primals.bias is not None:
        raw = raw + jnp.take(primals.bias, columns, mode="clip").astype(dtype)
    scales = _describe.compute_scales(rows, dtype, signs_hidden=False)
    z, slope = _logprobs.transform_logits(raw, call, scales.inverse_temperature, scales.raw_scale)
    factor = _logprobs.compute_row_factor(call, scales.derivative)
    factor = factor if isinstance(factor, float) else factor[:, None]
    slope = jnp.full_like(raw, factor) if slope is None else slope * factor
    z, slope = jax.tree.map(lambda x: jnp.where(columns >= 0, x, 0.0), (z, slope))
    if call.axis_name is not None:
        z, slope = _sum_over_shards((z, slope), rows, call.axis_name)
    z = z if wrong is None else jnp.where(wrong[:, None], jnp.nan, z)
    return z.reshape(shape), slope.reshape(shape)


def _sum_over_shards(local: tuple[Array, Array], rows: Rows, axis_name: _collectives.AxisName) -> tuple[Array, Array]:
    """Sums logits and slopes over the shards. The sum is exact, because one shard has the logit and the others have 0.

    Rows in which the shards' operands differ become NaN.
    """
    if rows.tags is None:
        return lax.psum(local, axis_name)
    (z, slope), K = local, local[0].shape[1]
    differences = _collectives.difference_terms(rows.tags, lax.axis_index(axis_name), lax.axis_size(axis_name))
    z, slope = lax.psum((jnp.concatenate([z, differences.astype(z.dtype)], axis=1), slope), axis_name)
    agree: Any = _collectives.ignore_masked_rows(jnp.all(z[:, K:] == 0, axis=1), rows.where)
    z, slope = _collectives.set_nan_where_different(agree, (z[:, :K], slope))
    return z, slope


def _backward(call: Call, primals: Primals, rows: Rows, slope: Array, cotangent: Array) -> Primals:
    """Returns one device's gradients, in the shapes, dtypes and types of their operands."""
    rows, slope, cotangent = _describe.flatten_tokens((rows, slope, cotangent), rows.labels.ndim)
    if call.axis_name is not None and call.token_axes is None:
        cotangent = _collectives.sum_cotangents(cotangent, call.axis_name)
    columns = _find_columns(call, primals, rows)
    terms = jnp.where(slope == 0.0, 0.0, cotangent * slope)
    hidden = _shard.flatten_operands(call, primals).hidden
    dweight = _logits.compute_dweight(terms, hidden, columns, primals.weight, call).astype(primals.weight.dtype)
    dbias = None if primals.bias is None else _logits.compute_dbias(terms, columns, primals.bias.shape[0])
    dhidden = _logits.compute_dhidden(terms, primals.weight, columns, call)
    return _shard.reduce_gradients(call, Primals(dhidden, dweight, dbias), primals)


def _find_columns(call: Call, primals: Primals, rows: Rows) -> Int[Array, "T K"]:
    """Returns the ids as columns of this shard: -1 for ids of other shards, and in masked rows."""
    assert rows.candidates is not None
    start, size = _shard.find_first_column(call, primals.weight), primals.weight.shape[call.vocab_dim]
    columns = _describe.find_local_columns(rows.candidates, start, size)
    unmasked = _find_unmasked_rows(rows)
    return columns if unmasked is None else jnp.where(unmasked[:, None], columns, -1)


def _find_unmasked_rows(rows: Rows) -> Bool[Array, "T"] | None:
    wrong = _describe.find_invalid_rows(rows)
    return rows.where if wrong is None else ~wrong if rows.where is None else rows.where & ~wrong
