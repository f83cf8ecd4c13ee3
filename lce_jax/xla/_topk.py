"""The most likely tokens by plain XLA: the logits of one chunk of tokens at a time, and a selection from them.

A chunk has all columns of the shard, so its sums and its selection are those of whole rows. The weight is read once per
chunk: a few hundred tokens keep the product bound by arithmetic.
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

CHUNK_BYTES, CHUNK_BYTES_ON_CPU = 160 << 20, 32 << 20  # of logits in the statistics' dtype
# A chunk has a multiple of as many tokens: at (4096, 4096, 151936) on an H200 chunks of 128 tokens take 15.4 ms in
# place of 10.6, because every chunk reads the weight.
GRAIN, GRAIN_ON_CPU = 256, 128
LEAST_TERMS = 16  # of a product: see `increasing`


def chunk_tokens(call: Call) -> int:
    """Tokens whose logits exist at a time."""
    on_cpu = call.device.platform == "cpu"
    budget, grain = (CHUNK_BYTES_ON_CPU, GRAIN_ON_CPU) if on_cpu else (CHUNK_BYTES, GRAIN)
    most = budget // (call.columns * call.stat_dtype.itemsize)
    return min(call.num_tokens, max(most // grain * grain, grain))


def plan(call: Call, name: str) -> Plan:
    """The chunk of tokens, and the bytes of its logits."""
    size, stat = chunk_tokens(call), call.stat_dtype.itemsize
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


def largest(operands: Operands, call: Call) -> Largest:
    """The k largest products of each token, of all columns of the shard or of the first k columns if it has fewer.

    They are selected before scale and cap, which cannot change their order, only round two of them to one.
    """

    def of_chunk(per_token: Any) -> Largest:
        hidden, inverse_temperature, raw_scale = per_token
        own = operands._replace(hidden=hidden, inverse_temperature=inverse_temperature, raw_scale=raw_scale)
        own = _increasing(own, call)
        raw = _walk.dot(own.hidden, own.weight, 1, call.hidden_dim, call, call.stat_dtype)
        if own.bias is not None:
            sign = np.sign(call.logit_scale) if raw_scale is None else jnp.sign(raw_scale)[:, None]
            raw = raw + own.bias[None, :] * sign
        live = _logprobs.unpadded_columns(0, call.columns, own.num_columns)
        raw = raw if live is None else jnp.where(live[None, :], raw, -jnp.inf)
        products, ids = _largest.largest(raw, min(call.top_k, call.columns))
        capped = None
        if call.logit_softcap is not None:
            capped = jnp.where(products == -jnp.inf, -jnp.inf, _capped(products, call, raw_scale))
        some = Largest(products, ids, capped, jnp.zeros(raw.shape[:1], raw.dtype))
        return some._replace(sumexp=_sumexp(raw, some, own, call))

    per_token = operands.hidden, operands.inverse_temperature, operands.raw_scale
    return _walk.by_chunks(of_chunk, per_token, chunk_tokens(call), operands.num_rows, operands)


def _increasing(operands: Operands, call: Call) -> Operands:
    """The operands with the sign of the scale on hidden, so that logits increase with the products.

    A sign is exact. A scale of 0 makes all products 0, so that all are equal. A product has at least `LEAST_TERMS`,
    because XLA may compute one of fewer anew for each use, and round it otherwise, with the bias at once for example:
    then a selected logit is none of its row's, and its exponential is in no sum.
    """
    if (missing := LEAST_TERMS - operands.hidden.shape[1]) > 0:
        of_weight = [(0, missing if dim == call.hidden_dim else 0) for dim in range(2)]
        hidden, weight = jnp.pad(operands.hidden, [(0, 0), (0, missing)]), jnp.pad(operands.weight, of_weight)
        operands = operands._replace(hidden=hidden, weight=weight)
    if operands.raw_scale is not None:
        sign = jnp.sign(operands.raw_scale).astype(operands.hidden.dtype)[:, None]
    elif call.logit_scale <= 0.0:
        sign = jnp.full((1, 1), np.sign(call.logit_scale), operands.hidden.dtype)
    else:
        return operands
    return operands._replace(hidden=operands.hidden * sign)


def _sumexp(raw: Float[Array, "t V"], some: Largest, operands: Operands, call: Call) -> Float[Array, "t"]:
    """Eq. 1 of the selected ones, whose x are what they are there, and of all others.

    XLA may round the cap of all columns otherwise than that of the selected ones. So no log-probability is above 0.
    """
    row_scale = _logprobs.expand_rows(_logprobs.compute_row_scale(call, operands.inverse_temperature))

    def exponentials(products: Array, x: Array) -> Array:
        u = x - some.max[:, None]
        return jnp.where(products == -jnp.inf, 0.0, jnp.exp(jnp.where(u > 0.0, 0.0, u) * row_scale))

    x = clip_to_finite(raw)
    x = x if call.logit_softcap is None else _capped(x, call, operands.raw_scale)
    selected, least = exponentials(some.products, some.x), jnp.min(some.products, axis=1, keepdims=True)
    of_least = jnp.min(selected, axis=1, keepdims=True)  # others may be equal to it
    others = jnp.where(raw == least, of_least, exponentials(raw, x))  # of NaN too
    others = jnp.where(raw > least, 0.0, others)
    return jnp.sum(others, axis=1) + jnp.sum(jnp.where(some.products > least, selected, 0.0), axis=1)


def _capped(products: Float[Array, "t n"], call: Call, raw_scale: Float[Array, "t"] | None) -> Array:
    """The x of eq. 0 with a softcap, from products with the sign of the scale."""
    call = dataclasses.replace(call, logit_scale=abs(call.logit_scale))
    return _logprobs.unscaled_logits(products, call, None if raw_scale is None else jnp.abs(raw_scale))
