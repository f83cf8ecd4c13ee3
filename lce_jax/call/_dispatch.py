"""The device that a call is compiled for, and the implementation that serves the call there.

The device is the one that the call's mesh or its operands' shardings name; otherwise it is a device of this machine.
Implementations are tried in order of preference. An implementation that cannot serve a call says why.

The machine need not have the device. `jax.experimental.topologies` describes the devices of a pod, and a program can be
lowered for them ahead of time on a machine without them. A mesh or an operand's sharding names these devices. If
tracing cannot see the device (``jit(in_shardings=...)``, ``SingleDeviceSharding``), it assumes JAX's default device.
Lowering for another device is then refused.
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
    """A context that traces calls for ``device``, which JAX need not know. None: as outside of such a context."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def current_device(*operands: Any, mesh: Any = None) -> Device:
    """Returns the device that a call made now is compiled for.

    These are asked in turn, until one names a device: `trace_for_device`, ``mesh``, the meshes and shardings of the
    operands, the current mesh, concrete operands, JAX's default device.
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
    """Converts a JAX device, such as one that `jax.experimental.topologies` describes, to a `Device`."""
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=str(getattr(device, "compute_capability", "")),
        core_count=int(getattr(device, "core_count", 0)),
    )


def _find_named_device(x: Any) -> Device | None:
    """Returns the device that a tracer's type or a ``jax.ShapeDtypeStruct``'s sharding names; None if neither does."""
    if isinstance(x, jax.Array):
        return find_mesh_device(jax.typeof(x).sharding.mesh) if isinstance(x, jax.core.Tracer) else None
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    mesh = getattr(sharding, "mesh", None)
    return describe_device(next(iter(sharding.device_set))) if mesh is None else find_mesh_device(mesh)


def find_mesh_device(mesh: Mesh | AbstractMesh | None) -> Device | None:
    """Returns the device that a mesh names; None if it names none. All devices of a mesh are of one kind."""
    if mesh is None or mesh.empty:
        return None
    if isinstance(mesh, Mesh):
        return describe_device(mesh.devices.flat[0])
    abstract = mesh.abstract_device
    if abstract is None:
        return None
    platform = _jax.find_platform(abstract)
    local = [device for device in _list_devices(platform) if device.device_kind == abstract.device_kind]
    return describe_device(local[0]) if local else Device(platform, abstract.device_kind, "", abstract.num_cores or 0)


def _list_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # this machine has no such backend
        return []


class Implementation(Protocol):
    """The functions that a module must define to be an implementation.

    `lce_jax.mosaic` has further functions, for statistics in parts, for per-token arithmetic, and for tiles that a
    threshold leaves out. No other implementation needs them.
    """

    NAME: str

    def supports(self, call: Call) -> str | None:
        """Returns why the implementation cannot serve ``call``, in words for the user; None if it can."""

    def plan(self, call: Call) -> Plan:
        """Returns the tiles and bytes of ``call``, without running anything."""

    def statistics(self, operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, Any]:
        """Computes the shard's eq. 1, and a cache for the backward: None, or arrays of at most ``cache_bytes``.

        With a ``gradient_threshold`` the cache may also hold what `lce_jax.mosaic.select_tiles` needs.
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
        """Computes eq. 5: dhidden [T, H] and dbias [V] in the statistics' dtype, dweight in the weight's dtype.

        ``may_round_dhidden``: dhidden may have the weight's dtype, because no sum over devices follows.
        ``may_overwrite_cache``: no other backward reads the cache.
        ``dweight``: a sum in the statistics' dtype, to which dweight is added without rounding it first.
        ``adds_dweight``: a number that may be traced. If it is 0 and the implementation `writes_dweight`, the sum is
        overwritten, so it may hold anything.
        """


IMPLEMENTATIONS: dict[str, Implementation] = {module.NAME: module for module in (mosaic, xla)}  # best first

_logger = logging.getLogger("lce_jax")


def writes_dweight(call: Call) -> bool:
    """Whether the first contribution to a sum of dweight overwrites the sum, which then need not be initialised."""
    return call.implementation == mosaic.NAME and not call.gradient_threshold


def choose(call: Call) -> tuple[Implementation, dict[str, str]]:
    """Returns the first requested implementation that can serve ``call``, and why the implementations before it cannot.

    The choice is logged once. The log entry is a warning if the device has kernels that cannot serve the call, because
    the call is then several times slower.

    Raises:
        UnsupportedError: no requested implementation can serve the call.
    """
    refused: dict[str, str] = {}
    for name in IMPLEMENTATIONS if call.requested is None else call.requested:
        reason = IMPLEMENTATIONS[name].supports(call)
        if reason is None and name == mosaic.NAME and _described.get() is None:
            reason = _first_call.refuse_kernels(call)
        if reason is None:
            if call.requested is None:
                task = "linear log-probabilities" if call.teacher is None else "divergences of two heads"
                on_gpu = name == xla.NAME and call.device.platform == "gpu"
                lacks = on_gpu and mosaic.serves(call.device) and mosaic.refuse_function(call) is None
                level = logging.WARNING if lacks else logging.INFO
                _log_choice(level, task, call.device.platform, name, tuple(refused.items()))
            return IMPLEMENTATIONS[name], refused
        refused[name] = reason
    raise UnsupportedError("; ".join(f'implementation "{name}": {reason}' for name, reason in refused.items()))


def explain(call: Call) -> Plan:
    """Returns the plan of the implementation that `choose` picks, and why the implementations before it are refused."""
    chosen, refused = choose(call)
    plan = chosen.plan(call)
    notes = _first_call.notes(call.device) if chosen is mosaic else ()
    return dataclasses.replace(plan, refused=refused, notes=(*plan.notes, *notes))


def use_mesh_device(call: Call, mesh: Any) -> Call:
    """Returns ``call`` for the devices that ``mesh`` names; unchanged if the mesh names none."""
    return call if find_mesh_device(mesh) is None else call.replace(device=current_device(mesh=mesh))


@functools.cache
def _log_choice(level: int, task: str, platform: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"; not {other}: {reason}" for other, reason in refused)
    _logger.log(level, "%s on %s: %s%s", task, platform, name, reasons)
