"""One shard's statistics and gradients, without collectives, for callers who reduce over their own process group.

    stats, cache = local.statistics(hidden, weight, labels, vocab_start=start)
    merged = local.merge(<the fields of all shards, stacked to [N, T]>, temperature=...)
    out = local.finish(merged, labels, vocab_size=V, temperature=...)
    dhidden, dweight = local.gradients(hidden, weight, labels, merged, cotangent, vocab_start=start, cache=cache)

`KLShard` does the same for `lce_jax.linear_kl`; `tags` tell whether all shards have the same tokens. This is the module
that `lce_torch_bridge` is built on. Arguments have the names and meanings of `lce_jax.linear_logprobs`, but all are
flat, ``hidden`` [T, H] and what is per token [T], and the same on every shard; ``weight`` is this shard's, and
``vocab_size`` that of the whole vocabulary. A row that does not count has undefined statistics. Besides there are:

    vocab_start      global id of the shard's first column; may be traced
    num_rows         how many rows count, from the first on; may be traced. Cheaper than ``where``, which moves rows
    cache            what `statistics` returned with its statistics, with ``keep_cache=True``
    merged, stats    the statistics of the whole vocabulary

``dhidden`` is this shard's part, to be summed over the shards; ``dweight`` is whole. None is differentiable itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _call, _checks, _dispatch, _jax, _options, _shard, mosaic, scalars
from lce_jax._call import Rows
from lce_jax._options import KLOptions, LogprobOptions
from lce_jax._types import Call, LogprobOutput, Primals, Results, ShardStatistics
from lce_jax.mathematics import _kl, _logprobs, _statistics
from lce_jax.mathematics._kl import KLStatistics, MixtureSums, Pair
from lce_jax.mesh._collectives import differences, tags
from lce_jax.programs import _kl as programs
from lce_jax.programs._kl import KLArguments, KLPart

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


def merge(
    parts: ShardStatistics,
    *,
    temperature: float | Float[Array, "T"] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
) -> ShardStatistics:
    """The statistics of all shards together: ``m = max mᵢ``, ``s = Σ sᵢ·exp((mᵢ - m)·k)``, and so on for each field."""
    return _statistics.merge(parts, _row_scale(parts, None, temperature, logit_softcap, logit_scale))


def finish(
    stats: ShardStatistics,
    labels: Int[Array, "T"],
    *,
    vocab_size: int,
    where: Bool[Array, "T"] | None = None,
    temperature: float | Float[Array, "T"] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
) -> LogprobOutput:
    """The results from the statistics of the whole vocabulary: ``lse = k·m + ln s``, ``entropy = ln s - q/s``.

    On a device with kernels, a kernel computes them. So the results of one shard alone have the bits of
    `lce_jax.linear_logprobs`. XLA computes `merge`, so those of several shards may differ in their last bits.
    """
    rows = _call.rows_of_call(labels, where, 1.0, vocab_size, stats.max.dtype)
    scale = _row_scale(stats, rows.where, temperature, logit_softcap, logit_scale)
    where = _logprobs.without_empty(rows.where, stats.sumexp)  # whether there is a floor is not known here
    return _logprobs.finish(stats, scale, rows.labels, where, vocab_size, per_token=_on_device).public


def mean_logit(
    stats: ShardStatistics,
    *,
    vocab_size: int,
    temperature: float | Float[Array, "T"] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
) -> Float[Array, "T"]:
    """The mean of the logits over the vocabulary, ``k·total / vocab_size``, which label smoothing needs.

    The statistics must have ``total``.
    """
    if stats.total is None:
        raise ValueError("stats without total: give total=True to local.statistics, and to local.fields if unpacked")
    return stats.total * _row_scale(stats, None, temperature, logit_softcap, logit_scale) / vocab_size


def _row_scale(stats: ShardStatistics, where: Any, temperature: Any, logit_softcap: Any, logit_scale: Any) -> Any:
    """The k of eq. 0; the last dimension of the statistics runs over the tokens."""
    options = _options.of_call({"logit_softcap": logit_softcap, "logit_scale": logit_scale})
    labels, dtype = _call.no_labels(stats.max, stats.max.shape[-1:]), stats.max.dtype
    rows = _call.rows_of_call(labels, where, temperature, 0, dtype, options.logit_scale, options.logit_softcap)
    invert = functools.partial(_on_device, _logprobs.inverse_of)
    return _logprobs.row_scale(options.call, _call.scales(rows, dtype, False, invert).logits)


def _on_device(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of [T] and of numbers: in a kernel, where there are any for their device."""
    run, arrays = _shard.of_arrays(function, operands)
    is_served = all(x.dtype in (jnp.float32, jnp.int32) for x in arrays)
    if not is_served or not mosaic.serves(_dispatch.current_device(*arrays)):
        return run(*arrays)
    return mosaic.per_token(run, *arrays)


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
    """Each token's maximum, sums and label's logit over the columns of one shard, before temperature and scale."""
    _options.check_names(statistics, options, "sharded_linear_logprobs")
    call, primals, rows = _call.bind_shard(
        hidden, weight, labels, where, num_rows, options, scalars.flag("total", total)
    )
    if call.num_tokens == 0:
        return _statistics.empty(0, call.stat_dtype, call), None
    return _compiled_statistics(
        call, primals, rows, _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1), keep_cache
    )


def fields(
    *, entropy: bool = True, stats: bool = False, total: bool = False, num_candidates: int = 0, has_floor: bool = False
) -> dict[str, int]:
    """The fields of `ShardStatistics` that a call with these options has."""
    call = Call(entropy=entropy, stats=stats, mean_logit=total, num_candidates=num_candidates, has_floor=has_floor)
    return call.statistics


def pack(stats: ShardStatistics) -> Float[Array, "F T"]:
    """All numbers of each token in one array, to be sent or kept."""
    return _statistics.pack(stats)


def unpack(packed: Float[Array, "*n F T"], fields: Mapping[str, int]) -> ShardStatistics:
    """The inverse of `pack`; leading dimensions may run over shards."""
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

    ``cotangent``: the derivatives of the objective in ``logprobs``, ``entropy``, ``lse`` and ``candidate_logprobs``,
    and ``dtotal`` that in the sum of the logits, k times ``merged.total``; None stands for zeros. ``dweight``: a sum in
    the dtype of ``dhidden`` to which this call's is added; donate it to ``jit``. ``overwrite_cache``: nothing else
    reads the cache, so that its memory may hold what is computed from it. ``round_dhidden``: dhidden comes in the dtype
    of ``hidden``, because it is not summed over shards.
    """
    _options.check_names(gradients, options, "sharded_linear_logprobs")
    call, primals, rows = _call.bind_shard(hidden, weight, labels, where, num_rows, options, dtotal is not None)
    zero = jnp.zeros((call.num_tokens,), call.stat_dtype)
    _checks.sum_of_dweight(dweight, primals.weight, zero.dtype)
    if call.num_tokens == 0:
        found = jax.tree.map(lambda x: jnp.zeros(x.shape, zero.dtype), primals)
        found = found._replace(weight=jnp.zeros_like(primals.weight) if dweight is None else dweight)
    else:
        dmean = None if dtotal is None else dtotal * call.vocab_size  # what eq. 4 divides by again
        given = LogprobOutput(*(zero if field is None else field for field in cotangent[:3]))
        seed = Results(given._replace(candidate_logprobs=cotangent.candidate_logprobs), dmean)
        start = _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1)
        allowed = scalars.flag("overwrite_cache", overwrite_cache), scalars.flag("round_dhidden", round_dhidden)
        found = _compiled_gradients(call, *allowed, primals, rows, start, merged, seed, cache, dweight)
    if round_dhidden:
        found = found._replace(hidden=found.hidden.astype(hidden.dtype))
    return (found.hidden, found.weight) if found.bias is None else (found.hidden, found.weight, found.bias)


@functools.partial(jax.jit, static_argnums=(0, 4), inline=True)
def _compiled_statistics(
    call: Call, primals: Primals, rows: Rows, start: Array, keep_cache: bool
) -> tuple[ShardStatistics, Any]:
    """`_shard.statistics` of operands as they are given. Not differentiable."""
    run = _jax.not_differentiable(lambda own, rows, start: _shard.statistics(call, own, rows, start, keep_cache)[:2])
    return run(_shard.as_operand(primals), rows, start)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _compiled_gradients(
    call: Call, overwrite_cache: bool, round_dhidden: bool, primals: Primals, *rest: Any
) -> Primals:
    """`_shard.gradients` of operands as they are given, with what `statistics` kept. Not differentiable."""
    rounds = round_dhidden and primals.hidden.dtype == call.dtype
    allowed = {"may_overwrite_cache": overwrite_cache, "may_round_dhidden": rounds}

    def run(primals: Primals, rows: Rows, start: Any, stats: Any, seed: Any, cache: Any, dweight: Any) -> Primals:
        if call.gradient_threshold:
            cache, _ = _shard.selected(call, rows, stats, cache)
        return _shard.gradients(call, primals, rows, start, stats, seed, cache, dweight=dweight, **allowed)

    return _jax.not_differentiable(run)(_shard.as_operand(primals), *rest)


def dropped_mass(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "T"],
    merged: ShardStatistics,
    *,
    where: Bool[Array, "T"] | None = None,
    num_rows: int | Int[Array, ""] | None = None,
    cache: object = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "T"]:
    """The probability in the tiles of this shard that ``gradient_threshold`` leaves out of the gradients."""
    _options.check_names(dropped_mass, options, "sharded_linear_logprobs")
    call, _, rows = _call.bind_shard(hidden, weight, labels, where, num_rows, options, False)
    if not call.reports_dropped_mass:
        raise ValueError(
            f"stats={call.stats}, gradient_threshold={call.gradient_threshold:g}: dropped_mass needs stats=True and "
            "a threshold above 0, here and in local.statistics"
        )
    if call.num_tokens == 0:
        return jnp.zeros_like(merged.max)
    return _compiled_dropped_mass(call, rows, merged, cache)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _compiled_dropped_mass(call: Call, rows: Rows, merged: ShardStatistics, cache: Any) -> Array:
    _, dropped = _shard.selected(call, rows, merged, cache)
    if dropped is None:
        return jnp.zeros_like(merged.max)
    return dropped if rows.live is None else jnp.where(rows.live, dropped, 0.0)


class KLShard:
    """One shard of the vocabulary of `lce_jax.linear_kl`, without collectives.

        shard = local.KLShard(hidden, weight, teacher_hidden, teacher_weight, vocab_start=start, vocab_size=V)
        stats, cache = shard.statistics()
        merged = shard.merge(<jnp.stack(stats) of all shards, in their order: [N, 6, T]>)
        sums = shard.mixture_sums(merged)             # of "jsd" alone; to be added up over the shards
        kl = shard.finish(merged, sums)
        dhidden, dweight = shard.gradients(merged, sums, cotangent, cache)

    ``dhidden`` is this shard's part, to be summed over the shards; ``dweight`` is whole. The methods are plain
    functions of arrays, to be called under ``jit``, and none is differentiable itself. A shard may be made anew from
    the same arguments between two of them.
    """

    def __init__(
        self,
        hidden: Float[Array, "T H"],
        weight: Float[Array, "V H"],
        teacher_hidden: Float[Array, "T G"],
        teacher_weight: Float[Array, "V G"],
        *,
        direction: Literal["forward", "reverse", "jsd"] = "forward",
        vocab_start: int | Int[Array, ""] = 0,
        where: Bool[Array, "T"] | None = None,
        **options: Unpack[KLOptions],
    ) -> None:
        _options.check_names(KLShard, options, "sharded_linear_kl")
        start = _call.count_of("vocab_start", vocab_start, scalars.INT32_MAX - 1)
        arrays = Pair((hidden, weight), (teacher_hidden, teacher_weight))
        bound = programs.bind_shard(KLArguments.of(arrays, where, direction, options))
        self._call = bound.call
        self._arrays = _Arrays(bound.primals, bound.rows, start)

    def statistics(self, keep_cache: bool = False) -> tuple[KLStatistics, object]:
        """Six numbers per token over the columns of this shard.

        Returns:
            A named tuple of ``[T]`` arrays, and the cache for `gradients` (a pytree, None if nothing is kept).
        """
        if self._call.num_tokens == 0:
            return _kl.no_columns(0, self._call.result_dtype), None
        keeps = keep_cache and self._call.cache_bytes > 0
        return _run(self._call, KLPart.statistics, (keeps,), self._arrays)

    def merge(self, parts: Float[Array, "N 6 T"]) -> KLStatistics:
        """The whole vocabulary's statistics."""
        shape, T = getattr(parts, "shape", None), self._call.num_tokens
        if shape is None or len(shape) != 3 or tuple(shape[1:]) != (len(KLStatistics._fields), T):
            raise ValueError(f"parts must be an array [N, 6, T = {T}], got {type(parts).__name__} of shape {shape}")
        return _run(self._call, KLPart.merge, (), self._arrays, parts)

    def mixture_sums(self, merged: KLStatistics) -> MixtureSums | None:
        """Of "jsd", two numbers per token over these columns, to be added up over the shards. Else None."""
        if not self._has_sums:
            return None
        return _run(self._call, KLPart.mixture_sums, (), self._arrays, merged)

    def finish(self, merged: KLStatistics, sums: MixtureSums | None = None) -> Float[Array, "T"]:
        """The divergence of each token, in nats."""
        self._check(sums)
        return _run(self._call, KLPart.finish, (), self._arrays, merged, sums)

    def gradients(
        self, merged: KLStatistics, sums: MixtureSums | None, cotangent: Float[Array, "T"], cache: object = None
    ) -> (
        tuple[Float[Array, "T H"], Float[Array, "V H"]]
        | tuple[Float[Array, "T H"], Float[Array, "V H"], Float[Array, "V"]]
    ):
        """The shard's part of the student's dhidden, in float32, and its dweight, in the weight's dtype.

        Returns:
            dhidden ``[T, H]`` and dweight. With a bias, also dbias ``[V]`` in float32. (All of a float64 head are
            float64.)
        """
        self._check(sums)
        if tuple(jnp.shape(cotangent)) != (self._call.num_tokens,):
            raise ValueError(f"cotangent {tuple(jnp.shape(cotangent))} must be [T = {self._call.num_tokens}]")
        if self._call.num_tokens == 0:
            own = self._arrays.primals.student
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, self._call.result_dtype), own)
            found = zeros._replace(weight=jnp.zeros_like(own.weight))
        else:
            found = _run(self._call, KLPart.gradients, (), self._arrays, merged, sums, cache, cotangent)
        return (found.hidden, found.weight) if found.bias is None else (found.hidden, found.weight, found.bias)

    @property
    def _has_sums(self) -> bool:
        return self._arrays.rows.student.weights is not None and self._call.num_tokens > 0

    def _check(self, sums: MixtureSums | None) -> None:
        """Without its sums, a JSD would be a KL."""
        if self._has_sums != (sums is not None):
            which = "needs" if self._has_sums else "has no"
            raise ValueError(f'direction="{self._call.direction}" {which} sums: those that `mixture_sums` returns')


class _Arrays(NamedTuple):
    primals: Pair[Primals]
    rows: Pair[Rows]
    start: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run(call: Call, method: Callable[..., Any], static: tuple[Any, ...], arrays: _Arrays, *more: Any) -> Any:
    """A method of `KLPart`, with ``static`` as its last arguments. Not differentiable."""

    def run(arrays: _Arrays, *more: Any) -> Any:
        return method(KLPart.of(call, *arrays), *more, *static)

    return _jax.not_differentiable(run)(arrays, *more)


__all__ = [
    "KLShard",
    "KLStatistics",
    "MixtureSums",
    "ShardStatistics",
    "differences",
    "dropped_mass",
    "fields",
    "finish",
    "gradients",
    "mean_logit",
    "merge",
    "pack",
    "statistics",
    "tags",
    "unpack",
]
