"""The k most likely tokens in plain XLA: a selection from the logits of one chunk of tokens at a time.

A chunk has all columns of the shard, so each row is summed and selected in one step. Each chunk reads the weight once.
With a few hundred tokens per chunk, the product is limited by arithmetic and not by memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from lce_jax.mathematics import _largest, _logprobs
from lce_jax.mathematics._largest import Largest
from lce_jax.mathematics._statistics import clip_to_finite
from lce_jax.types._types import Call, Operands, Plan
from lce_jax.xla import _walk

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float

CHUNK_BYTES, CHUNK_BYTES_ON_CPU = 160 << 20, 32 << 20  # the bytes of a chunk's logits, in the statistics' dtype
# The tokens of a chunk are a multiple of this. At (4096, 4096, 151936) on an H200, chunks of 128 tokens take 15.4 ms
# instead of 10.6, because each chunk reads the weight.
GRAIN, GRAIN_ON_CPU = 256, 128
LEAST_TERMS = 16  # the smallest number of terms of a product: see `_apply_sign`


def choose_chunk_tokens(call: Call) -> int:
    """Returns the number of tokens per chunk. Only one chunk's logits exist at a time."""
    on_cpu = call.device.platform == "cpu"
    budget, grain = (CHUNK_BYTES_ON_CPU, GRAIN_ON_CPU) if on_cpu else (CHUNK_BYTES, GRAIN)
    most = budget // (call.columns * call.stat_dtype.itemsize)
    return min(call.num_tokens, max(most // grain * grain, grain))


def plan(call: Call, name: str) -> Plan:
    """Returns the plan of a call: the chunk of tokens, and the bytes of its logits."""
    size, stat = choose_chunk_tokens(call), call.stat_dtype.itemsize
    return Plan(
        implementation=name,
        refused={},
        call=call,
        tiles={"tokens": size},
        forward_bytes=_walk.tile_bytes(call, size, call.columns) + _walk.copied_bytes(call),
        backward_bytes=0,
        kept_bytes=0,
        logits_bytes=call.num_tokens * call.columns * stat,
        notes=("linear_topk is not differentiable: there is no backward",),
    )


def find_largest(operands: Operands, call: Call) -> Largest:
    """Returns each token's k largest raw products over the shard's columns, or all if there are fewer than k.

    The selection comes before scale and softcap. These cannot change the order, but may round two logits to the same
    value.
    """

    def select_in_chunk(per_token: Any) -> Largest:
        hidden, inverse_temperature, raw_scale = per_token
        chunk = operands._replace(hidden=hidden, inverse_temperature=inverse_temperature, raw_scale=raw_scale)
        chunk = _apply_sign(chunk, call)
        raw = _walk.dot(chunk.hidden, chunk.weight, 1, call.hidden_dim, call, call.stat_dtype)
        if chunk.bias is not None:
            sign = np.sign(call.logit_scale) if raw_scale is None else jnp.sign(raw_scale)[:, None]
            raw = raw + chunk.bias[None, :] * sign
        unpadded = _logprobs.unpadded_columns(0, call.columns, chunk.num_columns)
        raw = raw if unpadded is None else jnp.where(unpadded[None, :], raw, -jnp.inf)
        products, ids = _largest.largest(raw, min(call.top_k, call.columns))
        capped = None
        if call.logit_softcap is not None:
            capped = jnp.where(products == -jnp.inf, -jnp.inf, _apply_softcap(products, call, raw_scale))
        selected = Largest(products, ids, capped, jnp.zeros(raw.shape[:1], raw.dtype))
        return selected._replace(sumexp=_sumexp(raw, selected, chunk, call))

    per_token = operands.hidden, operands.inverse_temperature, operands.raw_scale
    return _walk.map_chunks(select_in_chunk, per_token, choose_chunk_tokens(call), operands.num_rows, operands)


def _apply_sign(operands: Operands, call: Call) -> Operands:
    """Multiplies hidden by the sign of the scale, so that logits increase with the products. Also pads short products.

    Multiplying by a sign is exact. With a scale of 0, all products are 0 and therefore equal. A product is padded to
    `LEAST_TERMS` terms, because XLA may recompute shorter products for each use and round them differently, for example
    together with the bias. A selected logit would then not be among its row's logits, and no sum would include it.
    """
    if (missing := LEAST_TERMS - operands.hidden.shape[1]) > 0:
        padding = [(0, missing if dim == call.hidden_dim else 0) for dim in range(2)]
        hidden, weight = jnp.pad(operands.hidden, [(0, 0), (0, missing)]), jnp.pad(operands.weight, padding)
        operands = operands._replace(hidden=hidden, weight=weight)
    if operands.raw_scale is not None:
        sign = jnp.sign(operands.raw_scale).astype(operands.hidden.dtype)[:, None]
    elif call.logit_scale <= 0.0:
        sign = jnp.full((1, 1), np.sign(call.logit_scale), operands.hidden.dtype)
    else:
        return operands
    return operands._replace(hidden=operands.hidden * sign)


def _sumexp(raw: Float[Array, "t V"], largest: Largest, operands: Operands, call: Call) -> Float[Array, "t"]:
    """Computes the sum of exponentials (eq. 1). Selected columns contribute the x that was selected.

    XLA may round the softcap of the selected columns differently than the softcap of all columns. With the selected x
    in the sum, log-probabilities are at most 0.
    """
    row_scale = _logprobs.expand_rows(_logprobs.compute_row_scale(call, operands.inverse_temperature))

    def exponentials(products: Array, x: Array) -> Array:
        u = x - largest.max[:, None]
        return jnp.where(products == -jnp.inf, 0.0, jnp.exp(jnp.where(u > 0.0, 0.0, u) * row_scale))

    x = clip_to_finite(raw)
    x = x if call.logit_softcap is None else _apply_softcap(x, call, operands.raw_scale)
    selected, least = exponentials(largest.products, largest.x), jnp.min(largest.products, axis=1, keepdims=True)
    least_exponential = jnp.min(selected, axis=1, keepdims=True)  # other columns may have this value too
    others = jnp.where(raw == least, least_exponential, exponentials(raw, x))  # NaN stays NaN
    others = jnp.where(raw > least, 0.0, others)
    return jnp.sum(others, axis=1) + jnp.sum(jnp.where(largest.products > least, selected, 0.0), axis=1)


def _apply_softcap(products: Float[Array, "t n"], call: Call, raw_scale: Float[Array, "t"] | None) -> Array:
    """Computes the x of eq. 0 with a softcap, from products that are already multiplied by the sign of the scale."""
    call = dataclasses.replace(call, logit_scale=abs(call.logit_scale))
    return _logprobs.unscaled_logits(products, call, None if raw_scale is None else jnp.abs(raw_scale))
