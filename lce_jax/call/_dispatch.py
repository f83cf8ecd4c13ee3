"""The device that a call is compiled for, and the implementation that serves it there.

The device is what the call's mesh or its operands' shardings name, else this machine's own. Implementations are a list
in order of preference, each with its reason to decline.

A device need not be there. `jax.experimental.topologies` describes those of a pod, and whoever compiles ahead of time
lowers a program for them on a machine that has none. A mesh says which they are, or an operand's sharding. Where
tracing cannot see it (``jit(in_shardings=...)``, ``SingleDeviceSharding``), a program lowered for others is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

from lce_jax import mosaic
from lce_jax.call import _first_call
from lce_jax.types import _jax
from lce_jax.types._types import (
    Call,
    Device,
    Operands,
    Plan,
    Primals,
    RowCoefficients,
    ShardStatistics,
    UnsupportedError,
)
from lce_jax.xla import _logprobs as xla

_described: contextvars.ContextVar[Device | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def trace_for_device(device: Device | None) -> Iterator[None]:
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
    device = _described.get() or find_mesh_device(mesh)
    named = (_find_named_device(x) for x in operands)
    device = device or next(filter(None, named), None) or find_mesh_device(jax.sharding.get_abstract_mesh())
    if device is not None:
        return device
    for x in operands:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return describe_device(min(x.devices(), key=lambda one: one.id))
    default = jax.config.jax_default_device or jax.devices()[0]
    return describe_device(jax.devices(default)[0] if isinstance(default, str) else default)


def describe_device(device: jax.Device) -> Device:
    """What of a device of JAX's decides. Those of `jax.experimental.topologies` know it too."""
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=str(getattr(device, "compute_capability", "")),
        core_count=int(getattr(device, "core_count", 0)),
    )


def _find_named_device(x: Any) -> Device | None:
    """The device that a tracer's type, or the sharding of a ``jax.ShapeDtypeStruct``, names."""
    if isinstance(x, jax.Array):
        return find_mesh_device(jax.typeof(x).sharding.mesh) if isinstance(x, jax.core.Tracer) else None
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    mesh = getattr(sharding, "mesh", None)
    return describe_device(next(iter(sharding.device_set))) if mesh is None else find_mesh_device(mesh)


def find_mesh_device(mesh: Mesh | AbstractMesh | None) -> Device | None:
    """The device that a mesh names, if it names one. All devices of a mesh are of one kind."""
    if mesh is None or mesh.empty:
        return None
    if isinstance(mesh, Mesh):
        return describe_device(mesh.devices.flat[0])
    described = mesh.abstract_device
    if described is None:
        return None
    platform = _jax.find_platform(described)
    here = [device for device in _list_devices(platform) if device.device_kind == described.device_kind]
    return describe_device(here[0]) if here else Device(platform, described.device_kind, "", described.num_cores or 0)


def _list_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # no such backend here
        return []


class Implementation(Protocol):
    """What a module must define to be one: what it supports, its plan, the statistics and the gradients.

    `lce_jax.mosaic` has steps of its own besides, which no other needs: statistics in parts, per-token arithmetic, and
    tiles that are left out.
    """

    NAME: str

    def supports(self, call: Call) -> str | None:
        """Why it cannot serve ``call``, in words for the user; None if it can."""

    def plan(self, call: Call) -> Plan:
        """Its tiles and its bytes for ``call``, without running anything."""

    def statistics(self, operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, Any]:
        """Eq. 1 of the shard, and the cache for the backward (None, or arrays of at most ``cache_bytes``).

        With a ``gradient_threshold`` the cache may also hold what `lce_jax.mosaic.selected` needs.
        """

    def gradients(
        self,
        operands: Operands,
        call: Call,
        rows: RowCoefficients,
        cache: Any = None,
        *,
        may_round_dhidden: bool = False,
        may_overwrite_cache: bool = True,
        dweight: Any = None,
        adds_dweight: Any = True,
    ) -> Primals:
        """Eq. 5: dhidden [T, H] and dbias [V] in the statistics' dtype, dweight in the weight's.

        ``may_round_dhidden``: no sum over devices follows, so dhidden may come in the weight's dtype.
        ``may_overwrite_cache``: no other backward reads the cache.
        ``dweight``: a sum in the statistics' dtype, to which dweight is added without being rounded.
        ``adds_dweight``: a number that may be traced; where it is 0 and `writes_dweight`, the sum may hold anything.
        """


IMPLEMENTATIONS: dict[str, Implementation] = {module.NAME: module for module in (mosaic, xla)}  # best first

_logger = logging.getLogger("lce_jax")


def writes_dweight(call: Call) -> bool:
    """Whether the first part of a sum of dweight is written: all of it, and nothing need be there."""
    return call.implementation == mosaic.NAME and not call.gradient_threshold


def choose(call: Call) -> tuple[Implementation, dict[str, str]]:
    """The first implementation requested that serves ``call``, and the reasons of those before it. The log tells, once.

    It warns where the device has kernels that cannot serve the call, which is several times slower then.

    Raises:
        UnsupportedError: none of them can.
    """
    refused: dict[str, str] = {}
    for name in IMPLEMENTATIONS if call.requested is None else call.requested:
        reason = IMPLEMENTATIONS[name].supports(call)
        if reason is None and name == mosaic.NAME and _described.get() is None:
            reason = _first_call.refuse_kernels(call)
        if reason is None:
            if call.requested is None:
                what = "linear log-probabilities" if call.teacher is None else "divergences of two heads"
                on_gpu = name == xla.NAME and call.device.platform == "gpu"
                lacks = on_gpu and mosaic.serves(call.device) and mosaic.without_kernels(call) is None
                level = logging.WARNING if lacks else logging.INFO
                _log_choice(level, what, call.device.platform, name, tuple(refused.items()))
            return IMPLEMENTATIONS[name], refused
        refused[name] = reason
    raise UnsupportedError("; ".join(f'implementation "{name}": {reason}' for name, reason in refused.items()))


def explain(call: Call) -> Plan:
    """The plan of the implementation that `choose` picks, with the reasons of those before it."""
    chosen, refused = choose(call)
    plan = chosen.plan(call)
    notes = _first_call.notes(call.device) if chosen is mosaic else ()
    return dataclasses.replace(plan, refused=refused, notes=(*plan.notes, *notes))


def use_mesh_device(call: Call, mesh: Any) -> Call:
    """``call`` on the devices of ``mesh``, if it names them."""
    return call if find_mesh_device(mesh) is None else call.replace(device=current_device(mesh=mesh))


@functools.cache
def _log_choice(level: int, what: str, platform: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"; not {other}: {reason}" for other, reason in refused)
    _logger.log(level, "%s on %s: %s%s", what, platform, name, reasons)
