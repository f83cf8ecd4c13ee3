"""`merge`, `finish` and `mean_logit` of `lce_jax.local`: from shards' statistics to results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax import _call, _devices, _options, _shard, mosaic
from lce_jax._types import LogprobOutput, ShardStatistics
from lce_jax.mathematics import _columns, _logprobs, _statistics, _temperature

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


def merge(
    parts: ShardStatistics,
    *,
    temperature: float | Float[Array, "T"] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
) -> ShardStatistics:
    """The statistics of all shards together: ``m = max mᵢ``, ``s = Σ sᵢ·exp((mᵢ - m)·k)``, and so on for each field.

    Args:
        parts: statistics of N shards, fields ``[N, T]``. A shard without a true column counts for nothing.
        temperature: as given to `statistics`; with the next two it makes the k of `ShardStatistics`.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.

    Returns:
        Statistics with fields ``[T]`` (``[T, K]`` for candidates). They are added in the order of N, so all who merge
        the same parts get the same bits.

    Raises:
        ValueError, TypeError: a temperature, softcap or scale that `statistics` refuses.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import local
        >>> stats, _ = local.statistics(jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8]))
        >>> twice = jax.tree.map(lambda x: jnp.stack([x, x]), stats)
        >>> float(local.merge(twice).sumexp[0])
        200.0
    """
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

    Args:
        stats: merged statistics, fields ``[T]``.
        labels: ``[T]`` global vocabulary ids, the same on every shard. Outside ``[0, vocab_size)`` the logprob is 0.
        vocab_size: the true size of the whole vocabulary.
        where: ``[T]`` bool, the rows that count. The others are 0 in what `finish` and `gradients` return, whatever
            they hold. None: all.
        temperature: as given to `statistics`; with the next two it makes the k of `ShardStatistics`.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.

    Returns:
        A `LogprobOutput` of ``[T]`` arrays; fields whose statistics are None are None too.

    Raises:
        ValueError, TypeError: labels or ``where`` of a wrong shape or dtype; a temperature, softcap or scale that
            `statistics` refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> stats, _ = local.statistics(jnp.ones((1, 4)), jnp.zeros((100, 4)), jnp.array([7]))
        >>> round(float(local.finish(stats, jnp.array([7]), vocab_size=100).entropy[0]), 3)
        4.605
    """
    rows = _call.rows_of_call(labels, where, 1.0, vocab_size, stats.max.dtype)
    scale = _row_scale(stats, rows.where, temperature, logit_softcap, logit_scale)
    where = _columns.without_empty(rows.where, stats.sumexp)  # whether there is a floor is not known here
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

    Args:
        stats: merged statistics, fields ``[T]``.
        vocab_size: the true size of the whole vocabulary.
        temperature: as given to `statistics`; with the next two it makes the k of `ShardStatistics`.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.

    Returns:
        ``[T]``. Its derivative divided by ``vocab_size`` is the ``dtotal`` of `gradients`.

    Raises:
        ValueError, TypeError: statistics without ``total``; a temperature, softcap or scale that `statistics` refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> call = (jnp.ones((1, 4)), jnp.ones((100, 4)), jnp.array([7]))
        >>> stats, _ = local.statistics(*call, total=True, temperature=0.5)
        >>> float(local.mean_logit(stats, vocab_size=100, temperature=0.5)[0])
        8.0
    """
    if stats.total is None:
        raise ValueError("stats without total: give total=True to local.statistics, and to local.fields if unpacked")
    return stats.total * _row_scale(stats, None, temperature, logit_softcap, logit_scale) / vocab_size


def _row_scale(stats: ShardStatistics, where: Any, temperature: Any, logit_softcap: Any, logit_scale: Any) -> Any:
    """The k of eq. 0; the last dimension of the statistics runs over the tokens."""
    options = _options.of_call({"logit_softcap": logit_softcap, "logit_scale": logit_scale})
    labels, dtype = _call.no_labels(stats.max, stats.max.shape[-1:]), stats.max.dtype
    rows = _call.rows_of_call(labels, where, temperature, 0, dtype, options.logit_scale, options.logit_softcap)
    invert = functools.partial(_on_device, _temperature.inverse)
    return _logprobs.row_scale(options.static, _call.scales(rows, dtype, False, invert).logits)


def _on_device(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of [T] and of numbers: in a kernel, where there are any for their device."""
    run, arrays = _shard.of_arrays(function, operands)
    kernels = mosaic.on(_devices.current_device(*arrays))
    if kernels is None or not all(x.dtype in (jnp.float32, jnp.int32) for x in arrays):
        return run(*arrays)
    return kernels.per_token(run, *arrays)
