"""How the operands of a call are split over a mesh: by the axes that the caller names, or by their own shardings.

And which mesh their types name, which of its axes a call cannot see or must not be split over.
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
from lce_jax.types._jax import as_axes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array


type Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How each operand is split over the mesh."""

    mesh: Any
    vocab_axes: Any  # None, one name or a tuple of names, as `axis_name` takes them
    leading: tuple[Any, ...]  # the mesh axes of hidden's leading dimensions
    gather_dim: int | None  # the leading dimension that is split over the vocabulary's axis

    @property
    def out_spec(self) -> P:
        """The spec of the results: that of hidden's leading dimensions."""
        return P(*self.leading)

    @property
    def row_spec(self) -> P:
        """The spec of per-token operands, which the vocabulary's axis does not split."""
        rows = list(self.leading)
        if self.gather_dim is not None:
            rows[self.gather_dim] = _without(rows[self.gather_dim], self.vocab_axes)
        return P(*rows)

    @property
    def token_shards(self) -> int:
        """How many parts the tokens are split into when the logits are computed."""
        return self._size(self.token_axes)

    @property
    def vocab_shards(self) -> int:
        """How many parts the vocabulary is split into."""
        return self._size(as_axes(self.vocab_axes))

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens when the logits are computed."""
        split = [axis for entry in self.leading for axis in as_axes(entry)]
        return tuple(axis for axis in split if axis not in as_axes(self.vocab_axes))

    @property
    def every_device(self) -> P:
        """The spec of each device's own cache: stacked along the first dimension."""
        return P((*self.token_axes, *as_axes(self.vocab_axes)))

    def with_batch(self, hidden_spec: P) -> Layout:
        """The layout of a batch of calls, hidden's first dimension, split as ``hidden_spec`` says by other axes."""
        own = (*self.token_axes, *as_axes(self.vocab_axes))
        batch = tuple(axis for axis in _entry(hidden_spec, 0) if axis not in own)
        gather_dim = None if self.gather_dim is None else self.gather_dim + 1
        return dataclasses.replace(self, leading=(_spec_entry(batch), *self.leading), gather_dim=gather_dim)

    def own_rows(self, rows: Array) -> Array:
        """This device's part of a per-token result of the gathered sequence."""
        if self.gather_dim is None:
            return rows
        size = rows.shape[self.gather_dim] // lax.axis_size(self.vocab_axes)
        start = lax.axis_index(self.vocab_axes) * size
        return lax.dynamic_slice_in_dim(rows, start, size, self.gather_dim)

    def gathered(self, rows: list[Array]) -> list[Array]:
        """The inverse of `own_rows`, in one collective for all arrays of a shape and dtype."""
        if self.gather_dim is None:
            return rows
        kinds = [(x.shape, x.dtype) for x in rows]
        found: dict[int, Array] = {}
        for kind in dict.fromkeys(kinds):
            alike = [i for i, other in enumerate(kinds) if other == kind]
            whole = lax.all_gather(
                jnp.stack([rows[i] for i in alike]), self.vocab_axes, axis=self.gather_dim + 1, tiled=True
            )
            found |= dict(zip(alike, whole, strict=True))
        return [found[i] for i in range(len(rows))]

    def placed(self, x: Array, spec: P) -> Array:
        """``x`` resharded as ``spec`` says over Explicit axes, which require it; Auto axes do not."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        implicit = tuple(name for name, kind in types if kind != AxisType.Explicit)
        if len(implicit) == len(self.mesh.axis_names):
            return x
        entries = P(*(_without(entry, implicit) for entry in _jax.partitions(spec)))
        return jax.sharding.reshard(x, NamedSharding(self.mesh, entries))


def layout_of_names(
    hidden: Any, weight: Any, vocab_dim: int, *, mesh: Any, vocab_axis: Axes, batch_axes: Axes, sequence_axis: Axes
) -> Layout:
    """The layout that a caller names, checked against the mesh and the shapes."""
    here = jax.sharding.get_abstract_mesh()
    mesh = here if mesh is None or here.manual_axes else mesh  # inside shard_map, where some of its axes are Manual
    if mesh.empty:
        raise ValueError("no mesh: pass mesh=, or call under jax.set_mesh(mesh)")
    if batch_axes is None:
        batch_axes = _own_batch_axes(mesh, hidden, vocab_axis, sequence_axis)
    vocab, batch, sequence = (as_axes(axes) for axes in (vocab_axis, batch_axes, sequence_axis))
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
    """The layout that the operands' own shardings ask for; ``hidden`` and ``weight`` have a shape and a dtype.

    Tokens are split as hidden is, and the vocabulary as the weight is. A dimension of tokens in which hidden is whole
    is split as other per-token operands are. A split H is gathered. An axis that splits both tokens and vocabulary can
    split only one of them: hidden or weight is gathered over it, whichever is then smaller on each device.
    """
    leading = [_dividing(mesh, n, _entry(hidden_spec, dim)) for dim, n in enumerate(hidden.shape[:-1])]
    vocab = _dividing(mesh, weight.shape[vocab_dim], _entry(weight_spec, vocab_dim))
    for spec in per_token:
        for dim, n in enumerate(hidden.shape[:-1]):
            taken = (*vocab, *(axis for axes in leading for axis in axes))
            own = tuple(axis for axis in _entry(spec, dim) if axis not in taken)
            leading[dim] = leading[dim] or _dividing(mesh, n, own)
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
    """The layout of arrays, or of their shapes, where they lie on a mesh of several devices.

    None where none does, and inside ``shard_map``, where each device has its own.
    """
    shardings = [_sharding(x) for x in (hidden, weight, *per_token)]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None and sharding.mesh.size > 1]
    if not meshes or AxisType.Manual in meshes[0].axis_types:
        return None
    of_hidden, of_weight, *of_rows = (P() if sharding is None else sharding.spec for sharding in shardings)
    return layout_of_specs(meshes[0], hidden, weight, of_hidden, of_weight, of_rows, vocab_dim)


def _sharding(x: Any) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _entry(spec: P, dim: int) -> tuple[str, ...]:
    entries = _jax.partitions(spec)
    return as_axes(entries[dim]) if dim < len(entries) else ()


def _dividing(mesh: Any, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """``axes``, or none of them if they do not divide ``size``: XLA can split unevenly, the kernels cannot."""
    return axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def _gathered_bytes(mesh: Any, x: Any, split: Sequence[str], over: Sequence[str]) -> int:
    """Bytes on each device of ``x``, which the axes of ``split`` split, once it is gathered over those of ``over``."""
    shards = math.prod(mesh.shape[axis] for axis in split if axis not in over)
    return math.prod(x.shape) * x.dtype.itemsize // shards


def _own_batch_axes(mesh: Any, hidden: Any, vocab_axis: Axes, sequence_axis: Axes) -> Axes:
    """Under Explicit axes, those of the first dimension of hidden's own type; else none."""
    if AxisType.Explicit not in mesh.axis_types or hidden.ndim < 2:
        return None
    spec = jax.typeof(hidden).sharding.spec
    return tuple(axis for axis in _entry(spec, 0) if axis not in as_axes(vocab_axis) + as_axes(sequence_axis))


def _check_axes(mesh: Any, vocab: tuple[str, ...], batch: tuple[str, ...], sequence: tuple[str, ...]) -> None:
    for name, axes in (("vocab_axis", vocab), ("batch_axes", batch), ("sequence_axis", sequence)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"{name} {axis!r} is no axis of the mesh {dict(mesh.shape)}")
            if mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Manual:
                raise ValueError(
                    f"{name} {axis!r}: this is inside shard_map over {axis!r}, where each device has operands of its "
                    f"own. Leave {axis!r} out; if it splits the vocabulary, call the function that has no sharded_ in "
                    f"its name, with axis_name={axis!r}"
                )
    shared = len(vocab) if _ends_with(sequence, vocab) else 0
    used = (*vocab, *batch, *sequence[: len(sequence) - shared])
    if len(set(used)) < len(used):
        raise ValueError(
            f"vocab_axis {vocab}, batch_axes {batch} and sequence_axis {sequence} overlap; only sequence_axis may hold "
            "vocab_axis, as its last axes and in the same order"
        )


def _ends_with(axes: tuple[str, ...], last: tuple[str, ...]) -> bool:
    return bool(last) and axes[-len(last) :] == last


def _check_divides(name: str, shape: Any, dim: int, axes: tuple[str, ...], mesh: Any, hint: str = "") -> None:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if shape[dim] % shards:
        raise ValueError(f"dimension {dim} of {name} {tuple(shape)} must divide by the {shards} shards of {axes}{hint}")


def _spec_entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _without(entry: Any, axes: Any) -> Any:
    return _spec_entry(tuple(axis for axis in as_axes(entry) if axis not in as_axes(axes)))


def mesh_of(operands: Any, function: str, asks_for_tiles: bool = False) -> AbstractMesh | None:
    """The mesh over which the operands may be split; None for one device, and inside ``shard_map``.

    Where neither types nor `jax.set_mesh` name one, there may be one all the same: ``jit(..., in_shardings=...)`` tells
    only XLA. So a traced call gets the rule too on a machine with several devices, with an empty mesh. One that asks
    for tiles cannot have it, and is refused if it is lowered for several.
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
        return mesh if traced and not asks_for_tiles and jax.device_count() > 1 else None
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
