"""The one ``custom_vjp``, over any implementation's (statistics, gradients) pair.

    hidden ─ gather over the sequence ─ cast ─ compact ─ statistics ─ merge over the axis ─ finish ─▶ Results
                                                             │ cache
    cotangents ─ total over the axis ─ row coefficients ─ gradients ─ expand ─ reduce over the axis ─▶ dhidden, dweight

The residuals are the call's own operands, the merged statistics (a few numbers per token)
and, if asked for, the implementation's cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _collectives, _compat, _dispatch, _math, _rows
from lce_jax._types import Case, Operands, Results, ShardStatistics

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Spec:
    """A call's static part: what to compute, by which implementation, split over which axis."""

    case: Case
    implementation: str
    vocab_size: int  # the true size of the whole vocabulary
    padded: bool = False  # whether the shards have columns beyond it
    axis_name: Any = None
    gather_dim: int | None = None  # hidden's dimension that is split over ``axis_name`` too


class Rows(NamedTuple):
    """A call's per-token operands, flattened. None of them has a gradient."""

    labels: Int[Array, "T"]  # int32 global id, -1 where out of vocabulary
    where: Bool[Array, "T"] | None
    temperature: Float[Array, "T"] | None
    num_rows: Int[Array, ""] | None = None  # in the place of ``where``: the rows, from the first on, that count

    @property
    def live(self) -> Bool[Array, "T"] | None:
        """Which rows count; None where all do."""
        if self.num_rows is None:
            return self.where
        return jnp.arange(self.labels.shape[0], dtype=jnp.int32) < self.num_rows


@functools.partial(jax.jit, static_argnums=0, inline=True)
def linear_logprobs(spec: Spec, hidden: Float[Array, "*b H"], weight: Float[Array, "V H"], rows: Rows) -> Results:
    """Per-token results, [T] each, over the whole vocabulary; differentiable in hidden and weight.

    Jitted, so that calls outside ``jit`` compile once; within ``jit`` it is inlined.
    """
    return _linear_logprobs(spec, hidden, weight, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logprobs(spec: Spec, hidden: Any, weight: Any, rows: Rows) -> Results:
    out, *_ = _forward(spec, hidden, weight, rows, keep_cache=False)
    return out


def _linear_logprobs_fwd(spec: Spec, hidden: Any, weight: Any, rows: Rows) -> tuple[Results, Any]:
    forward = _compat.first_order_only(functools.partial(_forward, spec, keep_cache=True))
    out, stats, cache = forward(hidden, weight, rows)
    return out, (hidden, weight, rows, stats, cache)


def _linear_logprobs_bwd(spec: Spec, residuals: Any, cotangent: Results) -> tuple[Any, Any, None]:
    backward = _compat.first_order_only(functools.partial(_backward, spec))
    return (*backward(residuals, cotangent), None)


_linear_logprobs.defvjp(_linear_logprobs_fwd, _linear_logprobs_bwd)


def as_operand(hidden: Float[Array, "*b H"], weight: Array) -> Float[Array, "*b H"]:
    """Hidden in the weight's dtype, rounded for certain: XLA may drop a conversion down and up again."""
    to = jnp.finfo(weight.dtype)
    if to.bits < jnp.finfo(hidden.dtype).bits:
        hidden = lax.reduce_precision(hidden, to.nexp, to.nmant)
    return hidden.astype(weight.dtype)


def shard_statistics(
    spec: Spec, hidden: Float[Array, "T H"], weight: Float[Array, "V H"], rows: Rows, start: Any, keep_cache: bool
) -> tuple[ShardStatistics, Any]:
    """The statistics of the shard whose first column is ``start``, in the call's row order, and the cache."""
    operands, order = _operands(spec, hidden, weight, rows, start)
    implementation = _dispatch.IMPLEMENTATIONS[spec.implementation]
    stats, cache = implementation.statistics(operands, spec.case, keep_cache)
    return (stats if order is None else _rows.expand(order, stats)), cache


def shard_gradients(
    spec: Spec,
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    rows: Rows,
    start: Any,
    stats: ShardStatistics,
    cotangent: Results,
    cache: Any,
) -> tuple[Float[Array, "T H"], Float[Array, "V H"]]:
    """The shard's part of dhidden, in the statistics' dtype, and its dweight, in the weight's.

    Where the case allows it, dhidden may be in the weight's dtype too.
    ``stats`` are those of the whole vocabulary, in the call's row order.
    """
    operands, order = _operands(spec, hidden, weight, rows, start)
    inverse_temperature = _inverse_temperature(rows, spec.case)
    coefficients = _math.row_coefficients(
        stats, cotangent, rows.live, inverse_temperature, spec.case.options, spec.vocab_size
    )
    if order is not None:
        coefficients = _rows.compact(order, coefficients)
    implementation = _dispatch.IMPLEMENTATIONS[spec.implementation]
    dhidden, dweight = implementation.gradients(operands, spec.case, coefficients, cache)
    dhidden = dhidden if order is None else _rows.expand(order, dhidden)
    return dhidden if rows.live is None else jnp.where(rows.live[:, None], dhidden, 0.0), dweight


def _forward(
    spec: Spec, hidden: Any, weight: Any, rows: Rows, keep_cache: bool
) -> tuple[Results, ShardStatistics, Any]:
    stats, cache = shard_statistics(spec, _flat(spec, hidden, weight), weight, rows, _start(spec, weight), keep_cache)
    if spec.axis_name is not None:
        stats = _collectives.merge_over_axis(stats, spec.axis_name)
    return _math.finish(stats, rows.labels >= 0, rows.where, spec.vocab_size), stats, cache


def _backward(spec: Spec, residuals: Any, cotangent: Results) -> tuple[Any, Any]:
    hidden, weight, rows, stats, cache = residuals
    if spec.axis_name is not None:
        cotangent = _collectives.total_cotangent(cotangent, spec.axis_name)
    elif hidden.dtype == weight.dtype and _compat.varying_axes(residuals) == _compat.varying_axes(hidden):
        # Nobody will add to dhidden.
        spec = dataclasses.replace(spec, case=dataclasses.replace(spec.case, rounds_dhidden=True))
    dhidden, dweight = shard_gradients(
        spec, _flat(spec, hidden, weight), weight, rows, _start(spec, weight), stats, cotangent, cache
    )
    if spec.axis_name is not None or _compat.varying_axes((dhidden, dweight)):
        # The Hopper kernels hold every multiprocessor: a collective beside one waits for it on one device, and holds
        # up the next on another. So collectives begin behind both gradients.
        dhidden, dweight = lax.optimization_barrier((dhidden, dweight))
    if spec.gather_dim is None:
        dhidden = dhidden.reshape(hidden.shape)
    else:
        shards = lax.axis_size(spec.axis_name)
        whole = [n * shards if i == spec.gather_dim else n for i, n in enumerate(hidden.shape)]
        dhidden = _collectives.scatter_sequence(dhidden.reshape(whole), spec.axis_name, spec.gather_dim)
    dhidden = _compat.psum_to_type(dhidden, hidden).astype(hidden.dtype)
    return dhidden, _compat.psum_to_type(dweight, weight)


def _flat(spec: Spec, hidden: Float[Array, "*b H"], weight: Array) -> Float[Array, "T H"]:
    """Hidden in the weight's dtype, whole and flattened."""
    hidden = as_operand(hidden, weight)
    if spec.gather_dim is not None:
        hidden = _collectives.gather_sequence(hidden, spec.axis_name, spec.gather_dim)
    return hidden.reshape(-1, hidden.shape[-1])


def _start(spec: Spec, weight: Array) -> Int[Array, ""] | int:
    """The first global column of this shard."""
    if spec.axis_name is None:
        return 0
    return lax.axis_index(spec.axis_name) * weight.shape[spec.case.options.vocab_dim]


def _operands(
    spec: Spec, hidden: Array, weight: Array, rows: Rows, start: Any
) -> tuple[Operands, _rows.Compaction | None]:
    columns = weight.shape[spec.case.options.vocab_dim]
    num_columns = None
    if spec.padded:
        left = spec.vocab_size - start
        num_columns = min(max(left, 0), columns) if isinstance(left, int) else jnp.clip(left, 0, columns)
    targets = rows.labels - start
    owned = (rows.labels >= 0) & (targets >= 0) & (targets < columns)
    targets, inverse_temperature = jnp.where(owned, targets, -1), _inverse_temperature(rows, spec.case)
    order, num_rows = None, rows.num_rows
    if rows.where is not None:
        order = _rows.compaction(rows.where)
        hidden, targets, inverse_temperature = _rows.compact(order, (hidden, targets, inverse_temperature))
        num_rows = order.num_rows
    elif rows.live is not None:  # whatever the rows behind hold, it cannot spread
        hidden = jnp.where(rows.live[:, None], hidden, jnp.zeros((), hidden.dtype))
    return Operands(hidden, weight, targets, inverse_temperature, num_rows, num_columns), order


def _inverse_temperature(rows: Rows, case: Case) -> Float[Array, "T"] | None:
    if rows.temperature is None:
        return None
    inverse = 1.0 / rows.temperature.astype(case.stat_dtype)
    return inverse if rows.live is None else jnp.where(rows.live, inverse, 1.0)
