"""`explain`: what any of the public functions would do with a call, without computing anything."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Unpack

from lce_jax import _bind, _checks, _dispatch, _options, api, scalars
from lce_jax._layout import layout_of_names
from lce_jax._types import ALONE, Surroundings, is_array

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._layout import Axes
    from lce_jax._types import LogprobOptions, Plan


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
    _options.check_names(explain, options)
    smoothing, penalty, normalizer = _options.of_loss(reduction or "mean", label_smoothing, z_loss, normalizer)
    given = (reduction, ignore_index, normalizer)
    if smoothing or is_array(penalty) or penalty or any(x is not None for x in given):
        options = _options.loss_call(options)
    checked = _options.of_call(options, mean_logit=smoothing > 0)
    case = _bind.case(hidden, weight, labels, where, checked)
    _checks.temperature(checked.temperature, labels.shape, where)
    if ignore_index is not None:
        scalars.integer("ignore_index", ignore_index)
        case = dataclasses.replace(case, partial_rows=True)
    layout, around, columns = None, ALONE, case.vocab_size
    if mesh is not None or vocab_axis or batch_axes or sequence_axis:
        _options.no_axis_name(checked)
        axes = {"vocab_axis": vocab_axis, "batch_axes": batch_axes, "sequence_axis": sequence_axis}
        layout = layout_of_names(hidden, weight, case.options.vocab_dim, mesh=mesh, **axes)
        around = Surroundings(gathers_hidden=layout.gather_dim is not None, sums_dweight=layout.token_shards > 1)
    elif checked.axis_name is not None:
        columns = scalars.INT32_MAX  # of all shards together, whose number nobody knows here
    else:
        around = Surroundings(true_columns=_checks.vocabulary(checked.vocab_size, columns))
    spec = _bind.spec(case, checked, columns, layout)
    return _dispatch.explain(spec.case, spec.requested, around)
