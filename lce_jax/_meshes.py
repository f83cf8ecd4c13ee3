"""Which mesh the types of a call's operands name, and which of its axes a call cannot see or must not be split over."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import _compat
from lce_jax._compat import as_axes
from lce_jax._xla_partitioning import warn_once


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
    return tuple(axis for entry in _compat.partitions(spec) for axis in as_axes(entry))


def mesh_of_types(operands: Any) -> AbstractMesh:
    """The mesh that the operands' types name; empty if they name none."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    return next((mesh for mesh in meshes if not mesh.empty), AbstractMesh((), ()))
