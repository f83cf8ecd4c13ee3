"""Programs of JAX for results at a few ids: logits of chosen ids with gradients, and the k most likely ids.

    compute_logits   hidden [T, H], weight [V, H], bias [V], ids [T, K], temperature [T]  ->  [T, K]
    pull_back        the same and the cotangent [T, K]   ->  those of dhidden, dweight, dbias that are requested
    compute_topk     hidden, weight, bias, temperature   ->  ids [T, k], logprobs [T, k], lse [T]

With a group, each rank computes the logits of the ids in its shard, and 0 for other ids. For the most likely ids, each
rank sends its k largest logits, computed once more as dot products. Equal columns on different ranks then have equal
logits, so that ties keep their order. Each rank also sends its sum of exponentials, relative to its largest logit. All
ranks merge these values in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

import lce_jax
from lce_jax.run import _local
from lce_torch_bridge._types import Tensors, TorchCall
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax._programs import (
    ProgramKey,
    build_program,
    logit_options,
    make_key,
    make_tags,
    unpack_rows,
)


def run_logits(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns logits ``[T, K]`` in float32, 0 where the id is -1 or out of vocabulary.

    With a group, if a backward may follow (``keep``), it also returns where the logits are NaN.
    """
    program = build_program(compute_logits, make_key(call, x.weight))
    logits = _run_padded(program, x, _pack_tokens(x, call))[0][: x.hidden.shape[0]]
    if call.group == _tensor_parallel.NO_GROUP:
        return [logits.clone()]  # a copy in torch's memory
    logits = _tensor_parallel.add_parts(logits, call.jax.num_candidates, call.group)
    return [logits, logits.isnan()] if keep else [logits]


def make_empty_logits(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns uninitialised tensors of the shapes and dtypes that `run_logits` returns."""
    dtypes = [torch.float32, *([torch.bool] if keep and call.group != _tensor_parallel.NO_GROUP else [])]
    return [x.hidden.new_empty(_require_ids(x).shape, dtype=dtype) for dtype in dtypes]


def gradients(
    x: Tensors,
    residuals: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
) -> list[torch.Tensor]:
    """Returns the requested gradients among dhidden, dweight and dbias; NaN where the ranks had different rows."""
    (cotangent,) = cotangents.values()
    for differs in residuals:
        cotangent = cotangent.masked_fill(differs, torch.nan)
    run = build_program(pull_back, make_key(call, x.weight), requested_gradients, not call.reduce_grad_hidden)
    grads = _run_padded(run, x, _pack_tokens(x, call, cotangent.view(torch.int32)))
    if requested_gradients[0]:
        grads[0] = grads[0][: x.hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.sum_dhidden(grads[0], x.hidden.dtype, call.group)
    return grads


def run_topk(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns int64 ids ``[T, k]``, log-probabilities ``[T, k]`` and lse ``[T]``. There is no backward."""
    del keep
    tokens, k, key = x.hidden.shape[0], call.jax.top_k, make_key(call, x.weight)
    numbers = x.hidden.new_zeros((tokens, 1), dtype=torch.float32) if x.temperature is None else x.temperature[:, None]
    run = build_program(compute_topk, key, x.temperature is not None)
    packed = _run_padded(run, x, numbers.view(torch.int32))[0][:tokens]
    if key.shards == 1:
        floats = packed[:, k:].view(torch.float32)
        return [packed[:, :k].long(), floats[:, :k].clone(), floats[:, k].clone()]
    rows = x.weight.shape[0]
    tags = numbers.view(torch.int32) + _tensor_parallel.compute_checksum(tokens, rows, *logit_options(call))
    return _merge_ranks(packed, key.shard * rows, tags, call)


def make_empty_topk(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Returns uninitialised tensors of the shapes and dtypes that `run_topk` returns."""
    del keep
    T, k = x.hidden.shape[0], call.jax.top_k
    floats = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in ((T, k), (T,))]
    return [x.hidden.new_empty((T, k), dtype=torch.int64), *floats]


def _merge_ranks(packed: torch.Tensor, start: int, tags: torch.Tensor, call: TorchCall) -> list[torch.Tensor]:
    """Returns the results for the k largest logits of all ranks, from one all-gather of 2k + 2 values per token."""
    k = call.jax.top_k
    ids, floats = packed[:, :k], packed[:, k:].view(torch.float32)
    ids = torch.where(floats[:, :k] == -torch.inf, 2**31 - 1, ids + start)  # sorted after all other ids
    all_ranks = _tensor_parallel.gather(torch.cat([ids, packed[:, k:], tags], 1), call.group)  # [N, T, 2k + 2]
    tags, floats = all_ranks[..., -1], all_ranks[..., k:-1].contiguous().view(torch.float32)
    highest = floats[..., :k].amax(2)  # [N, T]
    largest = highest.amax(0)
    # The sum is relative to the largest logit, because rounding an lse of 2²⁰ would change every log-probability.
    log_sumexp = (highest - largest + floats[..., k]).logsumexp(0)
    log_sumexp = log_sumexp.where((tags == tags[0]).all(0), torch.nan)  # NaN where ranks differ
    lse = largest + log_sumexp
    ids, z = all_ranks[..., :k].transpose(0, 1).flatten(1), floats[..., :k].transpose(0, 1).flatten(1)  # [T, N k]
    by_id = ids.argsort(1)
    order = by_id.gather(1, z.gather(1, by_id).argsort(dim=1, descending=True, stable=True))[:, :k]
    logprobs = z.gather(1, order) - largest[:, None] - log_sumexp[:, None]
    ids = ids.gather(1, order).long()
    return [torch.where(lse.isnan()[:, None], -1, ids), logprobs, lse]


def _require_ids(x: Tensors) -> torch.Tensor:
    assert x.candidates is not None
    return x.candidates


def _pack_tokens(x: Tensors, call: TorchCall, *others: torch.Tensor) -> torch.Tensor:
    """Returns an int32 array with the columns ids, ``others``, and the temperature if there is one."""
    ids = _require_ids(x).long()
    inside = (ids >= 0) & (ids < call.jax.vocab_size)  # before the cast, in which 2³² + 3 would become 3
    columns = [ids.where(inside, -1).int(), *others]
    if x.temperature is not None:
        columns.append(x.temperature.view(torch.int32)[:, None])
    return torch.cat(columns, 1)


def _run_padded(run: Any, x: Tensors, per_token: torch.Tensor) -> list[torch.Tensor]:
    rows = _padding.size(len(per_token))
    operands = _padding.pad(x.hidden, rows), x.weight, x.bias, _padding.pack_rows(per_token, rows)
    (results,) = _programs.run(run, operands)
    return results


def compute_logits(key: ProgramKey, hidden: Any, weight: Any, bias: Any, per_token: Any) -> list[Any]:
    """Returns logits ``[P, K]``. With a group, two more columns show whether the shards' tokens differ."""
    num_rows, rows = unpack_rows(per_token, hidden.shape[0])
    columns, _, options = _unpack_tokens(key, rows, num_rows, weight, num_cotangents=0)
    logits = lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)
    if key.shards == 1:
        return [logits]
    tags = make_tags([rows.T], num_rows, weight.shape[0], *logit_options(key.call))
    return [jnp.concatenate([logits, _local.difference_terms(tags, key.shard, key.shards)], 1)]


def pull_back(
    key: ProgramKey,
    requested_gradients: tuple[bool, ...],
    rounded: bool,
    hidden: Any,
    weight: Any,
    bias: Any,
    per_token: Any,
) -> list[Any]:
    """Returns the requested gradients among dhidden, dweight and dbias.

    With ``rounded``, dhidden has hidden's dtype, because no sum over the group follows.
    """
    num_rows, rows = unpack_rows(per_token, hidden.shape[0])
    columns, cotangent, options = _unpack_tokens(key, rows, num_rows, weight, key.call.jax.num_candidates)

    def call(hidden: Any, weight: Any, bias: Any) -> Any:
        return lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)

    _, pull_back = jax.vjp(call, hidden if rounded else hidden.astype(jnp.float32), weight, bias)
    return [grad for grad, flag in zip(pull_back(cotangent), requested_gradients, strict=True) if flag]


def _unpack_tokens(
    key: ProgramKey, rows: Any, num_rows: Any, weight: Any, num_cotangents: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns each id's column in this shard (-1 if it is in another shard), the cotangents, and the options."""
    call = key.call.jax
    K = call.num_candidates
    ids, floats = rows[:K].T, lax.bitcast_convert_type(rows[K:].T, jnp.float32)
    columns = ids - key.shard * weight.shape[0]
    is_local = (ids >= 0) & (columns >= 0) & (columns < weight.shape[0])
    options = {
        "where": jnp.arange(len(ids), dtype=jnp.int32) < num_rows,
        "temperature": floats[:, -1] if floats.shape[1] > num_cotangents else 1.0,
        "logit_scale": call.logit_scale,
        "logit_softcap": call.logit_softcap,
        "implementation": call.requested,
    }
    return jnp.where(is_local, columns, -1), floats[:, :num_cotangents], options


def compute_topk(key: ProgramKey, has_temperature: bool, hidden: Any, weight: Any, bias: Any, per_token: Any) -> Any:
    """Returns ``[P, 2k + 1]`` bits: ids in the shard, log-probabilities and lse.

    With several shards, they are ids, logits, and ln Σ exp(logits) relative to the largest logit.
    """
    call, (rows, columns) = key.call.jax, (hidden.shape[0], weight.shape[0])
    columns = min(max(call.vocab_size - key.shard * columns, 0), columns)  # without padding
    k = min(call.top_k, columns)
    where = jnp.arange(rows, dtype=jnp.int32) < per_token[0]
    temperature = lax.bitcast_convert_type(per_token[1:], jnp.float32) if has_temperature else 1.0
    logit_options: dict[str, Any] = {"bias": bias, "where": where, "temperature": temperature}
    logit_options |= {"logit_scale": call.logit_scale, "logit_softcap": call.logit_softcap}
    if not columns:  # the shard is padding alone
        no_logits = jnp.full((rows, call.top_k), -jnp.inf)
        return _pack_bits(jnp.zeros((rows, call.top_k), jnp.int32), no_logits, no_logits[:, 0])
    options: dict[str, Any] = {
        "vocab_size": columns, "precision": key.precision, "implementation": call.requested,
    }  # fmt: skip
    top = lce_jax.linear_topk(hidden, weight, k, **logit_options, **options)
    if key.shards == 1:
        return _pack_bits(*top)
    z = lce_jax.linear_logits(hidden, weight, top.ids, **logit_options)
    missing = ((0, 0), (0, call.top_k - k))
    log_sumexp = -jnp.max(top.logprobs, axis=1)
    return _pack_bits(jnp.pad(top.ids, missing), jnp.pad(z, missing, constant_values=-jnp.inf), log_sumexp)


def _pack_bits(ids: Any, floats: Any, last: Any) -> Any:
    """Returns ids, floats, and ``last`` as the last column, in one int32 array."""
    bits = lax.bitcast_convert_type(jnp.concatenate([floats, last[:, None]], 1), jnp.int32)
    return jnp.concatenate([ids, bits], 1)
