"""`statistics`, `gradients` and the packing of statistics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _call, _checks, _jax, _options, _shard, scalars
from lce_jax._call import Rows, Spec
from lce_jax._options import LogprobOptions
from lce_jax._types import LogprobOutput, Options, Primals, Results, ShardStatistics
from lce_jax.mathematics import _statistics

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


def statistics(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "T"],
    *,
    vocab_start: int | Int[Array, ""] = 0,
    where: Bool[Array, "T"] | None = None,
    num_rows: int | Int[Array, ""] | None = None,
    keep_cache: bool = False,
    total: bool = False,
    **options: Unpack[LogprobOptions],
) -> tuple[ShardStatistics, object]:
    """Each token's maximum, sums and label's logit over the columns of one shard, before temperature and scale.

    Args:
        hidden: ``[T, H]``, the same on every shard.
        weight: this shard's ``[V, H]`` (or ``[H, V]``).
        labels: ``[T]`` global vocabulary ids, the same on every shard. Outside ``[0, vocab_size)`` the logprob is 0.
        vocab_start: global id of the shard's first column; may be traced.
        where: ``[T]`` bool, the rows that count. The others are 0 in what `finish` and `gradients` return, whatever
            they hold. None: all.
        num_rows: how many rows count, from the first on; may be traced. Cheaper than ``where``, which moves rows. The
            padding after them may hold anything: its statistics are undefined, its dhidden is zero. None: all.
        keep_cache: whether a backward will follow, so that the forward may keep ``cache_bytes`` of cache for it, or
            what a ``gradient_threshold`` needs.
        total: True adds ``total``, the sum of which `mean_logit` makes the mean logit.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``entropy``, ``stats``, ``vocab_size``,
            ``weight_layout``, ``cache_bytes``, ``precision``, ``implementation``, ``bias``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size`` and ``logit_floor``, as in `lce_jax.linear_logprobs`;
            ``vocab_size`` is that of the whole vocabulary.

    Returns:
        `ShardStatistics` of ``[T]`` arrays, and the cache for `gradients` (a pytree, None if nothing is kept). Sums and
        target are relative to the maximum, which is that of x = logit / k (see `ShardStatistics`); the target is -inf
        unless this shard owns the label.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a derivative; `gradients` computes it.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> stats, _ = local.statistics(jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8]))
        >>> float(stats.max[0]), float(stats.sumexp[0]), float(stats.target[0])
        (0.0, 100.0, 0.0)
    """
    _options.check_names(statistics, options, "sharded_linear_logprobs")
    spec, primals, rows = _call.bind_shard(
        hidden, weight, labels, where, num_rows, options, scalars.flag("total", total)
    )
    if spec.case.num_tokens == 0:
        return _statistics.empty(0, spec.case.stat_dtype, spec.case.options), None
    return _compiled_statistics(
        spec, primals, rows, _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1), keep_cache
    )


def fields(
    *, entropy: bool = True, stats: bool = False, total: bool = False, num_candidates: int = 0, has_floor: bool = False
) -> dict[str, int]:
    """The fields of `ShardStatistics` that a call with these options has.

    Args:
        entropy: the option of `statistics`, which adds ``weighted``.
        stats: the option of `statistics`, which adds ``min`` and ``squares``.
        total: True adds ``total``, the sum of which `mean_logit` makes the mean logit.
        num_candidates: K of the option ``candidates``.
        has_floor: whether there is a ``logit_floor``, which with ``stats`` adds ``support``.

    Returns:
        How many numbers per token each field holds, in the order in which `pack` lays them out.

    Example:
        >>> from lce_jax import local
        >>> local.fields(entropy=False)
        {'max': 1, 'sumexp': 1, 'target': 1}
    """
    options = Options(entropy=entropy, stats=stats, mean_logit=total, num_candidates=num_candidates)
    return dataclasses.replace(options, has_floor=has_floor).statistics


def pack(stats: ShardStatistics) -> Float[Array, "F T"]:
    """All numbers of each token in one array, to be sent or kept.

    Args:
        stats: statistics of one shard or of several merged, fields ``[T]``.

    Returns:
        ``[F, T]``: the fields that are not None, in the order of `fields`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> stats, _ = local.statistics(jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8]))
        >>> local.pack(stats).shape
        (4, 2)
    """
    return _statistics.pack(stats)


def unpack(packed: Float[Array, "*n F T"], fields: Mapping[str, int]) -> ShardStatistics:
    """The inverse of `pack`; leading dimensions may run over shards.

    Args:
        packed: ``[..., F, T]``, the F numbers of each token.
        fields: what `fields` returns, or some of its entries in the same order. The other fields become None.

    Returns:
        `ShardStatistics` with fields ``[..., T]``, ready for `merge` if the leading dimension runs over shards.

    Raises:
        ValueError: ``fields`` does not add up to F.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> stats, _ = local.statistics(jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8]))
        >>> of_two_shards = jnp.stack([local.pack(stats), local.pack(stats)])
        >>> float(local.merge(local.unpack(of_two_shards, local.fields())).sumexp[0])
        200.0
    """
    if packed.ndim < 2 or packed.shape[-2] != sum(fields.values()):
        raise ValueError(f"packed {tuple(packed.shape)} must be [..., F, T] with the F of {dict(fields)}")
    return _statistics.unpack(packed, fields)


def gradients(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "T"],
    merged: ShardStatistics,
    cotangent: LogprobOutput,
    *,
    vocab_start: int | Int[Array, ""] = 0,
    where: Bool[Array, "T"] | None = None,
    num_rows: int | Int[Array, ""] | None = None,
    cache: object = None,
    dtotal: Float[Array, "T"] | None = None,
    dweight: Float[Array, "V H"] | None = None,
    overwrite_cache: bool = False,
    round_dhidden: bool = False,
    **options: Unpack[LogprobOptions],
) -> (
    tuple[Float[Array, "T H"], Float[Array, "V H"]] | tuple[Float[Array, "T H"], Float[Array, "V H"], Float[Array, "V"]]
):
    """The shard's part of dhidden, in float32, and its dweight, in the weight's dtype.

    Args:
        hidden: ``[T, H]``, the same on every shard.
        weight: this shard's ``[V, H]`` (or ``[H, V]``).
        labels: ``[T]`` global vocabulary ids, the same on every shard. Outside ``[0, vocab_size)`` the logprob is 0.
        merged: the statistics of the whole vocabulary.
        cotangent: the derivatives of the objective in ``logprobs``, ``entropy``, ``lse`` and ``candidate_logprobs``; a
            field that is None stands for zeros.
        vocab_start: global id of the shard's first column; may be traced.
        where: ``[T]`` bool, the rows that count. The others are 0 in what `finish` and `gradients` return, whatever
            they hold. None: all.
        num_rows: how many rows count, from the first on; may be traced. Cheaper than ``where``, which moves rows. The
            padding after them may hold anything: its statistics are undefined, its dhidden is zero. None: all.
        cache: what `statistics` returned with its statistics.
        dtotal: the derivative of the objective in the sum of the logits, k times ``merged.total``. None stands for
            zeros.
        dweight: a sum in the weight's shape and the dtype of ``dhidden``, to which this call's is added before it is
            returned; donate it to ``jit``. None: this call's alone.
        overwrite_cache: True says that nothing else reads the cache, so that its memory may hold what is computed from
            it. A jitted function that takes the cache as an argument copies it first.
        round_dhidden: True rounds dhidden to the dtype of ``hidden``, for a dhidden that is not summed over shards.
            Where one launch computes all of it, no float32 sum takes memory.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``entropy``, ``stats``, ``vocab_size``,
            ``weight_layout``, ``cache_bytes``, ``precision``, ``implementation``, ``bias``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size`` and ``logit_floor``, as given to `statistics`.

    Returns:
        ``dhidden`` ``[T, H]``, the sum over this shard's columns (float64 for a float64 weight), and dweight in the
        weight's shape and dtype (or that of the given sum). With a bias, also ``dbias`` ``[V]`` in that of ``dhidden``
        without ``round_dhidden``.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import LogprobOutput, local
        >>> hidden, weight, labels = jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8])
        >>> stats, cache = local.statistics(hidden, weight, labels, keep_cache=True)
        >>> seed = LogprobOutput(logprobs=jnp.ones(2), entropy=None, lse=None)
        >>> dhidden, dweight = local.gradients(hidden, weight, labels, stats, seed, cache=cache)
        >>> round(float(dweight[7, 0]), 2), round(float(dweight[0, 0]), 2)
        (0.98, -0.02)
    """
    _options.check_names(gradients, options, "sharded_linear_logprobs")
    spec, primals, rows = _call.bind_shard(hidden, weight, labels, where, num_rows, options, dtotal is not None)
    zero = jnp.zeros((spec.case.num_tokens,), spec.case.stat_dtype)
    _checks.sum_of_dweight(dweight, primals.weight, zero.dtype)
    if spec.case.num_tokens == 0:
        found = jax.tree.map(lambda x: jnp.zeros(x.shape, zero.dtype), primals)
        found = found._replace(weight=jnp.zeros_like(primals.weight) if dweight is None else dweight)
    else:
        dmean = None if dtotal is None else dtotal * spec.vocab_size  # what eq. 4 divides by again
        given = LogprobOutput(*(zero if field is None else field for field in cotangent[:3]))
        seed = Results(given._replace(candidate_logprobs=cotangent.candidate_logprobs), dmean)
        start = _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1)
        allowed = scalars.flag("overwrite_cache", overwrite_cache), scalars.flag("round_dhidden", round_dhidden)
        found = _compiled_gradients(spec, *allowed, primals, rows, start, merged, seed, cache, dweight)
    if round_dhidden:
        found = found._replace(hidden=found.hidden.astype(hidden.dtype))
    return (found.hidden, found.weight) if found.bias is None else (found.hidden, found.weight, found.bias)


@functools.partial(jax.jit, static_argnums=(0, 4), inline=True)
def _compiled_statistics(
    spec: Spec, primals: Primals, rows: Rows, start: Array, keep_cache: bool
) -> tuple[ShardStatistics, Any]:
    """`programs._shard.statistics` of operands as they are given. Not differentiable."""
    run = _jax.not_differentiable(lambda own, rows, start: _shard.statistics(spec, own, rows, start, keep_cache)[:2])
    return run(_shard.as_operand(primals), rows, start)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _compiled_gradients(
    spec: Spec, overwrite_cache: bool, round_dhidden: bool, primals: Primals, *rest: Any
) -> Primals:
    """`programs._shard.gradients` of operands as they are given, with what `statistics` kept. Not differentiable."""
    rounds = round_dhidden and primals.hidden.dtype == spec.case.dtype
    allowed = {"may_overwrite_cache": overwrite_cache, "may_round_dhidden": rounds}

    def run(primals: Primals, rows: Rows, start: Any, stats: Any, seed: Any, cache: Any, dweight: Any) -> Primals:
        if spec.case.options.gradient_threshold:
            cache, _ = _shard.selected(spec, rows, stats, cache)
        return _shard.gradients(spec, primals, rows, start, stats, seed, cache, dweight=dweight, **allowed)

    return _jax.not_differentiable(run)(_shard.as_operand(primals), *rest)
