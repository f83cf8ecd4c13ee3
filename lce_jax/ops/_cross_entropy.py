"""`linear_cross_entropy`: the loss of a language-model head, from the results of its tokens or by `linear_loss`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from lce_jax.call import _checks, _describe, _options
from lce_jax.call._describe import Bound
from lce_jax.call._options import LogprobOptions
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
    normalizer: float | ArrayLike | None = None,
    chunk_bytes: int | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "..."]:
    """Cross entropy of a language-model head, without storing the logits.

    Per token, with ε the smoothing, ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``: the cross entropy
    against ``(1 - ε)·onehot + ε/V``, and the penalty that keeps ``lse`` near 0.

    A mean or a sum that is differentiated computes its gradients in the forward, as `linear_loss` does: three matrix
    products in all. With ``cache_bytes`` it does not.

    Args:
        hidden, weight, labels, where: as in `linear_logprobs`.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts, and one outside the
            vocabulary has logprob 0.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none" for ``[...]``.
        label_smoothing: ε in [0, 1].
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4); a number, or an array of shape (), which may be traced
            and is differentiable.
        normalizer: what "mean" divides the sum by in place of the number of rows that count in this call: the rows of
            all micro-batches, or of all devices inside ``shard_map``, so that the losses and their gradients add up
            to the mean over all. A positive number, or an array of shape (), which may be traced; an array's 0 counts
            as 1. None: the rows that count in this call.
        chunk_bytes: bytes that the exponentials of one chunk of tokens may take beside the sum of dweight, per device;
            at least 128 tokens are a chunk. Fewer chunks are faster, because each adds to that sum. All tokens are one
            chunk where they need no more memory than several chunks and their sum. None: 1400 MiB (256 MiB on a CPU).
        **options: those of `linear_logprobs` but ``entropy``, ``stats`` and ``candidates``. With ``cache_bytes``, 0
            too, the gradients are computed in the backward, which recomputes what the forward does not keep.
            ``chunk_bytes`` is refused where they are (see Memory).

    Returns:
        The loss in nats, float32 (float64 for a float64 weight): a scalar, or ``[...]`` with ``reduction="none"``.
        Inside ``shard_map`` it covers the rows of this shard: average it over the data axes yourself, or sum it with
        ``normalizer=jax.lax.psum(jnp.sum(where), "data")``. Rows, ``z_loss`` and ``normalizer`` may be typed as varying
        over ``axis_name`` if every shard holds the same; where they differ it is NaN.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).

    Memory:
        Of a differentiated mean or sum that of `linear_loss`: O(chunk + T) beyond the gradients, and with several
        chunks dweight in float32, V·H·4 bytes. ``cache_bytes=0`` takes the least: with ``reduction="none"`` or
        ``cache_bytes``, it is that of `linear_logprobs`. So it is in float16 (whose gradients need the loss's scale,
        which the backward knows), with ``gradient_threshold`` or ``vocab_part_size``, and of a smoothed loss with a
        softcap. A call that is not differentiated is a plain forward, and so is the first one under
        ``jax.checkpoint``. `explain` says which way a call goes.

    Numerics:
        Each gradient is rounded once, and multiplied by the loss's cotangent after that. A power of two, such as 1 or
        a loss scale, changes no digit; any other rounds the gradient a second time, in its own dtype: give a factor
        as ``normalizer`` instead.

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
    because = _token_chunks.refuse_forward_gradients(arguments.call, reduction, options)
    most, axis_name = _token_chunks.check_loss_chunk_bytes(chunk_bytes, because), arguments.call.axis_name
    divisor = None if normalizer is None else _describe.put_on_device(normalizer, labels)
    penalty = None if isinstance(z_loss, float) else _describe.put_on_device(z_loss, labels)
    labels, where, numbers, agree = labels, arguments.where, (penalty, divisor), None
    if axis_name is not None:
        labels, where, numbers, agree = _compare_shards(labels, where, numbers, axis_name)
    arguments = arguments._replace(call=arguments.call.replace(chunk_bytes=most), labels=labels, where=where)
    loss = _Loss(reduction, smoothing, z_loss if isinstance(z_loss, float) else 0.0)
    if because is None:
        call, *arrays = _describe.bind_call(arguments, numbers)
        result = _sum_in_forward(loss, call, arrays, numbers)
    else:
        results = compute_results(arguments, tuple(x for x in numbers if x is not None))
        result = _reduce_results(loss, results, where, *numbers)
    if agree is None:
        return result
    return _collectives.set_nan_where_different(jnp.all(agree) if agree.ndim > result.ndim else agree, result)


class _Loss(NamedTuple):
    """What the losses are made of, besides the results."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float  # 0 where it is traced


def _compare_shards(labels: Any, where: Any, numbers: Any, axis_name: Any) -> tuple[Any, Any, Any, Array | None]:
    """Inside ``shard_map``: what the loss is made of, typed as equal on every shard, and the rows in which it is."""
    _checks.find_axis_size(axis_name)
    (labels, where), agree = _collectives.equalize_shards((labels, where), labels.ndim, axis_name)
    numbers, also = _collectives.equalize_shards(numbers, 0, axis_name)
    return labels, where, numbers, _collectives.join_agreement(_collectives.ignore_masked_rows(agree, where), also)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _sum_in_forward(loss: _Loss, call: Call, arrays: list[Any], numbers: tuple[Array | None, Array | None]) -> Array:
    """The loss by `linear_loss`. The divisor is in each token's loss, so that each gradient is rounded once.

    Jitted: outside ``jit`` each call would compile its loop.
    """
    bound, (penalty, normalizer), smooths = Bound(call, *arrays), numbers, loss.label_smoothing > 0
    rows, dtype = bound.rows, call.stat_dtype

    def loss_fn(logprob: Array, _: None, lse: Array, *more: Array | None) -> Array:
        mean_logit, share, penalty = more if smooths else (None, *more)
        found = _compute_token_loss(logprob, lse, mean_logit, loss.label_smoothing, loss.z_loss, penalty)
        return found if share is None else found * share

    divisor = None if loss.reduction == "sum" else _find_divisor(rows.where, normalizer, rows.labels.size, dtype)
    share = None if divisor is None else jnp.asarray(1 / divisor, dtype)
    penalty = None if penalty is None else penalty.astype(dtype)
    return sum_losses(loss_fn, bound, ((share, penalty), {}))[0]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _reduce_results(
    loss: _Loss, out: Results, where: Array | None, traced_z_loss: Array | None, normalizer: Array | None
) -> Array:
    """The loss from the results. Jitted: outside ``jit`` each number in an expression is a transfer."""
    outputs = out.outputs
    each = _compute_token_loss(
        outputs.logprobs, outputs.lse, out.mean_logit, loss.label_smoothing, loss.z_loss, traced_z_loss
    )
    if loss.reduction == "none":
        return each
    total = jnp.sum(each)
    return total if loss.reduction == "sum" else total / _find_divisor(where, normalizer, each.size, each.dtype)


def _compute_token_loss(
    logprobs: Array, lse: Array, mean_logit: Array | None, smoothing: float, z_loss: float, traced_z_loss: Array | None
) -> Array:
    """The loss of one token, or of all. The weight of lse² is a number that is known or an array."""
    loss = -(1.0 - smoothing) * logprobs
    if mean_logit is not None:
        loss += smoothing * (lse - mean_logit)
    if z_loss:
        loss += z_loss * lse * lse
    if traced_z_loss is not None:
        loss += traced_z_loss.astype(loss.dtype) * lse * lse
    return loss


def _find_divisor(where: Array | None, normalizer: Array | None, num_tokens: int, dtype: Any) -> Any:
    """What a mean divides by."""
    if normalizer is not None:
        divisor = normalizer.astype(dtype)
        return jnp.where(divisor == 0, 1, divisor)
    if where is None:
        return max(num_tokens, 1)
    return jnp.maximum(jnp.sum(where, dtype=dtype), 1)
