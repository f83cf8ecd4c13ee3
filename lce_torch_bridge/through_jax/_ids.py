"""What is at some ids alone, by programs of JAX: the logits of chosen ids and their gradients, and the k most likely.

    logits      hidden [T, H], weight [V, H], bias [V], ids [T, K], temperature [T]  ->  [T, K]
    pull_back   the same and the cotangent [T, K]                        ->  dhidden, dweight, dbias, as wanted
    topk        hidden, weight, bias, temperature                        ->  ids [T, k], logprobs [T, k], lse [T]

Each rank of a group has the logits of the ids that it owns, and 0 at the others. Of the most likely, it sends its own k
largest, with their logits as dot products of their own: those are the same for equal columns on any rank, so ties keep
their order. The sum of its exponentials is relative to the largest logit. Every rank merges them alike.
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
from lce_torch_bridge.through_jax._programs import ProgramKey, counted, key_of, logit_options, program, tags_of


def logits(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """``[T, K]``, float32; 0 where the id is none or out of vocabulary. To keep over a group: where it is NaN."""
    found = _run_padded(program(at_ids, key_of(call, x.weight)), x, _packed(x, call))[0][: x.hidden.shape[0]]
    if call.group == _tensor_parallel.NO_GROUP:
        return [found.clone()]  # in torch's memory
    found = _tensor_parallel.add_parts(found, call.jax.num_candidates, call.group)
    return [found, found.isnan()] if keep else [found]


def logits_structs(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """What `logits` returns, uninitialised."""
    dtypes = [torch.float32, *([torch.bool] if keep and call.group != _tensor_parallel.NO_GROUP else [])]
    return [x.hidden.new_empty(_ids_of(x).shape, dtype=dtype) for dtype in dtypes]


def gradients(
    x: Tensors,
    kept: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    requested_gradients: tuple[bool, ...],
    call: TorchCall,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted; NaN where the ranks were given different rows."""
    (cotangent,) = cotangents.values()
    for differs in kept:
        cotangent = cotangent.masked_fill(differs, torch.nan)
    run = program(pull_back, key_of(call, x.weight), requested_gradients, not call.reduce_grad_hidden)
    grads = _run_padded(run, x, _packed(x, call, cotangent.view(torch.int32)))
    if requested_gradients[0]:
        grads[0] = grads[0][: x.hidden.shape[0]]
        if call.reduce_grad_hidden:
            grads[0] = _tensor_parallel.total_dhidden(grads[0], x.hidden.dtype, call.group)
    return grads


def topk(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """Ids ``[T, k]`` int64, log-probabilities ``[T, k]`` and lse ``[T]``. No backward follows."""
    del keep
    tokens, k, key = x.hidden.shape[0], call.jax.top_k, key_of(call, x.weight)
    numbers = x.hidden.new_zeros((tokens, 1), dtype=torch.float32) if x.temperature is None else x.temperature[:, None]
    run = program(most_likely, key, x.temperature is not None)
    packed = _run_padded(run, x, numbers.view(torch.int32))[0][:tokens]
    if key.shards == 1:
        floats = packed[:, k:].view(torch.float32)
        return [packed[:, :k].long(), floats[:, :k].clone(), floats[:, k].clone()]
    rows = x.weight.shape[0]
    given = _tensor_parallel.number_of(tokens, rows, *logit_options(call))
    return _merged(packed, key.shard * rows, numbers.view(torch.int32) + given, call)  # tags: a temperature's bits


def topk_structs(x: Tensors, call: TorchCall, keep: bool) -> list[torch.Tensor]:
    """What `topk` returns, uninitialised."""
    del keep
    T, k = x.hidden.shape[0], call.jax.top_k
    floats = [x.hidden.new_empty(shape, dtype=torch.float32) for shape in ((T, k), (T,))]
    return [x.hidden.new_empty((T, k), dtype=torch.int64), *floats]


def _merged(packed: torch.Tensor, start: int, tags: torch.Tensor, call: TorchCall) -> list[torch.Tensor]:
    """The k largest of all ranks, from one all-gather of 2k + 2 numbers per token."""
    k = call.jax.top_k
    ids, floats = packed[:, :k], packed[:, k:].view(torch.float32)
    ids = torch.where(floats[:, :k] == -torch.inf, 2**31 - 1, ids + start)  # after all others
    every = _tensor_parallel.gather(torch.cat([ids, packed[:, k:], tags], 1), call.group)  # [N, T, 2k + 2]
    tags, floats = every[..., -1], every[..., k:-1].contiguous().view(torch.float32)
    highest = floats[..., :k].amax(2)  # [N, T]
    largest = highest.amax(0)
    # Relative to the largest logit: the rounding of an lse of 2²⁰ would be an error of every log-probability.
    log_sumexp = (highest - largest + floats[..., k]).logsumexp(0)
    log_sumexp = log_sumexp.where((tags == tags[0]).all(0), torch.nan)  # as in `through_jax._logprobs.results`
    lse = largest + log_sumexp
    ids, z = every[..., :k].transpose(0, 1).flatten(1), floats[..., :k].transpose(0, 1).flatten(1)  # [T, N k]
    by_id = ids.argsort(1)
    order = by_id.gather(1, z.gather(1, by_id).argsort(dim=1, descending=True, stable=True))[:, :k]
    logprobs = z.gather(1, order) - largest[:, None] - log_sumexp[:, None]
    found = ids.gather(1, order).long()
    return [torch.where(lse.isnan()[:, None], -1, found), logprobs, lse]


def _ids_of(x: Tensors) -> torch.Tensor:
    assert x.candidates is not None
    return x.candidates


def _packed(x: Tensors, call: TorchCall, *further: torch.Tensor) -> torch.Tensor:
    """Ids, ``further`` and the temperature, if there is one."""
    ids = _ids_of(x).long()
    inside = (ids >= 0) & (ids < call.jax.vocab_size)  # before the next cast: 2³² + 3 is not 3
    columns = [ids.where(inside, -1).int(), *further]
    if x.temperature is not None:
        columns.append(x.temperature.view(torch.int32)[:, None])
    return torch.cat(columns, 1)


def _run_padded(run: Any, x: Tensors, per_token: torch.Tensor) -> list[torch.Tensor]:
    rows = _padding.size(len(per_token))
    given = _padding.pad(x.hidden, rows), x.weight, x.bias, _padding.with_count(per_token, rows)
    (found,) = _programs.run(run, given)
    return found


def at_ids(key: ProgramKey, hidden: Any, weight: Any, bias: Any, per_token: Any) -> list[Any]:
    """``[P, K]``. Over a group, two more columns are this shard's `lce_jax.run._local.difference_terms`."""
    num_rows, given = counted(per_token, hidden.shape[0])
    columns, _, options = _given(key, given, num_rows, weight, further=0)
    found = lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)
    if key.shards == 1:
        return [found]
    tags = tags_of([given.T], num_rows, weight.shape[0], *logit_options(key.call))
    return [jnp.concatenate([found, _local.difference_terms(tags, key.shard, key.shards)], 1)]


def pull_back(
    key: ProgramKey,
    requested_gradients: tuple[bool, ...],
    rounded: bool,
    hidden: Any,
    weight: Any,
    bias: Any,
    per_token: Any,
) -> list[Any]:
    """``rounded``: dhidden is in hidden's dtype, because no sum over the group follows."""
    num_rows, given = counted(per_token, hidden.shape[0])
    columns, cotangent, options = _given(key, given, num_rows, weight, further=key.call.jax.num_candidates)

    def call(hidden: Any, weight: Any, bias: Any) -> Any:
        return lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)

    _, pull_back = jax.vjp(call, hidden if rounded else hidden.astype(jnp.float32), weight, bias)
    return [grad for grad, want in zip(pull_back(cotangent), requested_gradients, strict=True) if want]


def _given(key: ProgramKey, given: Any, num_rows: Any, weight: Any, further: int) -> tuple[Any, Any, dict[str, Any]]:
    """This shard's column of each id, -1 for others; the cotangents, if any; and the options."""
    call = key.call.jax
    K = call.num_candidates
    ids, rest = given[:K].T, lax.bitcast_convert_type(given[K:].T, jnp.float32)
    own = ids - key.shard * weight.shape[0]
    owned = (ids >= 0) & (own >= 0) & (own < weight.shape[0])
    options = {
        "where": jnp.arange(len(ids), dtype=jnp.int32) < num_rows,
        "temperature": rest[:, -1] if rest.shape[1] > further else 1.0,
        "logit_scale": call.logit_scale,
        "logit_softcap": call.logit_softcap,
        "implementation": call.requested,
    }
    return jnp.where(owned, own, -1), rest[:, :further], options


def most_likely(key: ProgramKey, tempered: bool, hidden: Any, weight: Any, bias: Any, per_token: Any) -> Any:
    """``[P, 2k + 1]``: ids in the shard, logprobs and lse; of a shard logits, and ln Σ e^u relative to the largest."""
    call, (rows, columns) = key.call.jax, (hidden.shape[0], weight.shape[0])
    columns = min(max(call.vocab_size - key.shard * columns, 0), columns)  # those that are no padding
    k, padded_k = min(call.top_k, columns), call.top_k
    where = jnp.arange(rows, dtype=jnp.int32) < per_token[0]
    temperature = lax.bitcast_convert_type(per_token[1:], jnp.float32) if tempered else 1.0
    given: dict[str, Any] = {"bias": bias, "where": where, "temperature": temperature}
    given |= {"logit_scale": call.logit_scale, "logit_softcap": call.logit_softcap}
    if not columns:  # padding alone
        none = jnp.full((rows, padded_k), -jnp.inf)
        return _as_bits(jnp.zeros((rows, padded_k), jnp.int32), none, none[:, 0])
    told: dict[str, Any] = {
        "vocab_size": columns, "precision": key.precision, "implementation": call.requested,
    }  # fmt: skip
    found = lce_jax.linear_topk(hidden, weight, k, **given, **told)
    if key.shards == 1:
        return _as_bits(*found)
    z = lce_jax.linear_logits(hidden, weight, found.ids, **given)
    missing = ((0, 0), (0, padded_k - k))
    log_sumexp = -jnp.max(found.logprobs, axis=1)
    return _as_bits(jnp.pad(found.ids, missing), jnp.pad(z, missing, constant_values=-jnp.inf), log_sumexp)


def _as_bits(ids: Any, floats: Any, last: Any) -> Any:
    bits = lax.bitcast_convert_type(jnp.concatenate([floats, last[:, None]], 1), jnp.int32)
    return jnp.concatenate([ids, bits], 1)
