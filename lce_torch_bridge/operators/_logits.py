"""The logits of chosen ids and their gradients, as operators over programs of `lce_jax.linear_logits`.

    logits            hidden [T, H], weight [V, H], bias [V], ids [T, K], temperature [T]  ->  [T, K]
    logits_gradients  the same and the cotangent [T, K]                        ->  dhidden, dweight, dbias, as wanted

Each rank of a group has the logits of the ids that it owns, and 0 at the others. As in `through_jax._programs`,
everything per token crosses as one int32 array, padded to few numbers of rows.
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
from lce_jax import local
from lce_torch_bridge.launched_directly._way import Way, way_of
from lce_torch_bridge.operators._derivatives import (
    gradients_function,
    is_differentiated,
    refuse_derivatives_of,
    without_forward_mode,
)
from lce_torch_bridge.operators._execute import those_wanted
from lce_torch_bridge.operators._registered import NAME, operator, refuse_vmap
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _run as _through_jax


class Transform(NamedTuple):
    """What makes logits of the products, and whose: the trailing arguments of both operators."""

    group: str  # `_tensor_parallel.name_of`
    vocab_size: int  # the true size of the whole vocabulary
    logit_scale: float
    logit_softcap: float | None
    reduce_grad_hidden: bool
    implementation: str  # names joined by commas; empty for lce_jax's choice


TRANSFORM_SCHEMA = (
    "str group, int vocab_size, float logit_scale, float? logit_softcap, bool reduce_grad_hidden, str implementation"
)


class LogitsKey(NamedTuple):
    """The static part of a program."""

    shard: int
    shards: int
    num_ids: int  # K
    vocab_size: int  # of the whole vocabulary
    tempered: bool  # whether each token has a temperature
    logit_scale: float
    logit_softcap: float | None
    implementation: tuple[str, ...] | None


def apply(*inputs: Any) -> Any:
    """The logits, differentiable."""
    if not torch.compiler.is_compiling():
        return Uncompiled.apply(*inputs)
    function = LinearLogits.apply if is_differentiated(*inputs[:3]) else logits
    return function(*inputs)


class LinearLogits(torch.autograd.Function):
    """``(hidden, weight, bias, ids, temperature, *Transform) -> logits``."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        """Runs the operator."""
        return logits(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps the inputs, and where the ranks were given different rows."""
        ctx.rest = inputs[5:]
        differs = None if Transform(*ctx.rest).group == _tensor_parallel.NO_GROUP else output.isnan()
        ctx.save_for_backward(*inputs[:5], differs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        wanted = ctx.needs_input_grad[:3]
        run = Gradients.apply if torch.is_grad_enabled() else logits_gradients
        *operands, differs = ctx.saved_tensors
        cotangent = cotangent if differs is None else cotangent.masked_fill(differs, torch.nan)
        found = list(run(*operands, cotangent, *wanted, *ctx.rest))
        return *(found.pop(0) if want else None for want in wanted), *(None,) * (2 + len(ctx.rest))

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


Uncompiled = without_forward_mode(LinearLogits)


@operator(
    "logits",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? temperature, {TRANSFORM_SCHEMA}) -> Tensor",
)
def logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    *rest: Any,
) -> torch.Tensor:
    """The logits ``[T, K]``, float32; 0 where the id is none or out of vocabulary."""
    transform, tokens, way = Transform(*rest), ids.shape[0], way_of(hidden)
    _tensor_parallel.check(transform.group, way.direct, hidden, ids, transform.vocab_size, weight)
    if tokens == 0:
        return _like(hidden, ids).zero_()
    program = _forward(_key(ids, temperature is not None, transform))
    (found,) = _run(program, way, hidden, weight, bias, _packed(ids, temperature, transform))
    if transform.group == _tensor_parallel.NO_GROUP:
        return found[:tokens].clone()  # in torch's memory
    return _tensor_parallel.add_parts(found[:tokens], ids.shape[1], transform.group)


@torch.library.register_fake(f"{NAME}::logits")  # type: ignore[untyped-decorator]
def _(hidden: torch.Tensor, _weight: Any, _bias: Any, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return _like(hidden, ids)


def _like(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@operator(
    "logits_gradients",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? temperature, Tensor cotangent, "
    f"bool want_hidden, bool want_weight, bool want_bias, {TRANSFORM_SCHEMA}) -> Tensor[]",
)
def logits_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    cotangent: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted."""
    wanted, transform, tokens = rest[:3], Transform(*rest[3:]), ids.shape[0]
    if tokens == 0:
        return [x.new_zeros(x.shape) for x in those_wanted(hidden, weight, bias, wanted)]
    over = transform.group if transform.reduce_grad_hidden else _tensor_parallel.NO_GROUP
    rounded = over == _tensor_parallel.NO_GROUP
    program = _backward(_key(ids, temperature is not None, transform), wanted, rounded)
    per_token = _packed(ids, temperature, transform, cotangent.view(torch.int32))
    grads = _run(program, way_of(hidden), hidden, weight, bias, per_token)
    if wanted[0]:
        grads[0] = _tensor_parallel.total_dhidden(grads[0][:tokens], hidden.dtype, over)
    return grads


@torch.library.register_fake(f"{NAME}::logits_gradients")  # type: ignore[untyped-decorator]
def _(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in those_wanted(hidden, weight, bias, rest[3:6])]


Gradients = gradients_function(logits_gradients)
refuse_derivatives_of("logits_gradients")


def _key(ids: torch.Tensor, tempered: bool, transform: Transform) -> LogitsKey:
    shards, rank = _tensor_parallel.size_and_rank(transform.group)
    names = tuple(transform.implementation.split(",")) if transform.implementation else None
    numbers = transform.vocab_size if shards > 1 else 0, tempered, transform.logit_scale, transform.logit_softcap
    return LogitsKey(rank, shards, ids.shape[1], *numbers, names)


def _packed(
    ids: torch.Tensor, temperature: torch.Tensor | None, transform: Transform, *further: torch.Tensor
) -> torch.Tensor:
    """Ids, ``further`` and the temperature, if there is one, as `tensors._padding.with_count` packs them."""
    ids = ids.long()
    inside = (ids >= 0) & (ids < transform.vocab_size)  # before the next cast: 2³² + 3 is not 3
    columns = [ids.where(inside, -1).int(), *further]
    if temperature is not None:
        columns.append(temperature.view(torch.int32)[:, None])
    return _padding.with_count(torch.cat(columns, 1), _padding.size(len(ids)))


def _run(
    program: Callable[..., Any],
    way: Way,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    per_token: torch.Tensor,
) -> list[torch.Tensor]:
    way.refuse("linear_logits runs no kernel")
    (found,) = _through_jax.run(program, (_padding.pad(hidden, _padding.size(len(hidden))), weight, bias, per_token))
    return found


@functools.cache
def _forward(key: LogitsKey) -> Callable[..., Any]:
    """Over a group, two more columns are this shard's `lce_jax.local.differences`."""

    def run(hidden: Any, weight: Any, bias: Any, per_token: Any) -> list[Any]:
        columns, _, options = _unpacked(key, per_token, hidden, weight)
        found = lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)
        if key.shards == 1:
            return [found]
        of_call = weight.shape[0], key.vocab_size, key.logit_scale, key.logit_softcap
        num_rows, given = _programs.counted(per_token, hidden.shape[0])
        tags = _programs.tags_of([given.T], num_rows, *of_call)
        return [jnp.concatenate([found, local.differences(tags, key.shard, key.shards)], 1)]

    return jax.jit(run)


@functools.cache
def _backward(key: LogitsKey, wanted: tuple[bool, ...], rounded: bool) -> Callable[..., Any]:
    """``rounded``: dhidden is in hidden's dtype, because no sum over the group follows."""

    def run(hidden: Any, weight: Any, bias: Any, per_token: Any) -> list[Any]:
        columns, cotangent, options = _unpacked(key, per_token, hidden, weight)

        def call(hidden: Any, weight: Any, bias: Any) -> Any:
            return lce_jax.linear_logits(hidden, weight, columns, bias=bias, **options)

        _, pull_back = jax.vjp(call, hidden if rounded else hidden.astype(jnp.float32), weight, bias)
        return [grad for grad, want in zip(pull_back(cotangent), wanted, strict=True) if want]

    return jax.jit(run)


def _unpacked(key: LogitsKey, per_token: Any, hidden: Any, weight: Any) -> tuple[Any, Any, dict[str, Any]]:
    """This shard's column of each id, -1 for others; the cotangents, if any; and the options."""
    rows, K = hidden.shape[0], key.num_ids
    columns = per_token[1:].reshape(rows, -1)
    ids, rest = columns[:, :K], lax.bitcast_convert_type(columns[:, K:], jnp.float32)
    own = ids - key.shard * weight.shape[0]
    owned = (ids >= 0) & (own >= 0) & (own < weight.shape[0])
    options = {
        "where": jnp.arange(rows, dtype=jnp.int32) < per_token[0],
        "temperature": rest[:, -1] if key.tempered else 1.0,
        "logit_scale": key.logit_scale,
        "logit_softcap": key.logit_softcap,
        "implementation": key.implementation,
    }
    return jnp.where(owned, own, -1), rest[:, :K], options
