"""The k most likely tokens as an operator over programs of `lce_jax.linear_topk`.

    topk    hidden [T, H], weight [V, H], bias [V], temperature [T]  ->  ids [T, k], logprobs [T, k], lse [T]

With the vocabulary split, each rank sends its own k largest, with their logits as dot products of their own: those are
the same for equal columns on any rank, so ties keep their order. Every rank merges them alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

import lce_jax
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators._registered import NAME, operator
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _run
from lce_torch_bridge.through_jax._key import precision_of

SCHEMA = "int k, str group, int vocab_size, float logit_scale, float? logit_softcap, str implementation"


class TopKCall(NamedTuple):
    """The trailing arguments of the operator."""

    k: int
    group: str  # `_tensor_parallel.name_of`
    vocab_size: int  # the true size of the whole vocabulary
    logit_scale: float
    logit_softcap: float | None
    implementation: str  # names joined by commas; empty for lce_jax's choice


class TopKKey(NamedTuple):
    """The static part of a program."""

    call: TopKCall
    columns: int  # of the shard's, those that are no padding
    tempered: bool
    precision: str | None
    alone: bool  # whether the vocabulary is whole


@operator(
    "topk",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor? temperature, {SCHEMA}) -> Tensor[]",
)
def topk(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: torch.Tensor | None, *rest: Any
) -> list[torch.Tensor]:
    """Ids ``[T, k]`` int64, log-probabilities ``[T, k]`` and lse ``[T]``."""
    call, tokens, way = TopKCall(*rest), hidden.shape[0], way_of(hidden)
    _tensor_parallel.check(call.group, way.direct, hidden, None, call.vocab_size, weight)
    if tokens == 0:
        return structs(hidden, call)
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    start, rows = rank * weight.shape[0], _padding.size(tokens)
    columns = min(max(call.vocab_size - start, 0), weight.shape[0])
    key = TopKKey(call._replace(group=""), columns, temperature is not None, precision_of(weight), alone=shards == 1)
    numbers = hidden.new_zeros((tokens, 1), dtype=torch.float32) if temperature is None else temperature[:, None]
    per_token = _padding.with_count(numbers.view(torch.int32), rows)
    way.refuse("linear_topk runs no kernel")
    ((packed,),) = _run.run(_program(key), (_padding.pad(hidden, rows), weight, bias, per_token))
    packed = packed[:tokens]
    if key.alone:
        floats = packed[:, call.k :].view(torch.float32)
        return [packed[:, : call.k].long(), floats[:, : call.k].clone(), floats[:, call.k].clone()]
    given = _tensor_parallel.number_of(tokens, weight.shape[0], call.vocab_size, call.logit_scale, call.logit_softcap)
    tags = numbers.view(torch.int32) + given  # a temperature's bits
    return _merged(packed, start, tags, call)


@torch.library.register_fake(f"{NAME}::topk")  # type: ignore[untyped-decorator]
def _(hidden: torch.Tensor, _weight: Any, _bias: Any, _temperature: Any, *rest: Any) -> list[torch.Tensor]:
    return structs(hidden, TopKCall(*rest))


def structs(hidden: torch.Tensor, call: TopKCall) -> list[torch.Tensor]:
    """What `topk` returns, uninitialised."""
    T = hidden.shape[0]
    floats = [hidden.new_empty(shape, dtype=torch.float32) for shape in ((T, call.k), (T,))]
    return [hidden.new_empty((T, call.k), dtype=torch.int64), *floats]


def _merged(packed: torch.Tensor, start: int, tags: torch.Tensor, call: TopKCall) -> list[torch.Tensor]:
    """The k largest of all ranks, from one all-gather of 2k + 2 numbers per token."""
    k = call.k
    ids, floats = packed[:, :k], packed[:, k:].view(torch.float32)
    ids = torch.where(floats[:, :k] == -torch.inf, 2**31 - 1, ids + start)  # after all others
    every = _tensor_parallel.gather(torch.cat([ids, packed[:, k:], tags], 1), call.group)  # [N, T, 2k + 2]
    tags, lse = every[..., -1], every[..., 2 * k].contiguous().view(torch.float32).logsumexp(0)
    lse = lse.where((tags == tags[0]).all(0), torch.nan)  # as in `through_jax._programs.results`
    side_by_side = every[..., : 2 * k].transpose(0, 1)  # [T, N, 2k]
    ids = side_by_side[..., :k].flatten(1)
    z = side_by_side[..., k:].flatten(1).contiguous().view(torch.float32)
    by_id = ids.argsort(1)
    order = by_id.gather(1, z.gather(1, by_id).argsort(dim=1, descending=True, stable=True))[:, :k]
    logprobs = (z.gather(1, order) - lse[:, None]).clamp(max=0.0)
    found = ids.gather(1, order).long()
    return [torch.where(lse.isnan()[:, None], -1, found), logprobs, lse]


@functools.cache
def _program(key: TopKKey) -> Callable[..., Any]:
    """``(hidden, weight, bias, temperatures) -> [P, 2k + 1]``: ids in the shard, logprobs (or logits) and lse."""
    call = key.call
    k = min(call.k, key.columns)
    names = tuple(call.implementation.split(",")) if call.implementation else None

    def run(hidden: Any, weight: Any, bias: Any, per_token: Any) -> Any:
        rows = hidden.shape[0]
        where = jnp.arange(rows, dtype=jnp.int32) < per_token[0]
        temperature = lax.bitcast_convert_type(per_token[1:], jnp.float32) if key.tempered else 1.0
        given: dict[str, Any] = {"bias": bias, "where": where, "temperature": temperature}
        given |= {"logit_scale": call.logit_scale, "logit_softcap": call.logit_softcap}
        if not key.columns:  # padding alone
            none = jnp.full((rows, call.k), -jnp.inf)
            return _packed(jnp.zeros((rows, call.k), jnp.int32), none, none[:, 0])
        told: dict[str, Any] = {"vocab_size": key.columns, "precision": key.precision, "implementation": names}
        found = lce_jax.linear_topk(hidden, weight, k, **given, **told)
        if key.alone:
            return _packed(*found)
        z = lce_jax.linear_logits(hidden, weight, found.ids, **given)
        missing = ((0, 0), (0, call.k - k))
        return _packed(jnp.pad(found.ids, missing), jnp.pad(z, missing, constant_values=-jnp.inf), found.lse)

    return jax.jit(run)


def _packed(ids: Any, floats: Any, lse: Any) -> Any:
    bits = lax.bitcast_convert_type(jnp.concatenate([floats, lse[:, None]], 1), jnp.int32)
    return jnp.concatenate([ids, bits], 1)
