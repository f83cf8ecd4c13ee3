"""The share of `lce_jax.linear_topk` that one device computes, including the collective.

hidden ─ gather over the sequence ─ k largest of the shard ─ all-gather of these ─ k largest of all ─▶ TopK
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _describe
from lce_jax.call._describe import Rows
from lce_jax.mathematics._largest import Largest
from lce_jax.mathematics._statistics import MASKED, sum_in_order
from lce_jax.mesh import _collectives
from lce_jax.run import _shard
from lce_jax.types._types import Call, Primals, TopK
from lce_jax.xla import _topk as _products

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


def forward(call: Call, primals: Primals, rows: Rows) -> TopK:
    """Returns the results, which are equal on every shard of the vocabulary."""
    shape = rows.labels.shape
    rows = _describe.flatten_tokens(rows, len(shape))
    with jax.named_scope("lce_topk"):
        part = _shard.Part.of(call, _shard.flatten_operands(call, primals), rows)
        operands, order = part.operands()
        largest = _products.find_largest(operands, call)
        largest = largest._replace(ids=largest.ids + part.start)
        largest = largest if order is None else _describe.expand(order, largest)
        row_scale = jnp.asarray(part.row_scale, call.stat_dtype).reshape(-1, 1)
    agree = None
    if call.axis_name is not None:
        with jax.named_scope("lce_merge"):
            summary = _shard.summarize_operands(call, part.primals, rows, part.start)
            parts, summaries = _collectives.gather_trees((largest, summary), call.axis_name)
            largest, agree = (
                _merge(call, parts, row_scale),
                _shard.find_agreeing_rows(call, summaries, rows, primals.weight),
            )
    out = _finish(rows, largest, row_scale, agree)
    return jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), out)


def _finish(rows: Rows, largest: Largest, row_scale: Float[Array, "#T 1"], agree: Bool[Array, "T"] | None) -> TopK:
    """Computes eq. 3 for the k largest. Ids are -1 in rows without a result."""
    log_sumexp = jnp.log(largest.sumexp)
    logprobs = (largest.x - largest.max[:, None]) * row_scale - log_sumexp[:, None]
    out = TopK(largest.ids, logprobs, largest.max * row_scale[:, 0] + log_sumexp)
    masked, differ = (None if x is None else ~x for x in (rows.where, agree))
    for no_result, value in ((_describe.find_invalid_rows(rows), jnp.nan), (masked, 0.0), (differ, jnp.nan)):
        if no_result is not None:
            out = TopK(
                jnp.where(no_result[:, None], -1, out.ids),
                jnp.where(no_result[:, None], value, out.logprobs),
                jnp.where(no_result, value, out.lse),
            )
    return out


def _merge(call: Call, parts: Largest, row_scale: Float[Array, "#T 1"]) -> Largest:
    """Returns the k largest of all shards, with merged sums (eq. 2).

    The order of operations is the same on every shard.
    """

    def concatenate_shards(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)

    k, per_id = call.top_k, jax.tree.map(concatenate_shards, (-parts.products, parts.ids, parts.capped))
    falling, ids, *capped = (x[:, :k] for x in lax.sort(jax.tree.leaves(per_id), dimension=1, num_keys=2))
    merged = Largest(-falling, ids, capped[0] if capped else None, jnp.zeros_like(parts.sumexp[0]))
    shift = jnp.clip((parts.max - merged.max[None]) * row_scale.T, MASKED, 0.0)
    return merged._replace(sumexp=sum_in_order(parts.sumexp * jnp.exp(shift)))
