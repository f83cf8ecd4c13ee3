"""One device's part of a call with its collectives: on one device, in ``shard_map``, or where XLA partitions.

hidden ─ gather over the sequence ─ statistics of the shard ─ merge over the axis ─ finish ─▶ Results
                                             │ cache
cotangents ─ total over the axis ─ gradients of the shard ─ reduce over the axes ─▶ dhidden, dweight
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _jax
from lce_jax._types import Primals, Results, ShardStatistics
from lce_jax.call import _rows
from lce_jax.call._rows import Rows
from lce_jax.call._spec import Spec
from lce_jax.mesh import _collectives
from lce_jax.programs import _shard

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


type Kept = tuple[ShardStatistics, Any]  # for the backward: also the implementation's cache


def forward(spec: Spec, primals: Primals, rows: Rows, keep_cache: bool) -> tuple[Results, Kept]:
    """The results and the whole vocabulary's statistics, in the shape of labels, and the implementation's cache."""
    shape = rows.labels.shape
    rows = _rows.flattened(rows, len(shape))
    with jax.named_scope("lce_statistics"):
        stats, cache, agree = statistics(spec, flat_operands(spec, primals), rows, keep_cache)
    cache, dropped = selected(spec, rows, stats, cache)
    out = _shard.finish(spec, rows, stats, rows.where, dropped)
    out = out if agree is None else _collectives.nan_where_different(agree, out)
    out, stats = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), (out, stats))
    return out, (stats, cache if keep_cache else None)


def statistics(
    spec: Spec, flat: Primals, rows: Rows, keep_cache: bool
) -> tuple[ShardStatistics, Any, Bool[Array, "T"] | None]:
    """The whole vocabulary's statistics, the shard's cache, and the rows that agree, from `flat_operands`."""
    stacked = None if spec.axis_name is None else functools.partial(_collectives.stacked, axis_name=spec.axis_name)
    return _shard.statistics(spec, flat, rows, first_column(spec, flat.weight), keep_cache, stacked)


def selected(spec: Spec, rows: Rows, stats: ShardStatistics, cache: Any) -> tuple[Any, Float[Array, "T"] | None]:
    """What the backward needs of the cache, and the whole vocabulary's ``dropped_mass`` if the call reports it."""
    if not spec.case.options.gradient_threshold:
        return cache, None
    with jax.named_scope("lce_select"):
        cache, dropped = _shard.selected(spec, rows, stats, cache)
        if not spec.case.options.reports_dropped_mass:
            return cache, None
        if dropped is None:
            return cache, jnp.zeros_like(stats.max)
        return cache, dropped if spec.axis_name is None else lax.psum(dropped, spec.axis_name)


def backward(spec: Spec, primals: Primals, rows: Rows, kept: Kept, cotangent: Results) -> Primals:
    """The gradients, in the shapes, dtypes and types of their operands."""
    (hidden, weight, _), (stats, cache) = primals, kept
    varying = _jax.varying_axes((primals, rows, stats, cache))
    rows, stats, cotangent = _rows.flattened((rows, stats, cotangent), rows.labels.ndim)
    if spec.axis_name is not None and spec.token_axes is None:
        cotangent = _collectives.total_cotangent(cotangent, spec.axis_name)
    summed = spec.axis_name is not None or varying != _jax.varying_axes(hidden)
    may_round = not summed and hidden.dtype == weight.dtype
    with jax.named_scope("lce_gradients"):
        flat, start = flat_operands(spec, primals), first_column(spec, weight)
        found = _shard.gradients(spec, flat, rows, start, stats, cotangent, cache, may_round_dhidden=may_round)
    return reduced(spec, found, primals)


def reduced(spec: Spec, found: Primals, given: Primals) -> Primals:
    """This device's gradients summed over the devices that share an operand, in the shapes and dtypes of ``given``."""
    if spec.axis_name is not None or spec.token_axes or _jax.varying_axes(found):
        # A Hopper kernel occupies every multiprocessor. A collective beside it waits for it on one device and delays
        # the next kernel on another, so collectives start after both gradients.
        found = lax.optimization_barrier(found)
    with jax.named_scope("lce_reduce"):
        (hidden, weight, bias), dhidden = given, found.hidden
        if spec.gather_dim is not None:
            dhidden = scattered(spec, dhidden, hidden)
        elif spec.token_axes is not None and spec.axis_name is not None:
            dhidden = lax.psum(dhidden, spec.axis_name)
        return Primals(
            _jax.psum_to_axes(dhidden.reshape(hidden.shape), _jax.varying_axes(hidden)).astype(hidden.dtype),
            _total_dweight(spec, found.weight, weight),
            None if found.bias is None or bias is None else _total_dweight(spec, found.bias, bias).astype(bias.dtype),
        )


def scattered(spec: Spec, dhidden: Float[Array, "T H"], hidden: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """The sum over the shards of the vocabulary, each keeping its own part of the sequence."""
    assert spec.gather_dim is not None
    shards = lax.axis_size(spec.axis_name)
    whole = [n * shards if i == spec.gather_dim else n for i, n in enumerate(hidden.shape)]
    return _collectives.scatter_sequence(dhidden.reshape(whole), spec.axis_name, spec.gather_dim)


def _total_dweight(spec: Spec, dweight: Array, weight: Array) -> Array:
    """The sum over the devices that hold other tokens of the same call."""
    if spec.token_axes:
        dweight = lax.psum(dweight, spec.token_axes)
    return _jax.psum_to_axes(dweight, _jax.varying_axes(weight))


def flat_operands(spec: Spec, primals: Primals) -> Primals:
    """The operands with hidden in the weight's dtype, gathered and flattened."""
    primals = _shard.as_operand(primals)
    hidden = primals.hidden
    if spec.gather_dim is not None:
        hidden = _collectives.gather_sequence(hidden, spec.axis_name, spec.gather_dim)
    return primals._replace(hidden=hidden.reshape(-1, hidden.shape[-1]))


def first_column(spec: Spec, weight: Array) -> Int[Array, ""] | int:
    """The first global column of this shard."""
    if spec.axis_name is None:
        return 0
    return lax.axis_index(spec.axis_name) * weight.shape[spec.case.options.vocab_dim]
