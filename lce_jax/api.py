"""The public functions: validate, flatten, dispatch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _checks, _options, _rows, scalars
from lce_jax._evaluate import evaluate
from lce_jax._types import LogprobOptions, LogprobOutput, Results

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.lax import PrecisionLike
    from jaxtyping import Array, Bool, Float, Int

type Reduction = Literal["mean", "sum", "none"]


def linear_logprobs(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "*b"],
    *,
    where: Bool[Array, "*b"] | None = None,
    temperature: float | Float[Array, "..."] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
    entropy: bool = True,
    stats: bool = False,
    vocab_size: int | None = None,
    weight_layout: Literal["vh", "hv"] = "vh",
    axis_name: Any = None,
    cache_bytes: int = 0,
    precision: PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
    bias: Float[Array, "V"] | None = None,
    candidates: Int[Array, "*b K"] | None = None,
    gradient_threshold: float = 0.0,
) -> LogprobOutput:
    """Per-token log-probability and entropy of a language-model head, without storing the logits.

    With ``z = cap(logit_scale · (hidden · weightᵀ + bias)) / temperature`` in float32 and ``p = softmax(z)`` over the
    vocabulary, returns ``logprobs = z[label] - lse``, ``entropy = -Σ p ln p`` and ``lse = ln Σ exp(z)`` per token,
    all in nats; with ``candidates``, also ``candidate_logprobs = z[candidates] - lse``. Differentiable, once, in
    ``hidden``, ``weight`` and ``bias`` through all four.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split. A label outside the
            vocabulary (negative, -100, ≥ V) has logprob 0, whose gradient is that of ``-lse``; its row still counts.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        temperature: divides the float32 logits: a positive number, or an array that broadcasts to ``labels`` (one
            value per token, or per sequence as ``[b, 1]``). No gradient. A value that is not positive and finite is
            refused where it is known; in a traced array its row returns NaN and has no gradient, and the other rows
            are not affected.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.
        entropy: False: ``.entropy`` is None and costs nothing.
        stats: True fills ``.max_logit`` and ``.min_logit``, extremes of ``z``, and ``.correct``, whether the label's
            logit is the largest (token accuracy: ``out.correct.mean()``), and with a ``gradient_threshold``
            ``.dropped_mass``. They have no gradient.
        vocab_size: the true size of the vocabulary. Columns from it on are padding: in no sum, with zero gradient,
            whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard
            passes its own columns of ``weight`` and the same ``hidden`` and ``labels``; all shards return
            bitwise-equal results. None: ``weight`` is whole.
        cache_bytes: bytes per device that the forward may keep, so that the backward recomputes less. 0 keeps
            nothing. If V is a multiple of 8, the backward overwrites the cache inside ``jit`` and a copy of it
            outside. An implementation that always recomputes ignores it, and `explain` says so.
        precision: of the matrix products with float32 operands; "highest" is exact to float32 rounding where the
            default may be TF32 (GPU) or bfloat16 (TPU).
        implementation: "mosaic_gpu" (kernels for Hopper GPUs), "xla" (every device), "reference" (stores the logits),
            or a tuple of names tried in order. None: the best one that can serve the call; its name is logged once
            (logger ``lce_jax``). `explain` gives the choice and the reasons.
        bias: ``[V]``, added to the float32 products before the scale, and split as the weight's vocabulary is. Its
            gradient is summed in float32 and rounded once. "mosaic_gpu" does not serve it. None: no bias.
        candidates: ``[..., K]`` integer vocabulary ids per token, global as labels are, K from 1 to 512: fills
            ``.candidate_logprobs``. -1 stands for none; such an id, and any out of vocabulary, returns 0 and has no
            gradient. An id may occur twice in a token. None: no candidates.
        gradient_threshold: tiles (128 tokens by 256 vocabulary columns) whose every probability is below it, and that
            hold no label, are left out of the gradients: a number in [0, 1). Results never change. 0 is exact.
            "mosaic_gpu" alone leaves tiles out; the gradients of the others stay exact.

    Returns:
        A `LogprobOutput`, each field of ``labels.shape`` in float32 (float64 for a float64 weight) or bool, or None.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative.

    Memory:
        Forward O(T + tile) beyond the operands, backward O(T·H + tile) beyond the gradients; never T·V. From forward
        to backward it keeps a few numbers per token, and the cache. `explain` gives the bytes. Candidates add O(T·K).

    Numerics:
        Every sum and softmax is float32. dlogits are rounded at most once, to the weight's dtype, before the gradient
        products, and each gradient once, to its operand's dtype. (Data parallel shards round dweight before their sum,
        as JAX's own transposes do.) Two runs are bitwise equal. Logits must be finite and within ±1e30.

    Sharding:
        Under ``jit`` on a mesh the call is partitioned as a matrix product is, over batch, sequence and vocabulary: by
        the operands' types under Explicit axes, by XLA under Auto axes (where ``cache_bytes`` keeps nothing). An axis
        that splits both tokens and vocabulary gathers the smaller of hidden and weight; a split H is gathered.
        `sharded_linear_logprobs` takes the axes by name. Inside ``shard_map``, give ``axis_name``: labels, ``where``
        and temperature may be typed as varying over it if every shard holds the same; rows that differ are NaN.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import linear_logprobs
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 3, 16))
        >>> weight = jnp.zeros((50257, 16))                 # a uniform distribution
        >>> out = linear_logprobs(hidden, weight, jnp.array([[1, 2, 3], [4, 5, -100]]))
        >>> [round(float(x), 3) for x in out.logprobs[1]]   # -ln 50257, and 0 for a label out of vocabulary
        [-10.825, -10.825, 0.0]
        >>> round(float(out.entropy[0, 0]), 3)              # ln 50257
        10.825
        >>> top = jnp.array([[[7, 8, -1]] * 3] * 2)         # the same two ids at every token
        >>> out = linear_logprobs(hidden, weight, jnp.zeros((2, 3), int), candidates=top)
        >>> [round(float(x), 3) for x in out.candidate_logprobs[0, 0]]
        [-10.825, -10.825, 0.0]

    References:
        Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maximum; the
        entropy's shifted sum and the gradients are derived in ``lce_jax/_math.py``.
    """
    options: LogprobOptions = {
        "temperature": temperature,
        "logit_softcap": logit_softcap,
        "logit_scale": logit_scale,
        "entropy": entropy,
        "stats": stats,
        "vocab_size": vocab_size,
        "weight_layout": weight_layout,
        "axis_name": axis_name,
        "cache_bytes": cache_bytes,
        "precision": precision,
        "implementation": implementation,
        "bias": bias,
        "candidates": candidates,
        "gradient_threshold": gradient_threshold,
    }
    return evaluate(hidden, weight, labels, where, _options.of_call(options)).public


def linear_cross_entropy(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "*b"],
    *,
    where: Bool[Array, "*b"] | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float | Float[Array, ""] = 0.0,
    normalizer: float | Array | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "..."]:
    """Cross entropy of a language-model head, without storing the logits.

    Per token, with ε the smoothing, ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``: the cross entropy
    against ``(1 - ε)·onehot + ε/V``, and the penalty that keeps ``lse`` near 0.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split. A label outside the
            vocabulary (negative, -100, ≥ V) has logprob 0, whose gradient is that of ``-lse``; its row still counts.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        ignore_index: rows with this label do not count; -100 is PyTorch's. None: no such label.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none" for ``[...]``.
        label_smoothing: ε in [0, 1).
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4); a number, or an array of shape (), which may be traced
            and is differentiable.
        normalizer: what "mean" divides the sum by in place of the number of rows that count in this call: the rows of
            all micro-batches, or of all devices inside ``shard_map``, so that the losses and their gradients add up
            to the mean over all. A positive number, or an array of shape (), which may be traced; an array's 0 counts
            as 1. None: the rows that count in this call.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``vocab_size``, ``weight_layout``,
            ``axis_name``, ``cache_bytes``, ``precision``, ``implementation``, ``bias`` and ``gradient_threshold``, as
            in `linear_logprobs`.

    Returns:
        The loss in nats, float32 (float64 for a float64 weight): a scalar, or ``[...]`` with ``reduction="none"``.
        Inside ``shard_map`` it covers the rows of this shard: average it over the data axes yourself, or sum it with
        ``normalizer=jax.lax.psum(jnp.sum(where), "data")``.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values.
        NotImplementedError: on a second derivative.

    Memory:
        That of `linear_logprobs`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_cross_entropy
        >>> hidden, weight = jnp.ones((4, 8)), jnp.zeros((1000, 8))
        >>> loss = linear_cross_entropy(hidden, weight, jnp.array([1, 2, 3, -100]), ignore_index=-100)
        >>> round(float(loss), 3)                           # ln 1000
        6.908
    """
    _options.check_names(linear_cross_entropy, options, without=("entropy", "stats", "candidates"))
    return cross_entropy(
        evaluate, hidden, weight, labels, where, ignore_index, reduction, label_smoothing, z_loss, normalizer, options
    )


def cross_entropy(
    evaluate: Callable[..., Results],
    hidden: Array,
    weight: Array,
    labels: Array,
    where: Array | None,
    ignore_index: int | None,
    reduction: Reduction,
    label_smoothing: float,
    z_loss: float | Array,
    normalizer: float | Array | None,
    options: LogprobOptions,
) -> Array:
    """The loss of a call that ``evaluate`` computes, on one device or over a mesh."""
    label_smoothing, z_loss, normalizer = _options.of_loss(reduction, label_smoothing, z_loss, normalizer)
    where = _counting_rows(labels, where, ignore_index)
    checked = _options.of_call(_options.loss_call(options), mean_logit=label_smoothing > 0)
    out = evaluate(hidden, weight, labels, where, checked)
    divisor = None if normalizer is None else _rows.on_device(normalizer)
    if isinstance(z_loss, float):
        return _reduced(out, where, None, divisor, reduction, label_smoothing, z_loss)
    return _reduced(out, where, _rows.on_device(z_loss), divisor, reduction, label_smoothing, 0.0)


@functools.partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
def _reduced(
    out: Results,
    where: Array | None,
    traced_z_loss: Array | None,
    normalizer: Array | None,
    reduction: Reduction,
    label_smoothing: float,
    z_loss: float,
) -> Array:
    """The loss from the results. Jitted: outside ``jit`` each number in an expression is a transfer."""
    logprobs, lse = out.outputs.logprobs, out.outputs.lse
    loss = -(1.0 - label_smoothing) * logprobs
    if out.mean_logit is not None:
        loss += label_smoothing * (lse - out.mean_logit)
    if z_loss:
        loss += z_loss * lse * lse
    if traced_z_loss is not None:
        loss += traced_z_loss.astype(loss.dtype) * lse * lse
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    if normalizer is not None:
        divisor = normalizer.astype(loss.dtype)
        return total / jnp.where(divisor == 0, 1, divisor)
    if where is None:
        return total / max(loss.size, 1)
    return total / jnp.maximum(jnp.sum(where, dtype=loss.dtype), 1)


def _counting_rows(labels: Array, where: Array | None, ignore_index: int | None) -> Array | None:
    if ignore_index is None:
        return where
    if where is not None:
        _checks.label_array(labels)
        _checks.where_array(where, labels.shape)
    return _kept(_rows.int32_labels(labels), where, scalars.integer("ignore_index", ignore_index))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _kept(labels: Array, where: Array | None, ignore_index: int) -> Array:
    kept = labels != ignore_index
    return kept if where is None else kept & where
