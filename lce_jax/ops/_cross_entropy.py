"""`linear_cross_entropy`: a head's cross entropy, computed like `linear_loss` or from `linear_logprobs`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _checks, _describe, _options
from lce_jax.call._describe import Bound
from lce_jax.call._options import Arguments, LogprobOptions
from lce_jax.mesh import _collectives
from lce_jax.ops._logprobs import compute_results
from lce_jax.ops._loss import sum_losses
from lce_jax.run import _token_chunks
from lce_jax.types._types import Call, Results

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int

type Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float | Float[ArrayLike, ""] = 0.0,
    class_weights: Float[ArrayLike, "V"] | None = None,
    normalizer: float | ArrayLike | None = None,
    chunk_bytes: int | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "..."]:
    """Cross entropy of a language-model head, without storing the logits.

    The loss of a token is ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``, where ε is the label smoothing.
    This is the cross entropy against ``(1 - ε)·onehot + ε/V``, plus a penalty that keeps ``lse`` near 0.

    The forward of a differentiated mean or sum also computes the gradients, as `linear_loss` does. Forward and backward
    together take three matrix products. With ``cache_bytes``, the backward computes the gradients.

    Args:
        hidden, weight, labels, where: as in `linear_logprobs`.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts; a label outside the
            vocabulary has logprob 0.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none" for ``[...]``.
        label_smoothing: ε in [0, 1].
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4); a number, or an array of shape (), which may be traced
            and is differentiable.
        class_weights: ``[V]`` floats, PyTorch's ``weight``: each token's loss is multiplied by the entry of its label.
            "mean" then divides by the sum of these factors, or by ``normalizer``. Inside ``shard_map``, pass the
            entries of this shard's part of the vocabulary. A label outside the vocabulary has the factor 0. The factors
            have no gradient, as in PyTorch, and are refused with ``label_smoothing``. None: the factor is 1 for every
            label.
        normalizer: the divisor of "mean", in place of the number of rows that count in this call. Give the number of
            rows in all micro-batches, or inside ``shard_map`` on all devices, so that the losses and their gradients
            add up to the mean over all rows. It is a positive number, or an array of shape (), which may be traced; a 0
            in an array counts as 1. None: the number of rows that count in this call.
        chunk_bytes: bytes per device that the exponentials of one chunk of tokens may take, in addition to the sum of
            dweight. A chunk has at least 128 tokens. Fewer chunks are faster, because each chunk adds to that sum. All
            tokens form a single chunk if this needs no more memory than several chunks and the sum. None: 1400 MiB (256
            MiB on a CPU).
        **options: those of `linear_logprobs` but ``entropy``, ``stats`` and ``candidates``. If ``cache_bytes`` is
            given, even as 0, the backward computes the gradients, and recomputes what the forward does not keep. In
            this case and the others that Memory lists, ``chunk_bytes`` is refused.

    Returns:
        The loss in nats, float32 (float64 for a float64 weight): a scalar, or ``[...]`` with ``reduction="none"``.
        Inside ``shard_map`` the loss covers the rows of this shard: average it over the data axes yourself, or pass
        ``normalizer=jax.lax.psum(jnp.sum(where), "data")`` and sum it. Per-token arrays, ``z_loss`` and ``normalizer``
        may have types that vary over ``axis_name`` if every shard holds the same values. Where the values differ, the
        loss is NaN.

    Raises:
        UnsupportedError: a requested implementation cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values.
        NotImplementedError: for a second derivative, and for forward mode (``jax.jvp``).

    Memory:
        A differentiated mean or sum takes the memory of `linear_loss`: O(chunk + T) beyond the gradients, and with
        several chunks V·H·4 bytes for dweight in float32. In the following cases the backward computes the gradients,
        and the memory is that of `linear_logprobs`: ``reduction="none"``; ``cache_bytes`` (0 takes the least memory);
        ``gradient_threshold`` or ``vocab_part_size``; float16, because only the backward knows the loss scale; label
        smoothing with a softcap. A call that is not differentiated only runs the forward, and so does the first run
        under ``jax.checkpoint``. `explain` says which pass computes the gradients of a call.

    Numerics:
        If the forward computes the gradients, each is rounded once, and then multiplied by the loss's cotangent. A
        cotangent that is a power of two, such as 1 or a loss scale, changes no digit. Any other rounds the gradient a
        second time, in the gradient's dtype; to avoid this, replace the factor by a ``normalizer``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_cross_entropy
        >>> hidden, weight = jnp.ones((4, 8)), jnp.zeros((1000, 8))
        >>> loss = linear_cross_entropy(hidden, weight, jnp.array([1, 2, 3, -100]), ignore_index=-100)
        >>> round(float(loss), 3)                           # ln 1000
        6.908
    """
    _options.check_names(linear_cross_entropy, options)
    smoothing, z_loss, normalizer = _options.check_loss(reduction, label_smoothing, z_loss, normalizer)
    arguments = _options.parse_arguments(
        _options.check_loss_options(options), hidden, weight, labels, where, ignore_index, mean_logit=smoothing > 0,
        function="linear_cross_entropy",
    )  # fmt: skip
    arguments = _describe.describe_call(arguments)
    reason = _token_chunks.refuse_forward_gradients(arguments.call, reduction, options)
    limit, axis_name = _token_chunks.check_loss_chunk_bytes(chunk_bytes, reason), arguments.call.axis_name
    divisor = None if normalizer is None else _describe.put_on_device(normalizer, labels)
    penalty = None if isinstance(z_loss, float) else _describe.put_on_device(z_loss, labels)
    where, numbers, agree = arguments.where, (penalty, divisor), None
    if axis_name is not None:
        labels, where, numbers, agree = _compare_shards(labels, where, numbers, axis_name)
    arguments = arguments._replace(call=arguments.call.replace(chunk_bytes=limit), labels=labels, where=where)
    loss = _Loss(reduction, smoothing, z_loss if isinstance(z_loss, float) else 0.0)
    factors = None if class_weights is None else _select_factors(class_weights, arguments, smoothing)
    if reason is None:
        call, *arrays = _describe.bind_call(arguments, (*numbers, factors))
        result = _sum_in_forward(loss, call, arrays, factors, numbers)
    else:
        results = compute_results(arguments, tuple(x for x in numbers if x is not None))
        result = _reduce_results(loss, results, where, factors, *numbers)
    if agree is None:
        return result
    return _collectives.set_nan_where_different(jnp.all(agree) if agree.ndim > result.ndim else agree, result)


class _Loss(NamedTuple):
    """The options of the loss that are Python values."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float  # 0 if the weight of lse² is traced


def _compare_shards(labels: Any, where: Any, numbers: Any, axis_name: Any) -> tuple[Any, Any, Any, Array | None]:
    """Returns the arrays, with types that do not vary over ``axis_name``, and a mask of the rows with equal values."""
    _checks.find_axis_size(axis_name)
    (labels, where), agree = _collectives.equalize_shards((labels, where), labels.ndim, axis_name)
    numbers, numbers_agree = _collectives.equalize_shards(numbers, 0, axis_name)
    agree = _collectives.ignore_masked_rows(agree, where)
    return labels, where, numbers, _collectives.join_agreement(agree, numbers_agree)


def _select_factors(class_weights: Any, arguments: Arguments, smoothing: float) -> Float[Array, "*b"]:
    """Returns the class weight of each token's label: 0 for masked tokens and for labels outside the vocabulary."""
    call = arguments.call
    _checks.check_class_weights(class_weights, arguments.weight, call, smoothing)
    labels, weights = _describe.cast_labels(arguments.labels), _describe.put_on_device(class_weights, arguments.labels)
    return _gather_factors(call.axis_name, weights, labels, arguments.where)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _gather_factors(axis_name: Any, weights: Array, labels: Array, where: Array | None) -> Float[Array, "*b"]:
    weights = lax.stop_gradient(weights.astype(jnp.promote_types(weights.dtype, jnp.float32)))
    columns = labels if axis_name is None else labels - lax.axis_index(axis_name) * len(weights)
    columns = jnp.where(columns < 0, len(weights), columns)  # JAX would count a negative index from the end
    sharding = jax.typeof(labels).sharding
    factors = weights.at[columns].get(mode="fill", fill_value=0, out_sharding=None if sharding.mesh.empty else sharding)
    factors = factors if axis_name is None else lax.psum(factors, axis_name)
    return factors if where is None else jnp.where(where, factors, 0)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _sum_in_forward(
    loss: _Loss, call: Call, arrays: list[Any], factors: Array | None, numbers: tuple[Array | None, Array | None]
) -> Array:
    """Computes the loss as `linear_loss` does.

    Each token's loss is divided before the sum, so that each gradient is rounded once. The function is jitted because
    outside ``jit`` each call would compile its loop again.
    """
    bound, (penalty, normalizer), smooths = Bound(call, *arrays), numbers, loss.label_smoothing > 0
    rows, dtype = bound.rows, call.stat_dtype

    def loss_fn(logprob: Array, _: None, lse: Array, *more: Array | None) -> Array:
        mean_logit, share, penalty = more if smooths else (None, *more)
        value = _compute_token_loss(logprob, lse, mean_logit, loss.label_smoothing, loss.z_loss, penalty)
        return value if share is None else value * share

    share = None if factors is None else factors.astype(dtype)
    if loss.reduction == "mean":
        divisor = _find_divisor(rows.where, factors, normalizer, rows.labels.size, dtype)
        share = jnp.asarray((1 if share is None else share) / divisor, dtype)
    penalty = None if penalty is None else penalty.astype(dtype)
    return sum_losses(loss_fn, bound, ((share, penalty), {}))[0]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _reduce_results(
    loss: _Loss,
    out: Results,
    where: Array | None,
    factors: Array | None,
    traced_z_loss: Array | None,
    normalizer: Array | None,
) -> Array:
    """Computes the loss from the results. The function is jitted, so that no Python scalars are transferred."""
    outputs = out.outputs
    each = _compute_token_loss(
        outputs.logprobs, outputs.lse, out.mean_logit, loss.label_smoothing, loss.z_loss, traced_z_loss
    )
    each = each if factors is None else each * factors.astype(each.dtype)
    if loss.reduction == "none":
        return each
    total = jnp.sum(each)
    return (
        total if loss.reduction == "sum" else total / _find_divisor(where, factors, normalizer, each.size, each.dtype)
    )


def _compute_token_loss(
    logprobs: Array, lse: Array, mean_logit: Array | None, smoothing: float, z_loss: float, traced_z_loss: Array | None
) -> Array:
    """Computes the loss of one token, or of all tokens. The factor of lse² is ``z_loss`` or ``traced_z_loss``."""
    loss = -(1.0 - smoothing) * logprobs
    if mean_logit is not None:
        loss += smoothing * (lse - mean_logit)
    if z_loss:
        loss += z_loss * lse * lse
    if traced_z_loss is not None:
        loss += traced_z_loss.astype(loss.dtype) * lse * lse
    return loss


def _find_divisor(
    where: Array | None, factors: Array | None, normalizer: Array | None, num_tokens: int, dtype: Any
) -> Any:
    """Returns the divisor of a mean: the normalizer, the sum of the class weights, or the number of rows that count."""
    divisor = normalizer if factors is None or normalizer is not None else jnp.sum(factors, dtype=dtype)
    if divisor is not None:
        divisor = divisor.astype(dtype)
        return jnp.where(divisor == 0, 1, divisor)
    if where is None:
        return max(num_tokens, 1)
    return jnp.maximum(jnp.sum(where, dtype=dtype), 1)
