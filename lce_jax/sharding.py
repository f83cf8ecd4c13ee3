"""The same functions for callers outside ``shard_map``: global arrays in, global arrays out, over a mesh."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Unpack

from lce_jax import _options, api
from lce_jax._evaluate import evaluate_over
from lce_jax._layout import Axes, layout_of_names
from lce_jax._types import LogprobOutput

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh
    from jaxtyping import Array, Bool, Float, Int

    from lce_jax._types import LogprobOptions


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

    Args:
        hidden: ``[..., H]`` global array. Its first dimension is the batch, its last but one the sequence; in
            ``[T, H]`` the two are one.
        weight: ``[V, H]`` global array (or ``[H, V]``), split over ``vocab_axis``. V must divide by its size: pad
            the weight and give the true ``vocab_size``.
        labels: ``[...]`` global vocabulary ids.
        mesh: the mesh. None: that of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. None: each device holds all of it.
        batch_axes: the mesh axis (or axes) that splits the batch. None: under Explicit axes those of hidden's own
            type, else the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence. Where it is ``vocab_axis`` or ends with it
            (Megatron's sequence parallelism, ``("context", "tensor")`` beside context parallelism), hidden states are
            all-gathered over ``vocab_axis`` forward and their gradient is reduce-scattered backward.
        where: ``[...]`` bool, as in `linear_logprobs`.
        **options: as in `linear_logprobs`, without ``axis_name``.

    Returns:
        A `LogprobOutput` of global arrays, split as ``hidden`` is.

    Raises:
        ValueError: an axis the mesh does not have, one axis used twice, a dimension that does not divide.
        UnsupportedError, TypeError: as `linear_logprobs`.

    Memory:
        Per device, that of `linear_logprobs` on the device's tokens and columns. One all-gather of at most five
        numbers per token merges the shards.

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
    layout_of = functools.partial(
        layout_of_names, mesh=mesh, vocab_axis=vocab_axis, batch_axes=batch_axes, sequence_axis=sequence_axis
    )
    _options.check_names(sharded_linear_logprobs, options, without=("axis_name",))
    return evaluate_over(layout_of, hidden, weight, labels, where, _options.of_call(options)).public


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
    ignore_index: int | None = None,
    reduction: api.Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float | Float[Array, ""] = 0.0,
    normalizer: float | Array | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "..."]:
    """`linear_cross_entropy` over a mesh; "mean" and "sum" are over the tokens of all devices.

    Args:
        hidden: as `sharded_linear_logprobs`.
        weight: as `sharded_linear_logprobs`.
        labels: as `sharded_linear_logprobs`.
        mesh: as `sharded_linear_logprobs`.
        vocab_axis: as `sharded_linear_logprobs`.
        batch_axes: as `sharded_linear_logprobs`.
        sequence_axis: as `sharded_linear_logprobs`.
        where: as `linear_cross_entropy`.
        ignore_index: as `linear_cross_entropy`.
        reduction: as `linear_cross_entropy`.
        label_smoothing: as `linear_cross_entropy`.
        z_loss: as `linear_cross_entropy`.
        normalizer: as `linear_cross_entropy`; of the tokens of all devices.
        **options: as `linear_cross_entropy`, without ``axis_name``.

    Returns:
        The loss in nats: a scalar, or ``[...]`` split as ``hidden`` is with ``reduction="none"``.

    Raises:
        As `sharded_linear_logprobs` and `linear_cross_entropy`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_cross_entropy
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> with jax.set_mesh(mesh):
        ...     loss = sharded_linear_cross_entropy(jnp.ones((4, 8)), jnp.zeros((1000, 8)), jnp.arange(4))
        >>> round(float(loss), 3)
        6.908
    """
    layout_of = functools.partial(
        layout_of_names, mesh=mesh, vocab_axis=vocab_axis, batch_axes=batch_axes, sequence_axis=sequence_axis
    )
    _options.check_names(sharded_linear_cross_entropy, options, without=("axis_name", "entropy", "stats"))
    run = functools.partial(evaluate_over, layout_of)
    return api.cross_entropy(
        run, hidden, weight, labels, where, ignore_index, reduction, label_smoothing, z_loss, normalizer, options
    )
