"""The same functions for callers outside ``shard_map``: global arrays in, global arrays out, over a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import _checks, api
from lce_jax._types import CallOptions, LogprobOutput, Results

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh
    from jaxtyping import Array, Bool, Float, Int

    from lce_jax._types import LogprobOptions

type Axes = str | tuple[str, ...] | None


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
        sequence_axis: the mesh axis that splits the sequence. Where it is ``vocab_axis`` (Megatron's sequence
            parallelism), hidden states are all-gathered forward and their gradient is reduce-scattered backward.
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
    run = functools.partial(
        evaluate, mesh=mesh, vocab_axis=vocab_axis, batch_axes=batch_axes, sequence_axis=sequence_axis
    )
    return run(hidden, weight, labels, where, _checks.options(options)).public


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
    z_loss: float = 0.0,
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
        **options: as `linear_logprobs`, without ``axis_name``.

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
    run = functools.partial(
        evaluate, mesh=mesh, vocab_axis=vocab_axis, batch_axes=batch_axes, sequence_axis=sequence_axis
    )
    return api.cross_entropy(
        run, hidden, weight, labels, where, ignore_index, reduction, label_smoothing, z_loss, options
    )


def evaluate(
    hidden: Array,
    weight: Array,
    labels: Array,
    where: Array | None,
    options: CallOptions,
    *,
    mesh: Any,
    vocab_axis: Axes,
    batch_axes: Axes,
    sequence_axis: Axes,
) -> Results:
    """`sharded_linear_logprobs` with its options validated."""
    if options.axis_name is not None:
        raise ValueError(
            f"axis_name={options.axis_name!r} is for callers inside shard_map; here the axis is vocab_axis"
        )
    case = _checks.case(hidden, weight, labels, where, options)
    layout = _layout(mesh, hidden, weight, options.static.vocab_dim, vocab_axis, batch_axes, sequence_axis)
    per_token = {"labels": _checks.int32_labels(labels)}
    if where is not None:
        per_token["where"] = where
    temperature = _checks.temperature(options.temperature, labels.shape)
    if temperature is not None:
        per_token["temperature"] = jnp.broadcast_to(jnp.asarray(temperature).astype(case.stat_dtype), labels.shape)
    options = dataclasses.replace(options, temperature=1.0, axis_name=layout.vocab_axes)
    return _mapped(layout, options, jnp.asarray(hidden), jnp.asarray(weight), per_token)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _mapped(layout: Layout, options: CallOptions, hidden: Array, weight: Array, per_token: dict[str, Array]) -> Results:
    """Jitted, so that calls outside ``jit`` compile once."""
    body = functools.partial(_body, layout, options)
    mapped = jax.shard_map(body, mesh=layout.mesh, in_specs=layout.in_specs, out_specs=layout.out_spec)
    return mapped(*layout.place((hidden, weight, per_token)))


def _body(layout: Layout, options: CallOptions, hidden: Array, weight: Array, per_token: dict[str, Array]) -> Results:
    """One device's share, inside ``shard_map``."""
    if "temperature" in per_token:
        options = dataclasses.replace(options, temperature=per_token["temperature"])
    dim = layout.gather_dim
    out = api.evaluate(hidden, weight, per_token["labels"], per_token.get("where"), options, dim)
    if dim is None:
        return out
    size = hidden.shape[dim]
    start = lax.axis_index(layout.vocab_axes) * size
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, dim), out)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each operand lies on the mesh."""

    mesh: Any
    vocab_axes: Any  # as `axis_name` wants them
    vocab_dim: int
    leading: tuple[Any, ...]  # the mesh axes of hidden's leading dimensions
    gather_dim: int | None  # the leading dimension that is split over the vocabulary's axis

    @property
    def out_spec(self) -> P:
        """Of the results: as hidden's leading dimensions."""
        return P(*self.leading)

    @property
    def in_specs(self) -> tuple[P, P, P]:
        """Of hidden, weight and everything per token, which is whole where hidden is gathered."""
        vocab = [None, None]
        vocab[self.vocab_dim] = self.vocab_axes
        rows = list(self.leading)
        if self.gather_dim is not None:
            rows[self.gather_dim] = _without(rows[self.gather_dim], self.vocab_axes)
        return P(*self.leading, None), P(*vocab), P(*rows)

    def place(self, operands: Any) -> Any:
        """The operands split over the Explicit axes as `in_specs` says: such axes insist on it, Auto axes do not."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        implicit = tuple(name for name, kind in types if kind != AxisType.Explicit)
        if len(implicit) == len(self.mesh.axis_names):
            return operands
        placed = []
        for tree, spec in zip(operands, self.in_specs, strict=True):
            sharding = NamedSharding(self.mesh, P(*(_without(entry, implicit) for entry in spec)))
            placed.append(jax.tree.map(functools.partial(jax.sharding.reshard, out_shardings=sharding), tree))
        return tuple(placed)


def _layout(
    mesh: Any, hidden: Any, weight: Any, vocab_dim: int, vocab_axis: Axes, batch_axes: Axes, sequence_axis: Axes
) -> Layout:
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("no mesh: pass mesh=, or call under jax.set_mesh(mesh)")
    if batch_axes is None:
        batch_axes = _own_batch_axes(mesh, hidden, vocab_axis, sequence_axis)
    vocab, batch, sequence = (as_axes(axes) for axes in (vocab_axis, batch_axes, sequence_axis))
    _check_axes(mesh, vocab, batch, sequence)
    leading: list[tuple[str, ...]] = [()] * (hidden.ndim - 1)
    if (batch or sequence) and not leading:
        raise ValueError(f"hidden {tuple(hidden.shape)} has no batch to split over {batch + sequence}")
    if leading:
        leading[0] += batch
        leading[-1] += sequence
    for dim, axes in enumerate(leading):
        _check_divides("hidden", hidden.shape, dim, axes, mesh)
    vocab_hint = f": pad weight with rows to a multiple and pass vocab_size={weight.shape[vocab_dim]}"
    _check_divides("weight", weight.shape, vocab_dim, vocab, mesh, vocab_hint)
    gather_dim = hidden.ndim - 2 if sequence and sequence == vocab else None
    return Layout(mesh, _spec_entry(vocab), vocab_dim, tuple(_spec_entry(axes) for axes in leading), gather_dim)


def _own_batch_axes(mesh: Any, hidden: Any, vocab_axis: Axes, sequence_axis: Axes) -> Axes:
    """Under Explicit axes, those of the first dimension of hidden's own type; else none."""
    if AxisType.Explicit not in mesh.axis_types or hidden.ndim < 2:
        return None
    spec = jax.typeof(hidden).sharding.spec
    own = as_axes(spec[0]) if len(spec) else ()
    return tuple(axis for axis in own if axis not in as_axes(vocab_axis) + as_axes(sequence_axis))


def _check_axes(mesh: Any, vocab: tuple[str, ...], batch: tuple[str, ...], sequence: tuple[str, ...]) -> None:
    for name, axes in (("vocab_axis", vocab), ("batch_axes", batch), ("sequence_axis", sequence)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"{name} {axis!r} is no axis of the mesh {dict(mesh.shape)}")
    used = (*vocab, *batch, *(() if sequence == vocab else sequence))
    if len(set(used)) < len(used):
        raise ValueError(
            f"vocab_axis {vocab}, batch_axes {batch} and sequence_axis {sequence} overlap; only sequence_axis may be "
            "vocab_axis, the same axes in the same order"
        )


def _check_divides(name: str, shape: Any, dim: int, axes: tuple[str, ...], mesh: Any, hint: str = "") -> None:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shape[dim] % shards:
        raise ValueError(f"dimension {dim} of {name} {tuple(shape)} must divide by the {shards} shards of {axes}{hint}")


def as_axes(axes: Axes) -> tuple[str, ...]:
    """The names in ``axes``: none, one or several."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _spec_entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _without(entry: Any, axes: Any) -> Any:
    return _spec_entry(tuple(axis for axis in as_axes(entry) if axis not in as_axes(axes)))
