"""The device that a call is compiled for: what its mesh or its operands' shardings name, else this machine's own.

A device need not be there. `jax.experimental.topologies` describes those of a pod, and whoever compiles ahead of time
lowers a program for them on a machine that has none. A mesh says which they are, or an operand's sharding. Where
tracing cannot see it (``jit(in_shardings=...)``, ``SingleDeviceSharding``), a program lowered for others is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from lce_jax import _jax
from lce_jax._types import Device

_described: contextvars.ContextVar[Device | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def for_device(device: Device | None) -> Iterator[None]:
    """Within it, calls are traced for ``device``, which JAX itself need not know; None: for what JAX knows."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def current_device(*operands: Any, mesh: Any = None) -> Device:
    """The device that a call made now is compiled for.

    The first that is known: that of ``mesh``; that of the meshes and devices in the operands' types and shardings;
    that of the current mesh; that of operands that are there; JAX's default.
    """
    device = _described.get() or of_mesh(mesh)
    named = (_of_sharding(x) for x in operands)
    device = device or next(filter(None, named), None) or of_mesh(jax.sharding.get_abstract_mesh())
    if device is not None:
        return device
    for x in operands:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return of(min(x.devices(), key=lambda one: one.id))
    default = jax.config.jax_default_device or jax.devices()[0]
    return of(jax.devices(default)[0] if isinstance(default, str) else default)


def of(device: jax.Device) -> Device:
    """What of a device of JAX's decides. Those of `jax.experimental.topologies` know it too."""
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=str(getattr(device, "compute_capability", "")),
        core_count=int(getattr(device, "core_count", 0)),
    )


def _of_sharding(x: Any) -> Device | None:
    """The device that a tracer's type, or the sharding of a ``jax.ShapeDtypeStruct``, names."""
    if isinstance(x, jax.Array):
        return of_mesh(jax.typeof(x).sharding.mesh) if isinstance(x, jax.core.Tracer) else None
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    mesh = getattr(sharding, "mesh", None)
    return of(next(iter(sharding.device_set))) if mesh is None else of_mesh(mesh)


def of_mesh(mesh: Mesh | AbstractMesh | None) -> Device | None:
    """The device that a mesh names, if it names one. All devices of a mesh are of one kind."""
    if mesh is None or mesh.empty:
        return None
    if isinstance(mesh, Mesh):
        return of(mesh.devices.flat[0])
    described = mesh.abstract_device
    if described is None:
        return None
    platform = _jax.platform_of(described)
    here = [device for device in _devices(platform) if device.device_kind == described.device_kind]
    return of(here[0]) if here else Device(platform, described.device_kind, "", described.num_cores or 0)


def _devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # no such backend here
        return []
