"""The programs of a call, compiled for devices that need not be there: what XLA holds of them. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import lce_jax
from lce_jax import _devices
from lce_jax._plans import PassBytes, Plan
from lce_jax._types import is_array
from lce_jax.call._place import Place


def of_token(logprob: Any, entropy: Any, _: Any) -> Any:
    """The loss of a `lce_jax.linear_loss` that is compiled: any that needs both."""
    return -logprob if entropy is None else -logprob - 0.01 * entropy


def measured(plan: Plan, name: str, hidden: Any, weight: Any, given: dict[str, Any], place: Place) -> PassBytes:
    """What the programs of the public function ``name`` hold, which takes hidden, weight and what is ``given``."""
    arrays = {key: _struct(x) for key, x in given.items() if is_array(x) and not isinstance(x, np.generic)}
    hidden, weight, options = _struct(hidden), _struct(weight), {key: given[key] for key in given.keys() - arrays}
    _check_devices(plan, (hidden, weight, *arrays.values()), place, options.get("axis_name"))
    axes = place._asdict() if place.is_named else {}
    function, first = getattr(lce_jax, f"sharded_{name}" if axes else name), [of_token] * (name == "linear_loss")

    def call(hidden: Any, weight: Any, arrays: dict[str, Any]) -> Any:
        return function(*first, hidden, weight, **arrays, **options, **axes)

    forward, both = (
        compiled(call, (hidden, weight, arrays), gradients).memory_analysis().temp_size_in_bytes
        for gradients in (False, name != "linear_topk")
    )
    return PassBytes(forward, both)


def compiled(call: Callable[..., Any], operands: tuple[Any, ...], gradients: bool) -> Any:
    """The program of ``call``, for the devices on which its operands lie; with gradients in the first two."""

    def total(*operands: Any) -> Any:
        return sum(jnp.sum(x) for x in jax.tree.leaves(call(*operands)))

    if not gradients:
        return jax.jit(call).lower(*operands).compile()
    results = None, tuple(x.sharding for x in operands[:2])
    return jax.jit(jax.value_and_grad(total, (0, 1)), out_shardings=results).lower(*operands).compile()


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _check_devices(plan: Plan, operands: Iterable[jax.ShapeDtypeStruct], place: Place, axis_name: Any) -> None:
    """Whether a program compiled now is for the devices of the plan."""
    if axis_name is not None:
        raise ValueError(
            f"compile=True with axis_name={axis_name!r}: one shard alone is no program. Give the whole arrays, mesh= "
            f"and vocab_axis={axis_name!r} in place of axis_name"
        )
    shardings = [x.sharding for x in operands if x.sharding is not None]
    meshes = [
        place.mesh,
        jax.sharding.get_mesh(),
        jax.sharding.get_abstract_mesh(),
        *(getattr(x, "mesh", None) for x in shardings),
    ]
    named = [mesh for mesh in meshes if mesh is not None and not mesh.empty]
    if any(isinstance(mesh, Mesh) for mesh in named) or len(shardings) > sum(hasattr(x, "mesh") for x in shardings):
        return
    device = plan.case.device
    with _devices.for_device(None):
        is_here = device == _devices.current_device()
    if named or not is_here:
        raise ValueError(
            f"compile=True: nothing says which devices of {device.kind or device.platform} to compile for. Give "
            "operands on a jax.sharding.Mesh of them; of devices that are not here, "
            "jax.experimental.topologies.get_topology_desc has descriptions, and lce-jax explain --compile uses them"
        )
