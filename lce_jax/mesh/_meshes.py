"""Which mesh the types of a call's operands name, and which of its axes a call cannot see or must not be split over."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import _jax
from lce_jax._jax import as_axes
from lce_jax.mesh._custom_partitioning import warn_once


def mesh_of(operands: Any, function: str, keeps_tiles: bool = False) -> AbstractMesh | None:
    """The mesh over which the operands may be split; None for one device, and inside ``shard_map``.

    Where neither types nor `jax.set_mesh` name one, there may be one all the same: ``jit(..., in_shardings=...)`` tells
    only XLA. So a traced call gets the rule too on a machine with several devices, with an empty mesh. One that keeps
    tiles cannot have it, and is refused if it is lowered for several.
    """
    arrays = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    mesh = mesh_of_types(arrays)
    if AxisType.Manual in mesh.axis_types:
        check_other_axes(mesh, arrays, function)
        return None
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    if mesh.empty and traced:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return mesh if traced and not keeps_tiles and jax.device_count() > 1 else None
    return None if mesh.size == 1 or mesh.manual_axes else mesh


def check_other_axes(mesh: AbstractMesh, operands: Any, function: str) -> None:
    """Inside ``shard_map``: refuses operands split over other axes, and warns of Auto ones, whose split is unknown."""
    manual = ", ".join(repr(axis) for axis in mesh.manual_axes)
    advice = "make shard_map manual over these too (axis_names=...), and name the one that splits V as axis_name"
    split = {axis for x in jax.tree.leaves(operands) for axis in _axes_of(jax.typeof(x).sharding.spec)}
    if split:
        raise ValueError(f"inside shard_map over {manual}, operands are split over {sorted(split)} as well: {advice}")
    if auto := auto_axes(mesh):
        warn_once(
            f"{function} inside shard_map over {manual} cannot see how XLA splits its operands over "
            f"{', '.join(map(repr, auto))}, and may repeat all work there: {advice}"
        )


def auto_axes(mesh: AbstractMesh) -> list[str]:
    """The axes that split something, and whose split no type shows."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1]


def _axes_of(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in _jax.partitions(spec) for axis in as_axes(entry))


def mesh_of_types(operands: Any) -> AbstractMesh:
    """The mesh that the operands' types name; empty if they name none."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    return next((mesh for mesh in meshes if not mesh.empty), AbstractMesh((), ()))
