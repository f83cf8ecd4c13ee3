"""The public functions over a mesh, for callers outside ``shard_map``: global arrays in, global arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lce_jax import _options
from lce_jax._call import Place
from lce_jax._types import LogprobOutput
from lce_jax.ops import _cross_entropy, _logits, _logprobs
from lce_jax.ops._cross_entropy import Reduction

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._options import LogprobOptions
    from lce_jax._shapes import Array, Bool, Float, Int
    from lce_jax.mesh._layout import Axes


def sharded_linear_logprobs(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "*b"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[Array, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> LogprobOutput:
    """`linear_logprobs` over a mesh: the vocabulary split over one axis, the tokens over others.

    Operands and results are global arrays. In ``[T, H]`` the one dimension of tokens is batch and sequence at once.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split. A label outside the
            vocabulary (negative, ≥ V) has logprob 0, whose gradient is that of ``-lse``; its row counts unless a loss
            ignores it (``ignore_index``).
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must divide by its size: pad the weight and
            give the true ``vocab_size``. None: each device holds the whole vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: under Explicit axes
            those of hidden's own type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If it is
            ``vocab_axis`` or ends with it (Megatron's sequence parallelism; ``("context", "tensor")`` adds context
            parallelism), hidden states are all-gathered over ``vocab_axis`` forward and their gradient is
            reduce-scattered backward. None: the sequence is not split.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``entropy``, ``stats``, ``vocab_size``,
            ``weight_layout``, ``cache_bytes``, ``precision``, ``implementation``, ``bias``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size`` and ``logit_floor``, as in `linear_logprobs`.

    Returns:
        A `LogprobOutput`, each field of ``labels.shape`` (candidates with K more) and split as ``hidden`` is, or None.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also an axis
            that the mesh does not have, an axis used twice, or a dimension that does not divide.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).

    Memory:
        Per device, that of `linear_logprobs` on the device's tokens and columns. One all-gather of at most five
        numbers per token, and of one more per candidate, merges the shards.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_logprobs
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.zeros((1000, 8))
        >>> labels = jnp.zeros((2, 4), jnp.int32)
        >>> out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, batch_axes="data")
        >>> out.logprobs.shape
        (2, 4)
    """
    _options.check_names(sharded_linear_logprobs, options, without=("axis_name",))
    place = Place.of(mesh, vocab_axis, batch_axes, sequence_axis)
    return _logprobs.results(hidden, weight, labels, where, _options.of_call(options), place).public


def sharded_linear_cross_entropy(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "*b"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[Array, "*b"] | None = None,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float | Float[Array, ""] = 0.0,
    normalizer: float | Array | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "..."]:
    """`linear_cross_entropy` over a mesh: the vocabulary split over one axis, the tokens over others.

    Operands and results are global arrays; "mean" and "sum" are over the tokens of all devices. In ``[T, H]`` the one
    dimension of tokens is batch and sequence at once.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split. A label outside the
            vocabulary (negative, ≥ V) has logprob 0, whose gradient is that of ``-lse``; its row counts unless a loss
            ignores it (``ignore_index``).
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must divide by its size: pad the weight and
            give the true ``vocab_size``. None: each device holds the whole vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: under Explicit axes
            those of hidden's own type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If it is
            ``vocab_axis`` or ends with it (Megatron's sequence parallelism; ``("context", "tensor")`` adds context
            parallelism), hidden states are all-gathered over ``vocab_axis`` forward and their gradient is
            reduce-scattered backward. None: the sequence is not split.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts, and one outside the
            vocabulary has logprob 0.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none" for ``[...]``.
        label_smoothing: ε in [0, 1).
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4); a number, or an array of shape (), which may be traced
            and is differentiable.
        normalizer: what "mean" divides the sum by in place of the number of rows that count in this call: the rows of
            all micro-batches, or of all devices inside ``shard_map``, so that the losses and their gradients add up
            to the mean over all. A positive number, or an array of shape (), which may be traced; an array's 0 counts
            as 1. None: the rows that count in this call.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``vocab_size``, ``weight_layout``,
            ``cache_bytes``, ``precision``, ``implementation``, ``bias``, ``gradient_threshold``,
            ``vocab_part_size`` and ``logit_floor``, as in `linear_logprobs`.

    Returns:
        The loss in nats: a scalar, or ``[...]`` split as ``hidden`` is with ``reduction="none"``.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also an axis
            that the mesh does not have, an axis used twice, or a dimension that does not divide.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).

    Memory:
        That of `sharded_linear_logprobs`, or of `sharded_linear_loss` where `linear_cross_entropy` would use it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_cross_entropy
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> with jax.set_mesh(mesh):
        ...     loss = sharded_linear_cross_entropy(jnp.ones((4, 8)), jnp.zeros((1000, 8)), jnp.arange(4))
        >>> round(float(loss), 3)
        6.908
    """
    _options.check_names(sharded_linear_cross_entropy, options, without=("axis_name", "entropy", "stats", "candidates"))
    place = Place.of(mesh, vocab_axis, batch_axes, sequence_axis)
    return _cross_entropy.of_call(
        place, hidden, weight, labels, where, ignore_index, reduction, label_smoothing, z_loss, normalizer, options
    )


def sharded_linear_logits(
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    ids: Int[Array, "*b K"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[Array, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "*b K"]:
    """`linear_logits` over a mesh: the vocabulary split over one axis, the tokens over others.

    Operands and results are global arrays. In ``[T, H]`` the one dimension of tokens is batch and sequence at once.

    Args:
        hidden: ``[..., H]`` hidden states; any leading shape, also an empty one. bfloat16, float16, float32 or
            float64. Cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix products.
        ids: ``[..., K]`` integer vocabulary ids per token, global also when the vocabulary is split; K from 1 to 512.
            -1 stands for none.
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must divide by its size: pad the weight and
            give the true ``vocab_size``. None: each device holds the whole vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: under Explicit axes
            those of hidden's own type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If it is
            ``vocab_axis`` or ends with it (Megatron's sequence parallelism; ``("context", "tensor")`` adds context
            parallelism), hidden states are all-gathered over ``vocab_axis`` forward and their gradient is
            reduce-scattered backward. None: the sequence is not split.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold. None: every row counts.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``vocab_size``, ``weight_layout``,
            ``precision``, ``implementation`` and ``bias``, as in `linear_logits`.

    Returns:
        ``[..., K]`` as `linear_logits` returns it, split as ``hidden`` is.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also an axis
            that the mesh does not have, an axis used twice, or a dimension that does not divide.
        NotImplementedError: on a second derivative, and on a first one in forward mode (``jax.jvp``).

    Memory:
        Per device, that of `linear_logits` on the device's tokens and columns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_logits
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4)), jnp.arange(10.0)[:, None] * jnp.ones(4)
        >>> sharded_linear_logits(hidden, weight, jnp.array([[3, 0], [7, -1]]), mesh=mesh, batch_axes="data").tolist()
        [[12.0, 0.0], [28.0, 0.0]]
    """
    _options.check_names(sharded_linear_logits, options, without=("axis_name", *_options.NOT_OF_TOPK))
    _options.refuse("sharded_linear_logits", options, _options.NOT_OF_TOPK)
    place = Place.of(mesh, vocab_axis, batch_axes, sequence_axis)
    return _logits.at_ids(hidden, weight, ids, where, options, place)
