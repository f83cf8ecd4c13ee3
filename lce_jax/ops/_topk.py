"""The most likely tokens of each distribution, with their log-probabilities, without storing the logits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _call, _jax, _options, _runner
from lce_jax._call import Place, Rows, Spec
from lce_jax._options import CallOptions, LogprobOptions
from lce_jax._runner import Kind, Program, spread
from lce_jax._types import Primals, TopK
from lce_jax.mathematics._statistics import along
from lce_jax.mesh import _collectives
from lce_jax.programs import _topk

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._shapes import Array, Bool, Float
    from lce_jax.mesh._layout import Axes

__all__ = ["linear_topk", "sharded_linear_topk"]

_NO_DERIVATIVE = (
    "linear_topk is not differentiable. Call it with jax.lax.stop_gradient(hidden) and jax.lax.stop_gradient(weight), "
    "and for log-probabilities with a gradient call linear_logprobs(..., candidates=topk.ids)"
)


def linear_topk(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    k: int,
    *,
    where: Bool[Array, "*b"] | None = None,
    temperature: float | Float[Array, "..."] = 1.0,
    logit_softcap: float | Float[Array, ""] | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
    vocab_size: int | None = None,
    weight_layout: Literal["vh", "hv"] = "vh",
    axis_name: Axes = None,
    precision: PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
    bias: Float[Array, "V"] | None = None,
) -> TopK:
    """The k most likely tokens and their log-probabilities: the teacher's side of a distillation.

    The k largest of ``logprobs[v] = z[v] - ln Σ_u exp(z[u])``, exactly, the largest first, with ``z = cap(logit_scale ·
    (hidden · weight + bias)) / temperature`` in float32. Of equal ones the smaller id comes first.

    Not differentiable: a derivative that is used raises. Give the ids to ``linear_logprobs(..., candidates=ids)`` for
    log-probabilities with a gradient, also those of a student.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        k: how many, from 1 to 512 and at most the vocabulary; a Python integer.
        where: ``[...]`` bool, the rows that count. The others have ids -1 and zeros, whatever they hold, and cost no
            work. None: every row counts.
        temperature: divides the float32 logits: a positive number, or an array that broadcasts to ``[...]`` (one value
            per token, or per sequence as ``[b, 1]``). It does not change the order. A value that is not positive and
            finite is refused where it is known; in a traced array its row has ids -1 and NaN.
        logit_softcap: ``c`` in ``cap(x) = c·tanh(x / c)``, before the temperature (Gemma 2: 30): a positive number,
            or an array of shape (), which may be traced. None: no cap. No gradient.
        logit_scale: multiplies the float32 logits first (Cohere, MuP): a number, or an array of shape (), which may
            be traced. No gradient.
        vocab_size: the true size of the vocabulary. Columns from it on are padding: in no sum, with zero gradient,
            whatever they hold. None: every column counts.
        weight_layout: "vh" for ``[V, H]`` (nnx.Embed, PyTorch, Megatron), "hv" for ``[H, V]`` (nnx.Linear kernel).
        axis_name: inside ``shard_map``, the mesh axis (or tuple of axes) that splits the vocabulary. Each shard
            passes its own columns of ``weight`` and the same ``hidden`` and ``labels``; all shards return
            bitwise-equal results. Rows that differ between shards are NaN, in gradients too; all are, if two shards
            pass the same columns. None: ``weight`` is whole.
        precision: of the matrix products with float32 operands; "highest" is exact to float32 rounding where the
            default may be TF32 (GPU) or bfloat16 (TPU).
        implementation: None or "xla": the kernels for Hopper GPUs do not serve it, because XLA's own product takes the
            same time.
        bias: ``[V]``, added to the float32 products before the scale, and split as the weight's vocabulary is. None:
            no bias.

    Returns:
        A `TopK`: ids and logprobs ``[..., k]``, lse ``[...]``.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values: also a k that is 0,
            more than the vocabulary, no integer or traced.
        NotImplementedError: on a derivative that is used.

    Memory:
        The logits of one chunk of tokens, 160 MiB or 256 tokens if these are more (on a CPU 32 MiB or 128 tokens),
        O(T·k), and with ``where`` a copy of ``hidden``. On a CPU, XLA copies a float16 weight in float32, and a
        bfloat16 one for a call with one token.

    Numerics:
        The order is that of the float32 products: cap and temperature cannot change it, also where they round two
        logits to one. With a scale of 0 all are equal. ``logprobs <= 0``, and their exponentials sum to at most 1 but
        for rounding. lse agrees with that of `linear_logprobs` to rounding, not in its bits.

    Sharding:
        As `linear_logprobs`: under ``jit`` on a mesh it is partitioned by the operands' types (Explicit axes) or by XLA
        (Auto axes, not of TPUs); inside ``shard_map`` give ``axis_name``. One all-gather of 2k + 1 numbers per token,
        with a softcap 3k + 1, merges the shards' own k largest.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_logprobs, linear_topk
        >>> hidden, weight = jnp.ones((2, 4)), jnp.array([0.0, 2.0, 1.0, 2.0])[:, None] * jnp.ones(4)
        >>> top = linear_topk(hidden, weight, 3)
        >>> top.ids.tolist(), round(float(top.logprobs[0, 0]), 3)      # of equal ones the smaller id first
        ([[1, 3, 2], [1, 3, 2]], -0.702)
        >>> out = linear_logprobs(hidden, weight, jnp.array([0, 0]), candidates=top.ids)
        >>> bool(jnp.allclose(out.candidate_logprobs, top.logprobs))
        True
    """
    given: LogprobOptions = {
        "temperature": temperature,
        "logit_softcap": logit_softcap,
        "logit_scale": logit_scale,
        "vocab_size": vocab_size,
        "weight_layout": weight_layout,
        "axis_name": axis_name,
        "precision": precision,
        "implementation": implementation,
        "bias": bias,
    }
    return _most_likely(hidden, weight, where, _options.of_topk(given, k))


def sharded_linear_topk(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    k: int,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[Array, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> TopK:
    """`linear_topk` over a mesh: the vocabulary split over one axis, the tokens over others.

    Operands and results are global arrays. In ``[T, H]`` the one dimension of tokens is batch and sequence at once.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        k: how many, from 1 to 512 and at most the vocabulary; a Python integer.
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must divide by its size: pad the weight and
            give the true ``vocab_size``. None: each device holds the whole vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: under Explicit axes
            those of hidden's own type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If it is
            ``vocab_axis`` or ends with it (Megatron's sequence parallelism; ``("context", "tensor")`` adds context
            parallelism), hidden states are all-gathered over ``vocab_axis`` forward and their gradient is
            reduce-scattered backward. None: the sequence is not split.
        where: ``[...]`` bool, the rows that count. The others have ids -1 and zeros, whatever they hold, and cost no
            work. None: every row counts.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``vocab_size``, ``weight_layout``,
            ``precision``, ``implementation`` and ``bias``, as in `linear_topk`.

    Returns:
        A `TopK`, split as ``hidden`` is.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also an axis
            that the mesh does not have, an axis used twice, or a dimension that does not divide.
        NotImplementedError: on a derivative that is used.

    Memory:
        Per device, that of `linear_topk` on the device's tokens and columns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_topk
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.arange(1000.0)[:, None] * jnp.ones(8)
        >>> sharded_linear_topk(hidden, weight, 2, mesh=mesh, batch_axes="data").ids[0, 0].tolist()
        [999, 998]
    """
    _options.check_names(sharded_linear_topk, options, without=("axis_name", *_options.NOT_OF_TOPK))
    _options.refuse("sharded_linear_topk", options, _options.NOT_OF_TOPK)
    place = Place.of(mesh, vocab_axis, batch_axes, sequence_axis)
    return _most_likely(hidden, weight, where, _options.of_topk(options, k), place)


def _most_likely(
    hidden: Array, weight: Array, where: Array | None, options: CallOptions, place: Place | None = None
) -> TopK:
    """The results of a call, over the mesh at ``place`` if there is one."""
    spec, primals, rows, agree = _call.bind(hidden, weight, None, where, options, place)
    out = _program(spec, primals, rows)
    if agree is None:
        return out
    ids = jnp.where(along(agree, out.ids), out.ids, -1)
    return TopK(ids, *_collectives.nan_where_different(agree, (out.logprobs, out.lse)))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _program(spec: Spec, primals: Primals, rows: Rows) -> TopK:
    """The results of global arrays or of one device's, outside ``jit`` compiled once."""
    shape = rows.labels.shape
    if spec.case.num_tokens == 0:
        k, dtype = spec.case.options.top_k, spec.case.stat_dtype
        none = TopK(jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k), dtype), jnp.zeros(shape, dtype))
        return _jax.vary_like(none, (primals.hidden, rows.labels))
    operands = _runner.head(spec.case.options.vocab_dim), Kind.TOKENS
    run = functools.partial(spread, spec, Program(_topk.forward, operands, Kind.RESULTS, joins=True))
    return _jax.not_differentiable(run, _NO_DERIVATIVE)(primals, rows)
