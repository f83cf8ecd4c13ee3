"""The public functions over a mesh, for callers outside ``shard_map``: they take and return global arrays."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from lce_jax.call import _options
from lce_jax.call._options import MeshPlacement
from lce_jax.ops._cross_entropy import Reduction, linear_cross_entropy
from lce_jax.ops._kl import linear_kl
from lce_jax.ops._logits import linear_logits
from lce_jax.ops._logprobs import linear_logprobs
from lce_jax.ops._loss import linear_loss
from lce_jax.ops._topk import linear_topk
from lce_jax.types._types import LogprobOutput, TopK

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax.call._options import KLOptions, LogprobOptions, OptionsWithoutEntropy
    from lce_jax.mesh._layout import Axes
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int
    from lce_jax.types._types import PerhapsWithoutEntropy


def over_mesh[**P, R](function: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that turns a declaration (a signature and a docstring) into ``function`` over a mesh.

    The declaration has four arguments in place of ``axis_name``. ``function`` gets all four as one `MeshPlacement` in
    ``axis_name``.
    """

    def decorate(declared: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declared).parameters.values()
        required = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD and x.default is x.empty]

        @functools.wraps(declared)
        def sharded(
            *operands: Any, mesh: Any = None, vocab_axis: Any = "tensor", batch_axes: Any = None,
            sequence_axis: Any = None, axis_name: Any = None, **named: Any,
        ) -> R:  # fmt: skip
            if missing := [repr(name) for name in required[len(operands) :] if name not in named]:
                raise TypeError(f"{declared.__name__}() is called without {' and '.join(missing)}")
            _options.refuse_axis_name(axis_name)
            placement = MeshPlacement(mesh, vocab_axis, batch_axes, sequence_axis)
            return function(*operands, axis_name=placement, **named)

        return sharded

    return decorate


@overload
def sharded_linear_logprobs(  # type: ignore[overload-overlap]  # bool has True in it
    hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"], labels: Int[ArrayLike, "*b"], *,
    mesh: Mesh | AbstractMesh | None = None, vocab_axis: Axes = "tensor", batch_axes: Axes = None,
    sequence_axis: Axes = None, where: Bool[ArrayLike, "*b"] | None = None, ignore_index: int | None = None,
    entropy: Literal[True] = True, **options: Unpack[OptionsWithoutEntropy],
) -> LogprobOutput: ...  # fmt: skip
@overload
def sharded_linear_logprobs(
    hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"], labels: Int[ArrayLike, "*b"], *,
    mesh: Mesh | AbstractMesh | None = None, vocab_axis: Axes = "tensor", batch_axes: Axes = None,
    sequence_axis: Axes = None, where: Bool[ArrayLike, "*b"] | None = None, ignore_index: int | None = None,
    entropy: bool, **options: Unpack[OptionsWithoutEntropy],
) -> PerhapsWithoutEntropy: ...  # fmt: skip
@over_mesh(linear_logprobs)
def sharded_linear_logprobs(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None,
    **options: Unpack[LogprobOptions],
) -> LogprobOutput:
    """`linear_logprobs` over a mesh: one axis splits the vocabulary, and other axes split the tokens.

    Operands and results are global arrays. If hidden is ``[T, H]``, its first dimension is both batch and sequence.
    This function has ``mesh``, ``vocab_axis``, ``batch_axes`` and ``sequence_axis`` in place of ``axis_name``, and
    otherwise the arguments of `linear_logprobs`.

    Args:
        mesh: the mesh. None: the mesh of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must be a multiple of its size: pad the weight
            and give the true ``vocab_size``. None: each device holds the full vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: the Explicit axes in
            hidden's type, if any; otherwise the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If
            ``sequence_axis`` equals ``vocab_axis`` or ends with it, hidden states are all-gathered over ``vocab_axis``
            in the forward, and their gradient is reduce-scattered in the backward. That is Megatron's sequence
            parallelism; ``("context", "tensor")`` adds context parallelism. None: the sequence is not split.

    Returns:
        A `LogprobOutput`. Each field has the shape of ``labels`` (``candidate_logprobs`` has a further axis of size K)
        and is split like ``hidden``. Fields that were not requested are None.

    Raises:
        ValueError, TypeError: in the cases that `linear_logprobs` lists. Also if the mesh lacks a named axis, an axis
            is used twice, or the size of a split dimension is not a multiple of the number of shards.

    Memory:
        Per device, the memory of `linear_logprobs` for the device's tokens and columns. One all-gather sends at most
        five values per token, one more per candidate, and a summary by which the shards check that they have the same
        tokens.

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


@over_mesh(linear_cross_entropy)
def sharded_linear_cross_entropy(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
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
    """`linear_cross_entropy` over a mesh, whose axes are named as in `sharded_linear_logprobs`.

    "mean" and "sum" cover the tokens of all devices.

    Returns:
        The loss in nats: a scalar, or, with ``reduction="none"``, ``[...]`` split like ``hidden``.

    Memory:
        Per device, the memory of `linear_cross_entropy` for the device's tokens and columns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_cross_entropy
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> with jax.set_mesh(mesh):
        ...     loss = sharded_linear_cross_entropy(jnp.ones((4, 8)), jnp.zeros((1000, 8)), jnp.arange(4))
        >>> round(float(loss), 3)
        6.908
    """


@overload
def sharded_linear_loss(  # type: ignore[overload-overlap]  # bool has True in it
    loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"], *per_token: object, mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor", batch_axes: Axes = None, sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None, chunk_bytes: int | None = None, entropy: Literal[True] = True, **options: object,
) -> tuple[Float[Array, ""], LogprobOutput]: ...  # fmt: skip
@overload
def sharded_linear_loss(
    loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"], *per_token: object, mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor", batch_axes: Axes = None, sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None, chunk_bytes: int | None = None, entropy: bool, **options: object,
) -> tuple[Float[Array, ""], PerhapsWithoutEntropy]: ...  # fmt: skip
@over_mesh(linear_loss)
def sharded_linear_loss(
    loss_fn: Callable[..., Array],
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *per_token: object,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None,
    chunk_bytes: int | None = None,
    **options: object,
) -> tuple[Float[Array, ""], LogprobOutput]:
    """`linear_loss` over a mesh, whose axes are named as in `sharded_linear_logprobs`.

    Returns:
        The sum over the tokens that count, on all devices; and a `LogprobOutput` for metrics, through which no gradient
        flows. Its fields have the shape of ``labels`` and are split like ``hidden``.

    Memory:
        Per device, the memory of `linear_loss` for the device's tokens and columns. For each chunk, one all-gather
        merges the shards, as in `sharded_linear_logprobs`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_loss
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight, labels = jnp.ones((2, 4, 8)), jnp.zeros((1000, 8)), jnp.zeros((2, 4), jnp.int32)
        >>> total, out = sharded_linear_loss(
        ...     lambda logprob, entropy, lse: -logprob, hidden, weight, labels, mesh=mesh, batch_axes="data"
        ... )
        >>> round(float(total / 8), 3)                         # ln 1000
        6.908
    """


@over_mesh(linear_kl)
def sharded_linear_kl(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    teacher_hidden: Float[ArrayLike, "*b G"],
    teacher_weight: Float[ArrayLike, "V G"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    direction: Literal["forward", "reverse", "jsd", "tv"] = "forward",
    where: Bool[ArrayLike, "*b"] | None = None,
    **options: Unpack[KLOptions],
) -> Float[Array, "*b"]:
    """`linear_kl` over a mesh, whose axes are named as in `sharded_linear_logprobs` and split both models.

    Returns:
        ``[...]`` of at least 0, in nats ("tv": a probability), split like ``hidden``.

    Memory:
        Per device, the memory of `linear_kl` for the device's tokens and columns. One all-gather of six values per
        token merges the shards; "jsd" and "tv" need a second one, of two values per token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_kl
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.zeros((1000, 8))
        >>> kl = sharded_linear_kl(hidden, weight, hidden, weight + 1.0, mesh=mesh, batch_axes="data")
        >>> kl.shape, float(jnp.abs(kl).max()) < 1e-6          # a shift of all logits changes no distribution
        ((2, 4), True)
    """


@over_mesh(linear_logits)
def sharded_linear_logits(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    ids: Int[ArrayLike, "*b K"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "*b K"]:
    """`linear_logits` over a mesh, whose axes are named as in `sharded_linear_logprobs`.

    Returns:
        The logits ``[..., K]``, split like ``hidden``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_logits
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4)), jnp.arange(10.0)[:, None] * jnp.ones(4)
        >>> sharded_linear_logits(hidden, weight, jnp.array([[3, 0], [7, -1]]), mesh=mesh, batch_axes="data").tolist()
        [[12.0, 0.0], [28.0, 0.0]]
    """


@over_mesh(linear_topk)
def sharded_linear_topk(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    k: int,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = "tensor",
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    where: Bool[ArrayLike, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> TopK:
    """`linear_topk` over a mesh, whose axes are named as in `sharded_linear_logprobs`.

    Returns:
        A `TopK`, split like ``hidden``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import sharded_linear_topk
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> hidden, weight = jnp.ones((2, 4, 8)), jnp.arange(1000.0)[:, None] * jnp.ones(8)
        >>> sharded_linear_topk(hidden, weight, 2, mesh=mesh, batch_axes="data").ids[0, 0].tolist()
        [999, 998]
    """
