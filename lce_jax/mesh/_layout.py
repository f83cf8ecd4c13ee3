"""Layouts: how a mesh splits the operands of a call. They come from axis names, or from the operands' shardings.

This module also finds the mesh in the operands' types, and refuses axes that must not split a call, or warns of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax.mesh._custom_partitioning import warn_once
from lce_jax.types import _jax
from lce_jax.types._jax import list_axes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array


type Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a mesh splits each operand of a call."""

    mesh: Any
    vocab_axes: Any  # None, one name or a tuple of names, as for ``axis_name``
    leading: tuple[Any, ...]  # the mesh axes of each leading dimension of hidden
    gather_dim: int | None  # the leading dimension that the vocabulary's axes split as well

    @property
    def out_spec(self) -> P:
        """The spec of per-token results: sharded like hidden's leading dimensions."""
        return P(*self.leading)

    @property
    def row_spec(self) -> P:
        """The spec of per-token operands: sharded like hidden, but replicated over the vocabulary's axes."""
        entries = list(self.leading)
        if self.gather_dim is not None:
            entries[self.gather_dim] = _remove_axes(entries[self.gather_dim], self.vocab_axes)
        return P(*entries)

    @property
    def token_shards(self) -> int:
        """The number of parts into which tokens are split while logits are computed."""
        return self._count_devices(self.token_axes)

    @property
    def vocab_shards(self) -> int:
        """The number of parts into which the vocabulary is split."""
        return self._count_devices(list_axes(self.vocab_axes))

    def _count_devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens while the logits are computed."""
        split = [axis for entry in self.leading for axis in list_axes(entry)]
        return tuple(axis for axis in split if axis not in list_axes(self.vocab_axes))

    @property
    def every_device(self) -> P:
        """The spec of the devices' caches, which are stacked along the first dimension."""
        return P((*self.token_axes, *list_axes(self.vocab_axes)))

    def add_batch(self, hidden_spec: P) -> Layout:
        """Returns the layout of a batch of such calls.

        The batch is the first dimension of hidden, and of ``hidden_spec``.
        """
        used = (*self.token_axes, *list_axes(self.vocab_axes))
        batch = tuple(axis for axis in _axes_at(hidden_spec, 0) if axis not in used)
        gather_dim = None if self.gather_dim is None else self.gather_dim + 1
        return dataclasses.replace(self, leading=(_spec_entry(batch), *self.leading), gather_dim=gather_dim)

    def take_local_rows(self, rows: Array) -> Array:
        """Returns this device's rows of a per-token result of the gathered sequence."""
        if self.gather_dim is None:
            return rows
        size = rows.shape[self.gather_dim] // lax.axis_size(self.vocab_axes)
        start = lax.axis_index(self.vocab_axes) * size
        return lax.dynamic_slice_in_dim(rows, start, size, self.gather_dim)

    def gather_rows(self, rows: list[Array]) -> list[Array]:
        """Inverts `take_local_rows`. One collective gathers all arrays of the same shape and dtype."""
        if self.gather_dim is None:
            return rows
        types = [(x.shape, x.dtype) for x in rows]
        gathered: dict[int, Array] = {}
        for one in dict.fromkeys(types):
            indices = [i for i, other in enumerate(types) if other == one]
            arrays = lax.all_gather(
                jnp.stack([rows[i] for i in indices]), self.vocab_axes, axis=self.gather_dim + 1, tiled=True
            )
            gathered |= dict(zip(indices, arrays, strict=True))
        return [gathered[i] for i in range(len(rows))]

    def reshard(self, x: Array, spec: P) -> Array:
        """Reshards ``x`` to ``spec`` over Explicit axes. Auto axes need no reshard."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        implicit = tuple(name for name, axis_type in types if axis_type != AxisType.Explicit)
        if len(implicit) == len(self.mesh.axis_names):
            return x
        entries = P(*(_remove_axes(entry, implicit) for entry in _jax.partitions(spec)))
        return jax.sharding.reshard(x, NamedSharding(self.mesh, entries))


def layout_of_names(
    hidden: Any, weight: Any, vocab_dim: int, *, mesh: Any, vocab_axis: Axes, batch_axes: Axes, sequence_axis: Axes
) -> Layout:
    """Returns the layout for the axes that the caller names, after checks against the mesh and the shapes."""
    current = jax.sharding.get_abstract_mesh()
    mesh = current if mesh is None or current.manual_axes else mesh  # inside shard_map, ``current`` has Manual axes
    if mesh.empty:
        raise ValueError("no mesh: pass mesh=, or call under jax.set_mesh(mesh)")
    if batch_axes is None:
        batch_axes = _explicit_batch_axes(mesh, hidden, vocab_axis, sequence_axis)
    vocab, batch, sequence = (list_axes(axes) for axes in (vocab_axis, batch_axes, sequence_axis))
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
    gather_dim = hidden.ndim - 2 if _ends_with(sequence, vocab) else None
    return Layout(mesh, _spec_entry(vocab), tuple(_spec_entry(axes) for axes in leading), gather_dim)


def layout_of_specs(
    mesh: Any, hidden: Any, weight: Any, hidden_spec: P, weight_spec: P, per_token: Sequence[P], vocab_dim: int
) -> Layout:
    """Returns the layout that follows from the operands' shardings.

    ``hidden`` and ``weight`` may be ``jax.ShapeDtypeStruct``.

    Tokens are split like hidden, and the vocabulary like the weight. A token dimension that is not split in hidden is
    split like the other per-token operands. A split H is gathered. An axis cannot split both tokens and vocabulary.
    Over such an axis, either hidden or the weight is gathered: the operand that then takes less memory per device.
    """
    leading = [_dividing_axes(mesh, n, _axes_at(hidden_spec, dim)) for dim, n in enumerate(hidden.shape[:-1])]
    vocab = _dividing_axes(mesh, weight.shape[vocab_dim], _axes_at(weight_spec, vocab_dim))
    for spec in per_token:
        for dim, n in enumerate(hidden.shape[:-1]):
            used = (*vocab, *(axis for axes in leading for axis in axes))
            unused = tuple(axis for axis in _axes_at(spec, dim) if axis not in used)
            leading[dim] = leading[dim] or _dividing_axes(mesh, n, unused)
    gather_dim = None
    if any(axis in vocab for axes in leading for axis in axes):
        tokens = [axis for axes in leading for axis in axes]
        if _gathered_bytes(mesh, hidden, tokens, vocab) > _gathered_bytes(mesh, weight, vocab, tokens):
            vocab = tuple(axis for axis in vocab if not any(axis in axes for axes in leading))
        else:
            dims = [dim for dim, axes in enumerate(leading) if _ends_with(axes, vocab)]
            gather_dim = dims[0] if dims else None
            leading = [
                axes if dim == gather_dim else tuple(axis for axis in axes if axis not in vocab)
                for dim, axes in enumerate(leading)
            ]
    return Layout(mesh, _spec_entry(vocab), tuple(_spec_entry(axes) for axes in leading), gather_dim)


def layout_of_arrays(hidden: Any, weight: Any, per_token: Sequence[Any], vocab_dim: int) -> Layout | None:
    """Returns the layout of arrays or array shapes that are sharded over a mesh of several devices.

    Returns None if no array is on such a mesh, and inside ``shard_map``, where each device has its own arrays.
    """
    shardings = [_sharding(x) for x in (hidden, weight, *per_token)]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None and sharding.mesh.size > 1]
    if not meshes or AxisType.Manual in meshes[0].axis_types:
        return None
    hidden_spec, weight_spec, *row_specs = (P() if sharding is None else sharding.spec for sharding in shardings)
    return layout_of_specs(meshes[0], hidden, weight, hidden_spec, weight_spec, row_specs, vocab_dim)


def _sharding(x: Any) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _axes_at(spec: P, dim: int) -> tuple[str, ...]:
    """Returns the mesh axes that split dimension ``dim``."""
    entries = _jax.partitions(spec)
    return list_axes(entries[dim]) if dim < len(entries) else ()


def _dividing_axes(mesh: Any, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``axes``, or () if they do not split ``size`` evenly: XLA can split unevenly, but the kernels cannot."""
    return axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def _gathered_bytes(mesh: Any, x: Any, split: Sequence[str], over: Sequence[str]) -> int:
    """Returns the bytes per device of ``x``, split over the axes ``split``, after a gather over the axes ``over``."""
    shards = math.prod(mesh.shape[axis] for axis in split if axis not in over)
    return math.prod(x.shape) * x.dtype.itemsize // shards


def _explicit_batch_axes(mesh: Any, hidden: Any, vocab_axis: Axes, sequence_axis: Axes) -> Axes:
    """Returns the axes that split hidden's first dimension according to its type, if the mesh has Explicit axes."""
    if AxisType.Explicit not in mesh.axis_types or hidden.ndim < 2:
        return None
    spec = jax.typeof(hidden).sharding.spec
    return tuple(axis for axis in _axes_at(spec, 0) if axis not in list_axes(vocab_axis) + list_axes(sequence_axis))


def _check_axes(mesh: Any, vocab: tuple[str, ...], batch: tuple[str, ...], sequence: tuple[str, ...]) -> None:
    for name, axes in (("vocab_axis", vocab), ("batch_axes", batch), ("sequence_axis", sequence)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"{name} {axis!r} is not an axis of the mesh {dict(mesh.shape)}")
            if mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Manual:
                raise ValueError(
                    f"{name} {axis!r}: this is inside shard_map over {axis!r}, where each device has its own operands. "
                    f"Leave {axis!r} out; if it splits the vocabulary, call the function without sharded_ in its name, "
                    f"with axis_name={axis!r}"
                )
    shared = len(vocab) if _ends_with(sequence, vocab) else 0
    used = (*vocab, *batch, *sequence[: len(sequence) - shared])
    if len(set(used)) < len(used):
        raise ValueError(
            f"vocab_axis {vocab}, batch_axes {batch} and sequence_axis {sequence} overlap: only sequence_axis may "
            "contain vocab_axis, as its last axes and in the same order"
        )


def _ends_with(axes: tuple[str, ...], last: tuple[str, ...]) -> bool:
    return bool(last) and axes[-len(last) :] == last


def _check_divides(name: str, shape: Any, dim: int, axes: tuple[str, ...], mesh: Any, hint: str = "") -> None:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shape[dim] % shards:
        raise ValueError(f"dimension {dim} of {name} {tuple(shape)} must divide by the {shards} shards of {axes}{hint}")


def _spec_entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _remove_axes(entry: Any, axes: Any) -> Any:
    return _spec_entry(tuple(axis for axis in list_axes(entry) if axis not in list_axes(axes)))


def find_mesh(operands: Any, function: str, asks_for_tiles: bool = False) -> AbstractMesh | None:
    """Returns the mesh over which the operands may be split, or None on one device and inside ``shard_map``.

    Operands may be split even if neither types nor `jax.set_mesh` name a mesh, because only XLA sees
    ``jit(..., in_shardings=...)``. So on a machine with several devices, a traced call gets an empty mesh, and
    therefore the partitioning rule. A call that asks for tiles (a cache or a threshold) cannot have the rule, and is
    refused if it is lowered for several devices.
    """
    arrays = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    mesh = find_typed_mesh(arrays)
    if AxisType.Manual in mesh.axis_types:
        check_other_axes(mesh, arrays, function)
        return None
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    if mesh.empty and traced:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return mesh if traced and not asks_for_tiles and jax.device_count() > 1 else None
    return None if mesh.size == 1 or mesh.manual_axes else mesh


def check_other_axes(mesh: AbstractMesh, operands: Any, function: str) -> None:
    """Refuses operands inside ``shard_map`` that other axes split too. Warns of Auto axes, which types do not show."""
    manual = ", ".join(repr(axis) for axis in mesh.manual_axes)
    advice = "make shard_map manual over these too (axis_names=...), and pass the one that splits V as axis_name"
    split = {axis for x in jax.tree.leaves(operands) for axis in _all_axes(jax.typeof(x).sharding.spec)}
    if split:
        raise ValueError(f"inside shard_map over {manual}, operands are split over {sorted(split)} as well: {advice}")
    if auto := auto_axes(mesh):
        warn_once(
            f"{function} inside shard_map over {manual} cannot see how XLA splits its operands over "
            f"{', '.join(map(repr, auto))}, and may repeat all work there: {advice}"
        )


def auto_axes(mesh: AbstractMesh) -> list[str]:
    """Returns the Auto axes with more than one device. Types do not show what these axes split."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, axis_type in types if axis_type == AxisType.Auto and mesh.shape[axis] > 1]


def _all_axes(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in _jax.partitions(spec) for axis in list_axes(entry))


def find_typed_mesh(operands: Any) -> AbstractMesh:
    """Returns the mesh in the operands' types, or an empty mesh if there is none."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    return next((mesh for mesh in meshes if not mesh.empty), AbstractMesh((), ()))
