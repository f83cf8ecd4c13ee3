"""`lce_jax.linear_loss` on global arrays of a mesh: one device's program over a layout, its gradients fully summed.

So the cotangent is that of the whole sum, one number, and is multiplied outside ``shard_map``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import _loss_in_forward, _partition
from lce_jax._layout import Layout
from lce_jax._loss import Gradients, Inputs, TokenLoss
from lce_jax._shard import Spec
from lce_jax._token_chunks import Budget


def forward(spec: Spec, layout: Layout, loss: TokenLoss, inputs: Inputs) -> Any:
    """`_loss_in_forward.forward` of global arrays."""

    def device(local: Spec, inputs: Inputs) -> Any:
        total, outputs = _loss_in_forward.forward(local, loss.here(inputs), inputs)
        return total, jax.tree.map(layout.own_rows, outputs)

    return _over_devices(spec, layout, device, (P(), layout.out_spec), inputs)


def forward_and_gradients(spec: Spec, layout: Layout, loss: TokenLoss, budget: Budget, inputs: Inputs) -> Any:
    """`_loss_in_forward.forward_and_gradients` of global arrays, the gradients typed as their operands."""

    def device(local: Spec, inputs: Inputs) -> Any:
        run = _loss_in_forward.forward_and_gradients
        total, outputs, gradients = run(local, loss.here(inputs), budget, inputs)
        return total, jax.tree.map(layout.own_rows, outputs), gradients

    of_gradients = Gradients(layout.primal_specs, layout.row_spec, P())  # type: ignore[arg-type]
    total, outputs, gradients = _over_devices(spec, layout, device, (P(), layout.out_spec, of_gradients), inputs)
    given = Gradients(inputs.primals, inputs.per_token, inputs.constants)
    typed = jax.tree.map(
        lambda x, gradient: None if gradient is None else _partition.as_type_of(gradient, x),
        given, gradients, is_leaf=lambda x: x is None,
    )  # fmt: skip
    return total, outputs, typed


def _over_devices(spec: Spec, layout: Layout, device: Callable[..., Any], out_specs: Any, inputs: Inputs) -> Any:
    """``device(spec, inputs)`` of its own share on every device."""

    def run(primals: Any, per_token: Any, constants: Any) -> Any:
        rows, flat = per_token
        return device(_partition.device_spec(spec, layout, primals, rows), Inputs(primals, rows, flat, constants))

    constants = inputs.constants
    if AxisType.Explicit in layout.mesh.axis_types:
        whole = NamedSharding(layout.mesh, P())
        constants = jax.tree.map(functools.partial(jax.sharding.reshard, out_shardings=whole), constants)
    per_token = (inputs.rows, inputs.per_token)
    return layout.over_devices(run, out_specs, inputs.primals, per_token, constants, P())
