"""`lce_jax.linear_kl` as the runner takes it, and one device's part of it: its shard, its collectives, its gradients.

The student's head has gradients, the teacher's has none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import mosaic
from lce_jax._types import CPU, Primals
from lce_jax.call import _rows
from lce_jax.call._kl_spec import KLSpec
from lce_jax.call._rows import Rows, Scales
from lce_jax.mathematics import _kl, _kl_mixture, _logprobs
from lce_jax.mathematics._kl import KLStatistics, Pair
from lce_jax.mathematics._kl_mixture import Mixture, MixtureSums
from lce_jax.mesh import _collectives
from lce_jax.mesh._by_platform import by_platform
from lce_jax.programs import _one_device
from lce_jax.runner import _over_devices
from lce_jax.runner._derivative import Capability
from lce_jax.runner._over_devices import Kind, Program, spread
from lce_jax.xla import _kl as _kl_tiles
from lce_jax.xla import _logprobs as xla
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Head, Shard, Tokens

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Int


type Found = tuple[KLStatistics, MixtureSums | None]  # by token
type Kept = tuple[Found, Any]  # from forward to backward: also the implementation's cache
type Rest = tuple[Primals, Pair[Rows]]  # the teacher, and the rows of both


def forward(spec: KLSpec, student: Primals, rest: Rest, differentiated: bool) -> tuple[Array, Kept]:
    """The divergence of each token, and what a backward needs. Where XLA splits the operands, no tile is kept."""
    asked = differentiated and spec.options.cache_bytes > 0
    keeps = asked and not _over_devices.is_left_to_xla(spec, (student, rest))
    unused = ("cache_bytes keeps nothing",) if asked and not keeps else ()

    def run(spec: KLSpec, student: Primals, rest: Rest) -> tuple[Array, Kept]:
        teacher, rows = rest
        return device_forward(spec, Pair(student, teacher), rows, keeps)

    own, others = _heads(spec)
    results = Kind.RESULTS, (Kind.TOKENS, Kind.DEVICE)
    program = Program(run, (own, (others, Kind.TOKENS)), results, joins=not keeps, unused=unused)
    return spread(spec, program, student, rest)


def backward(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients."""

    def run(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
        teacher, rows = rest
        return device_backward(spec, Pair(student, teacher), rows, kept, cotangent)

    own, others = _heads(spec)
    operands = own, (others, Kind.TOKENS), (Kind.TOKENS, Kind.DEVICE), Kind.RESULTS
    return spread(spec, Program(run, operands, own), student, rest, kept, cotangent)


def _of_no_tokens(spec: KLSpec, rest: Rest) -> Array:
    return jnp.zeros(rest[1].student.labels.shape, spec.dtype)


KL = Capability(forward, backward, _of_no_tokens)


def _heads(spec: KLSpec) -> tuple[Any, Any]:
    own, others = (_over_devices.head(model.options.vocab_dim) for model in spec.models)
    return own, others


def device_forward(
    spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], keep_cache: bool = False
) -> tuple[Array, Kept]:
    """One device's result, the whole vocabulary's statistics and sums of each row, and the device's cache."""
    shape = rows.student.labels.shape
    rows = _rows.flattened(rows, len(shape))
    scales = _scales_of(spec, rows)
    with jax.named_scope("lce_kl_statistics"):
        plan, shard, order = _shard_of(spec, primals, rows, scales)
        stats, cache = _statistics(spec, plan, shard, keep_cache)
    stats = stats if order is None else _rows.expand(order, stats)
    axis_name, of_rows = spec.models.student.axis_name, _row_scales(spec, scales)
    if axis_name is not None:
        with jax.named_scope("lce_merge"):
            parts = _collectives.from_all_shards(jnp.stack(stats), axis_name)
            stats = _kl.merge(KLStatistics(*(parts[:, i] for i in range(parts.shape[1]))), of_rows)
    where, weights, wrong = rows.student.where, rows.student.weights, _wrong_temperature(rows)
    sums = None
    if weights is None:
        out = _kl.finish(stats, of_rows[1], where)
    else:
        mixture = _kl_mixture.mixture(stats, of_rows[1], weights, where)
        sums = _mixture_sums(spec, plan, shard, order, mixture)
        out = _kl_mixture.divergence(sums, stats, mixture, where)
    out = out if wrong is None else jnp.where(wrong, jnp.nan, out)
    out, found = jax.tree.map(lambda x: x.reshape(shape), (out, (stats, sums)))
    return out, (found, cache)


def _statistics(spec: KLSpec, plan: KLPlan, shard: Shard, keep_cache: bool) -> tuple[KLStatistics, Any]:
    """Of the shard, and the cache."""
    kernels = functools.partial(mosaic.kl_statistics, keep_cache=keep_cache)
    tiles = functools.partial(_kl_tiles.statistics, keep_cache=keep_cache)

    def elsewhere(there: KLPlan, shard: Shard) -> tuple[KLStatistics, Any]:
        _, cache = jax.eval_shape(functools.partial(kernels, plan), shard)  # of the kernels' shape, and never read
        return _kl_tiles.statistics(there, shard)[0], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)

    found: tuple[KLStatistics, Any] = _run(spec, plan, kernels, tiles, elsewhere, shard)
    return found


def _mixture_sums(
    spec: KLSpec, plan: KLPlan, shard: Shard, order: _rows.Compaction | None, rows: Mixture
) -> MixtureSums:
    """Eq. 9 over the whole vocabulary."""
    with jax.named_scope("lce_kl_mixture"):
        rows = rows if order is None else jax.tree.map(lambda x: x[order.source], rows)
        tiles = _kl_tiles.mixture_sums
        sums = _run(spec, plan, mosaic.kl_mixture_sums, tiles, tiles, shard, rows)
    sums = sums if order is None else _rows.expand(order, sums)
    axis_name = spec.models.student.axis_name
    if axis_name is None:
        return sums
    with jax.named_scope("lce_merge"):
        return MixtureSums(*jnp.sum(_collectives.from_all_shards(jnp.stack(sums), axis_name), axis=0))


def device_backward(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients, in the shapes, dtypes and types of its operands."""
    own = spec.models.student
    found, cache = kept
    rows, found, cotangent = _rows.flattened((rows, found, cotangent), rows.student.labels.ndim)
    if own.axis_name is not None and own.token_axes is None:
        cotangent = _collectives.total_cotangent(cotangent, own.axis_name)
    scales, live, wrong = _scales_of(spec, rows), rows.student.where, _wrong_temperature(rows)
    counts = live if wrong is None else ~wrong if live is None else live & ~wrong
    factor = _logprobs.row_factor(own.case.options, scales.student.derivative)
    (stats, sums), weights = found, rows.student.weights
    coefficients: Any
    if sums is None or weights is None:
        coefficients = _kl.coefficients(stats, cotangent, factor, counts)
    else:
        mixture = _kl_mixture.mixture(stats, _row_scales(spec, scales)[1], weights, counts)
        coefficients = _kl_mixture.coefficients(sums, stats, mixture, cotangent, factor, counts)
    tiles = _kl_tiles.gradients

    def without_cache(plan: KLPlan, shard: Shard, coefficients: Any, _: Any) -> Primals:
        return tiles(plan, shard, coefficients)

    with jax.named_scope("lce_kl_gradients"):
        plan, shard, order = _shard_of(spec, primals, rows, scales)
        if order is not None:
            coefficients = jax.tree.map(lambda x: x[order.source], coefficients)
        gradients = _run(spec, plan, mosaic.kl_gradients, tiles, without_cache, shard, coefficients, cache)
    dhidden = gradients.hidden if order is None else _rows.expand(order, gradients.hidden)
    dhidden = dhidden if live is None else jnp.where(live[:, None], dhidden, 0.0)
    return _one_device.reduced(own, gradients._replace(hidden=dhidden), primals.student)


def _run(
    spec: KLSpec,
    plan: KLPlan,
    kernels: Callable[..., Any],
    tiles: Callable[..., Any],
    elsewhere: Callable[..., Any],
    shard: Shard,
    *more: Any,
) -> Any:
    """With kernels, if they serve the call and the program is lowered for their platform, else in tiles of plain XLA.

    ``elsewhere`` are the tiles in place of kernels. The backward's logits have the forward's bits, because both passes
    are chosen alike.
    """
    if spec.implementation != mosaic.NAME:
        return tiles(plan, shard, *more)
    if spec.requested is not None and xla.NAME not in spec.requested:
        return kernels(plan, shard, *more)
    cases = Pair(*(dataclasses.replace(case, device=CPU) for case in plan.cases))
    there = functools.partial(elsewhere, dataclasses.replace(plan, cases=cases))
    return by_platform(functools.partial(kernels, plan), there, shard, *more, device=spec.case.device)


def _scales_of(spec: KLSpec, rows: Pair[Rows]) -> Pair[Scales]:
    return Pair(*(_rows.scales(own, spec.dtype, signs_hidden=False) for own in rows))


def _row_scales(spec: KLSpec, scales: Pair[Scales]) -> tuple[Any, Any]:
    """The k of eq. 0, that of p first."""
    pairs = zip(spec.models, scales, strict=True)
    each = (_logprobs.row_scale(model.case.options, own.logits) for model, own in pairs)
    return Pair(*each).ordered(spec.plan(0).student_first)


def _wrong_temperature(rows: Pair[Rows]) -> Bool[Array, "T"] | None:
    """Rows of which one temperature is wrong: they return NaN and have no gradient."""
    student, teacher = map(_rows.wrong, rows)
    return teacher if student is None else student if teacher is None else student | teacher


def _shard_of(
    spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], scales: Pair[Scales]
) -> tuple[KLPlan, Shard, _rows.Compaction | None]:
    """The arrays of this device, with the rows that count first."""
    operands = Pair(*map(_one_device.flat_operands, spec.models, primals))
    tokens = Pair(*(Tokens(x.hidden, own.logits, own.raw) for x, own in zip(operands, scales, strict=True)))
    order = None if rows.student.where is None else _rows.compaction(rows.student.where)
    num_rows = None if order is None else order.num_rows
    tokens = tokens if order is None else _rows.compact(order, tokens)
    heads = Pair(
        *(
            Head(x.weight, None if x.bias is None else x.bias.astype(model.case.stat_dtype))
            for x, model in zip(operands, spec.models, strict=True)
        )
    )
    columns, num_columns = _true_columns(spec, primals)
    return spec.plan(columns), Shard(tokens, heads, None, num_rows, num_columns), order


def _true_columns(spec: KLSpec, primals: Pair[Primals]) -> tuple[int, Int[Array, ""] | None]:
    """The columns to walk over, and how many of these are no padding if that is known only to the shard."""
    sizes = (x.weight.shape[model.case.options.vocab_dim] for x, model in zip(primals, spec.models, strict=True))
    columns, student = min(sizes), spec.models.student
    left = student.vocab_size - _one_device.first_column(student, primals.student.weight)
    if isinstance(left, int):
        return min(left, columns), None
    return columns, jnp.clip(left, 0, columns) if any(model.padded for model in spec.models) else None
