"""`explain`: what any of the public functions would do with a call, without computing anything."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Unpack

from lce_jax import _checks, _dispatch, api, scalars
from lce_jax._layout import Layout, as_axes, layout_of_names
from lce_jax._types import Surroundings, is_array

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._layout import Axes
    from lce_jax._types import Case, LogprobOptions, Plan


def explain(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    where: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = None,
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    ignore_index: int | None = None,
    reduction: api.Reduction | None = None,
    label_smoothing: float = 0.0,
    z_loss: Any = 0.0,
    normalizer: Any = None,
    **options: Unpack[LogprobOptions],
) -> Plan:
    """How a call would be served: which implementation, which tiles, why not the others, which bytes per device.

    Of `linear_logprobs`; with an argument that only a loss has, of `linear_cross_entropy`; with a mesh or an axis of
    it, of the sharded function, and then the plan is that of one device's tokens and columns. Nothing is computed and
    no axis need be bound: with ``axis_name``, the shapes are those of one shard.

    Args:
        hidden: an array, a tracer or a ``jax.ShapeDtypeStruct``, as are the others.
        weight: as `linear_logprobs`.
        labels: as `linear_logprobs`.
        where: as `linear_logprobs`.
        mesh: as `sharded_linear_logprobs`.
        vocab_axis: as `sharded_linear_logprobs`, but None unless given.
        batch_axes: as `sharded_linear_logprobs`.
        sequence_axis: as `sharded_linear_logprobs`.
        ignore_index: as `linear_cross_entropy`.
        reduction: as `linear_cross_entropy`. None: no loss, unless one of the others says so.
        label_smoothing: as `linear_cross_entropy`.
        z_loss: as `linear_cross_entropy`.
        normalizer: as `linear_cross_entropy`.
        **options: as `linear_logprobs`.

    Returns:
        A `Plan`; ``print`` it.

    Raises:
        As the functions, for what can be seen from shapes and options.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import explain
        >>> struct = jax.ShapeDtypeStruct
        >>> call = struct((4096, 512), jnp.float32), struct((65536, 512), jnp.float32), struct((4096,), jnp.int32)
        >>> print(str(explain(*call, implementation="xla")).splitlines()[5].strip())
        logits     1.0 GiB if they were stored
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
        >>> plan = explain(*call, implementation="xla", mesh=mesh, vocab_axis="tensor", batch_axes="data")
        >>> plan.case.num_tokens, plan.case.vocab_size
        (1024, 32768)
    """
    _checks.check_names(explain, options)
    smoothing, penalty, normalizer = _checks.loss(reduction or "mean", label_smoothing, z_loss, normalizer)
    given = (reduction, ignore_index, normalizer)
    if smoothing or is_array(penalty) or penalty or any(x is not None for x in given):
        options = _checks.loss_options(options)
    checked = _checks.options(options, mean_logit=smoothing > 0)
    case = _checks.case(hidden, weight, labels, where, checked)
    _checks.temperature(checked.temperature, labels.shape, where)
    if ignore_index is not None:
        scalars.integer("ignore_index", ignore_index)
        case = dataclasses.replace(case, partial_rows=True)
    if mesh is None and not (vocab_axis or batch_axes or sequence_axis):
        if checked.axis_name is None:
            around = Surroundings(true_columns=_checks.vocabulary(checked.vocab_size, case.vocab_size))
        else:
            around = Surroundings()
            _checks.vocabulary(checked.vocab_size, scalars.INT32_MAX)
        return _dispatch.explain(case, checked.implementation, around)
    _checks.no_axis_name(checked)
    _checks.vocabulary(checked.vocab_size, case.vocab_size)
    layout = layout_of_names(mesh, hidden, weight, case.options.vocab_dim, vocab_axis, batch_axes, sequence_axis)
    return _on_one_device(layout, case, checked.implementation)


def _on_one_device(layout: Layout, case: Case, implementation: tuple[str, ...] | None) -> Plan:
    """The plan of one device's tokens and columns, and of what the collectives around them hold."""
    vocab_shards, token_shards = (
        math.prod(layout.mesh.shape[axis] for axis in as_axes(axes)) for axes in (layout.vocab_axes, layout.token_axes)
    )
    num_tokens, columns = case.num_tokens // token_shards, case.vocab_size // vocab_shards
    case = dataclasses.replace(case, num_tokens=num_tokens, vocab_size=columns)
    around = Surroundings(gathers_hidden=layout.gather_dim is not None, sums_dweight=token_shards > 1)
    return _dispatch.explain(case, implementation, around)
