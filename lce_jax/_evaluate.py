"""One call, from validated options to results: on one device, inside ``shard_map``, or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _checks, _collectives, _compat, _dispatch, _math, _partition, _statistics, _vjp
from lce_jax._layout import Layout
from lce_jax._shard import Spec
from lce_jax._types import CallOptions, Case, Results

if TYPE_CHECKING:
    from jaxtyping import Array


FACTORS = ("temperature", "logit_scale", "logit_softcap")  # the options that may be arrays


def evaluate(
    hidden: Array,
    weight: Array,
    labels: Array,
    where: Array | None,
    options: CallOptions,
    gather_dim: int | None = None,
) -> Results:
    """`lce_jax.linear_logprobs`; ``gather_dim`` is the dimension of hidden that the vocabulary's axis splits too."""
    whole: Any = hidden
    if gather_dim is not None:
        whole = jax.ShapeDtypeStruct((*labels.shape, hidden.shape[-1]), hidden.dtype)
    case = _checks.case(whole, weight, labels, where, options)
    columns = case.vocab_size * _checks.axis_size(options.axis_name)
    vocab_size = _checks.vocabulary(options.vocab_size, columns)
    implementation, _ = _dispatch.choose(case, options.implementation)
    operands = (hidden, weight, options.bias)
    hidden, weight, bias = jax.tree.map(lambda x: _compat.without_reduced(jnp.asarray(x)), operands)
    factors = (options.logit_scale, options.logit_softcap)
    rows = _checks.rows(labels, where, options.temperature, vocab_size, case.stat_dtype, *factors)
    spec = Spec(
        case,
        implementation.NAME,
        options.implementation,
        vocab_size,
        padded=vocab_size < columns,
        axis_name=options.axis_name,
        gather_dim=gather_dim,
    )
    agree, mesh = None, _partition.mesh_of((hidden, weight, bias, rows), options.static.cache_bytes)
    if options.axis_name is None:
        spec = dataclasses.replace(spec, mesh=mesh)
    else:
        _checks.check_split(weight, options.axis_name, case)
        rows, agree = _collectives.same_on_all_shards(rows, options.axis_name)
    if case.num_tokens == 0:
        return _compat.vary_like(_of_no_tokens(case, rows.labels), (hidden, rows.labels))
    out = _vjp.linear_logprobs(spec, hidden, weight, bias, rows)
    return out if agree is None else jax.tree.map(lambda x: jnp.where(agree, x, jnp.nan), out)


def evaluate_over(
    layout: Layout, hidden: Array, weight: Array, labels: Array, where: Array | None, options: CallOptions
) -> Results:
    """`lce_jax.sharded_linear_logprobs` with its layout checked."""
    case = _checks.case(hidden, weight, labels, where, options)
    per_token = {"labels": _checks.int32_labels(labels)}
    if where is not None:
        per_token["where"] = where
    factors = {name: getattr(options, name) for name in FACTORS}
    factors["temperature"] = _checks.temperature(options.temperature, labels.shape, where)
    for name, factor in factors.items():
        if factor is not None:
            per_token[name] = _checks.per_token(factor, labels.shape, case.stat_dtype)
    operands = jax.tree.map(jnp.asarray, (hidden, weight, options.bias))
    options = dataclasses.replace(
        options, temperature=1.0, logit_scale=None, logit_softcap=None, bias=None, axis_name=layout.vocab_axes
    )
    return _mapped(layout, options, *operands, per_token)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _mapped(
    layout: Layout,
    options: CallOptions,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    per_token: dict[str, Array],
) -> Results:
    """Jitted, so that calls outside ``jit`` compile once."""
    body = functools.partial(_body, layout, options)
    mapped = jax.shard_map(body, mesh=layout.mesh, in_specs=layout.in_specs, out_specs=layout.out_spec)
    return mapped(*layout.place((hidden, weight, bias, per_token)))


def _body(
    layout: Layout,
    options: CallOptions,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    per_token: dict[str, Array],
) -> Results:
    """One device's share, inside ``shard_map``."""
    factors: dict[str, Any] = {name: per_token[name] for name in FACTORS if name in per_token}
    options = dataclasses.replace(options, bias=bias, **factors)
    out = evaluate(hidden, weight, per_token["labels"], per_token.get("where"), options, layout.gather_dim)
    return jax.tree.map(layout.own_rows, out)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _of_no_tokens(case: Case, labels: Array) -> Results:
    """The results of a call without tokens, in the shape of its labels."""
    stats = _statistics.empty(0, case.stat_dtype, case.options)
    results = _math.finish(stats, labels.reshape(-1) >= 0, None, vocab_size=1)
    return jax.tree.map(lambda x: x.reshape(labels.shape), results)
