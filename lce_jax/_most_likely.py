"""One device's part of `lce_jax.linear_topk` with its collective, as `_spmd` is of `lce_jax.linear_logprobs`.

hidden ─ gather over the sequence ─ the shard's k largest ─ one all-gather of them ─ the k largest of all ─▶ TopK
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _collectives, _shard, _spmd
from lce_jax._largest import Largest
from lce_jax._rows import Rows
from lce_jax._shard import Spec
from lce_jax._statistics import MASKED
from lce_jax._types import Primals, TopK

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def forward(spec: Spec, primals: Primals, rows: Rows) -> TopK:
    """The results, in the shape of labels with k more, the same on every shard of the vocabulary."""
    shape = rows.labels.shape
    rows = jax.tree.map(lambda x: x.reshape(-1), rows)
    with jax.named_scope("lce_topk"):
        flat, start = _spmd.flat_operands(spec, primals), _spmd.first_column(spec, primals.weight)
        found, scale = _shard.largest(spec, flat, rows, start), _shard.row_scale(spec, rows)
    if spec.axis_name is not None:
        with jax.named_scope("lce_merge"):
            found = _merge(_gathered(found, spec.axis_name), spec.case.options.top_k, scale)
    out = _finish(found, scale, rows)
    return jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), out)


def _finish(found: Largest, scale: Float[Array, "T"] | float, rows: Rows) -> TopK:
    """Eq. 3 at the largest; ids are -1 where there is no result."""
    log_sumexp = jnp.log(found.sumexp)
    out = TopK(
        found.ids,
        _below(found.x, found.x[:, :1], scale) - log_sumexp[:, None],
        found.x[:, 0] * scale + log_sumexp,
    )
    for no_result, value in ((_shard.wrong_temperature(rows), jnp.nan), (_left_out(rows), 0.0)):
        if no_result is not None:
            out = TopK(
                jnp.where(no_result[:, None], -1, out.ids),
                jnp.where(no_result[:, None], value, out.logprobs),
                jnp.where(no_result, value, out.lse),
            )
    return out


def _left_out(rows: Rows) -> Array | None:
    return None if rows.where is None else ~rows.where


def _below(x: Float[Array, "*n T k"], m: Float[Array, "*n T 1"], scale: Float[Array, "T"] | float) -> Array:
    """(x - m) · scale: 0 for a maximum, and finite without any column."""
    return jnp.maximum((x - m) * (scale if isinstance(scale, float | int) else scale[:, None]), MASKED)


def _gathered(found: Largest, axis_name: Any) -> Largest:
    """Those of all shards of ``axis_name``, ``[N, T, ...]``, in one all-gather of 2k + 1 numbers per token."""
    as_bits = jnp.uint32 if found.x.dtype == jnp.float32 else jnp.uint64
    k = found.x.shape[1]
    numbers = (found.x, found.sumexp[:, None], found.ids)
    bits = [x.astype(as_bits) if x.dtype == jnp.int32 else lax.bitcast_convert_type(x, as_bits) for x in numbers]
    every = _collectives.from_all_shards(jnp.concatenate(bits, axis=1), axis_name)
    floats = lax.bitcast_convert_type(every[..., : k + 1], found.x.dtype)
    return Largest(floats[..., :k], every[..., k + 1 :].astype(jnp.int32), floats[..., k])


def _merge(parts: Largest, k: int, scale: Float[Array, "T"] | float) -> Largest:
    """The k largest of all shards, and eq. 2 of their sums, in the same order on every shard."""

    def side_by_side(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)

    falling, ids = lax.sort((-side_by_side(parts.x), side_by_side(parts.ids)), dimension=1, num_keys=2)
    m = jnp.maximum(parts.x[..., :1], MASKED)
    shift = _below(m, jnp.max(m, axis=0), scale)[..., 0]
    return Largest(-falling[:, :k], ids[:, :k], jnp.sum(parts.sumexp * jnp.exp(shift), axis=0))
