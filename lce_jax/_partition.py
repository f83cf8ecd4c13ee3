"""A call on global arrays of a mesh, partitioned as a matrix product is: by what is known of where its operands lie.

Explicit axes say it in the operands' types, and `jax.shard_map` runs one device's program over that layout. Auto axes
say nothing until XLA partitions the whole program: a rule names the dimensions for it (batch, sequence, vocabulary,
hidden), and once they are split a callback writes the same program. Either way it is that of `_spmd`, with the
collectives that the split asks for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import _dispatch, _spmd
from lce_jax._layout import Layout, as_axes, layout_of_specs
from lce_jax._shard import Rows, Spec
from lce_jax._types import Results, ShardStatistics
from lce_jax._xla_partitioning import Partition, Partitioned, warn_once

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def mesh_of(operands: Any, cache_bytes: int) -> AbstractMesh | None:
    """The mesh over which the operands may be split; None for one device, and inside ``shard_map``.

    No mesh in their types is no proof that there is none: ``jit(..., in_shardings=...)`` tells XLA alone. So a traced
    call on a machine of several devices gets the rule too, which one device's program does without.
    """
    mesh = _mesh_of_types(operands)
    if AxisType.Manual in mesh.axis_types:
        _check_other_axes(mesh, operands)
        return None
    if not mesh.empty:
        return mesh if mesh.size > 1 else None
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
    return mesh if traced and cache_bytes == 0 and jax.device_count() > 1 else None


def _check_other_axes(mesh: AbstractMesh, operands: Any) -> None:
    """Inside ``shard_map`` over some axes, nothing may be split over the others, and Auto ones cannot be read."""
    manual = ", ".join(repr(axis) for axis in mesh.manual_axes)
    advice = "make shard_map manual over these too (axis_names=...), and name the one that splits V as axis_name"
    split = {axis for x in jax.tree.leaves(operands) for axis in _axes_of(jax.typeof(x).sharding.spec)}
    if split:
        raise ValueError(f"inside shard_map over {manual}, operands are split over {sorted(split)} as well: {advice}")
    if auto := _auto_axes(mesh):
        warn_once(
            f"linear_logprobs inside shard_map over {manual} cannot see how XLA splits its operands over "
            f"{', '.join(map(repr, auto))}, and may repeat all work there: {advice}"
        )


def _auto_axes(mesh: AbstractMesh) -> list[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1]


def _axes_of(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in spec.partitions for axis in as_axes(entry))


def _mesh_of_types(operands: Any) -> AbstractMesh:
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    return next((mesh for mesh in meshes if not mesh.empty), AbstractMesh((), ()))


def forward(
    spec: Spec, hidden: Float[Array, "*b H"], weight: Float[Array, "V H"], bias: Any, rows: Rows, keep_cache: bool
) -> tuple[Results, ShardStatistics, Any]:
    """`_spmd.forward` of global arrays. Under Auto axes nothing is cached: a cache has no global shape."""
    layout = _layout_of_types(spec, hidden, weight, rows)
    if layout is None:
        if keep_cache and spec.case.options.cache_bytes:
            warn_once(
                "cache_bytes keeps nothing where XLA partitions linear_logprobs over Auto axes: call "
                "sharded_linear_logprobs (or _cross_entropy), or make the mesh's axes Explicit"
            )
        return *_auto_forward(spec, hidden, weight, bias, rows), None
    device = functools.partial(_device_forward, spec, layout, keep_cache)
    outputs = (layout.out_spec, layout.out_spec, layout.every_device)
    return _over_devices(layout, device, outputs, hidden, weight, bias, (rows,))


def backward(
    spec: Spec,
    hidden: Float[Array, "*b H"],
    weight: Float[Array, "V H"],
    bias: Float[Array, "V"] | None,
    rows: Rows,
    stats: ShardStatistics,
    cache: Any,
    cotangent: Results,
) -> tuple[Float[Array, "*b H"], Float[Array, "V H"], Float[Array, "V"] | None]:
    """`_spmd.backward` of global arrays."""
    per_token = (rows, stats, cotangent)
    layout = _layout_of_types(spec, hidden, weight, per_token)
    if layout is None:
        return _auto_backward(spec, hidden, weight, bias, *per_token)
    device = functools.partial(_device_backward, spec, layout)
    gradients = _over_devices(layout, device, layout.in_specs[:3], hidden, weight, bias, per_token, cache)
    return jax.tree.map(_as_type_of, gradients, (hidden, weight, bias))


def backward_of_examples(
    spec: Spec,
    hidden: Float[Array, "n *b H"],
    weight: Float[Array, "V H"],
    bias: Float[Array, "V"] | None,
    rows: Rows,
    stats: ShardStatistics,
    cotangent: Results,
) -> tuple[Float[Array, "n *b H"], Float[Array, "n V H"], Float[Array, "n V"] | None] | None:
    """`backward` of examples that each have a dweight of their own; None where their split is not in their types."""
    layout = _layout_of_types(spec, hidden, weight, (rows, stats, cotangent))
    if layout is None:
        return None
    layout = layout.without_gather()
    example = dataclasses.replace(layout, leading=layout.leading[1:])

    def device(hidden: Any, weight: Any, bias: Any, per_token: Any, cache: None) -> Any:
        def one(operands: Any) -> Any:
            return _device_backward(spec, example, operands[0], weight, bias, operands[1], cache)

        return lax.map(one, (hidden, per_token))

    examples = layout.leading[0]
    outputs = (layout.in_specs[0], *(P(examples, *own) for own in layout.in_specs[1:3]))
    return _over_devices(layout, device, outputs, hidden, weight, bias, (rows, stats, cotangent))


def _device_forward(
    spec: Spec,
    layout: Layout,
    keep_cache: bool,
    hidden: Any,
    weight: Any,
    bias: Any,
    per_token: tuple[Rows],
    cache: None = None,
) -> tuple[Results, ShardStatistics, Any]:
    """One device's program of the forward: its own tokens' results, and its own cache."""
    del cache
    (rows,) = per_token
    local = _device_spec(spec, layout, weight, rows)
    *results, kept = _spmd.forward(local, hidden, weight, bias, rows, keep_cache)
    return *jax.tree.map(layout.own_rows, results), kept


def _device_backward(
    spec: Spec, layout: Layout, hidden: Any, weight: Any, bias: Any, per_token: tuple[Any, ...], cache: Any = None
) -> tuple[Array, Array, Array | None]:
    """One device's program of the backward: dhidden of its tokens, dweight and dbias of its columns, whole sums."""
    rows, stats, cotangent = per_token
    local = _device_spec(spec, layout, weight, rows)
    return _spmd.backward(local, hidden, weight, bias, rows, stats, cache, cotangent)


def _device_spec(spec: Spec, layout: Layout, weight: Any, rows: Rows) -> Spec:
    """The spec of one device's share, its implementation chosen for the share's shapes."""
    columns = weight.shape[spec.case.options.vocab_dim]
    case = dataclasses.replace(spec.case, num_tokens=rows.labels.size, vocab_size=columns)
    chosen, _ = _dispatch.choose(case, spec.requested)
    return dataclasses.replace(
        spec,
        case=case,
        implementation=chosen.NAME,
        axis_name=layout.vocab_axes,
        gather_dim=layout.gather_dim,
        token_axes=layout.token_axes,
    )


# Explicit axes


def _layout_of_types(spec: Spec, hidden: Any, weight: Any, per_token: Any) -> Layout | None:
    """The layout that the operands' types name; None where no axis of their mesh is Explicit."""
    operands = (hidden, weight, per_token)
    mesh = _mesh_of_types(operands)
    if AxisType.Explicit not in mesh.axis_types:
        return None
    if auto := _auto_axes(mesh):
        warn_once(
            f"linear_logprobs takes its operands as whole over {', '.join(map(repr, auto))}, Auto axes of a mesh that "
            "has Explicit ones too: make these Explicit, or call sharded_linear_logprobs (or _cross_entropy)"
        )
    hidden_spec, weight_spec = (jax.typeof(x).sharding.spec for x in (hidden, weight))
    rows_specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(per_token)]
    return layout_of_specs(mesh, hidden, weight, hidden_spec, weight_spec, rows_specs, spec.case.options.vocab_dim)


def _over_devices(
    layout: Layout,
    device: Callable[..., Any],
    out_specs: Any,
    hidden: Any,
    weight: Any,
    bias: Any,
    per_token: tuple[Any, ...],
    cache: Any = None,
) -> Any:
    """``device`` on every device of the layout's mesh. Its collectives are all its own, so nothing is typed inside."""
    in_specs = (*layout.in_specs, layout.every_device)
    mapped = jax.shard_map(device, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*layout.place((hidden, weight, bias, per_token)), cache)


def _as_type_of(gradient: Array, operand: Any) -> Array:
    sharding = jax.typeof(operand).sharding
    return gradient if sharding.mesh.empty else jax.sharding.reshard(gradient, sharding)


# Auto axes


def _auto_forward(spec: Spec, hidden: Any, weight: Any, bias: Any, rows: Any) -> Any:
    def whole(hidden: Any, weight: Any, bias: Any, rows: Any) -> Any:
        return _spmd.forward(spec, hidden, weight, bias, rows, keep_cache=False)[:2]

    tokens, _ = _dimensions(spec, hidden, bias)
    results = _named(tokens, jax.eval_shape(whole, hidden, weight, bias, rows))
    return _partitioned(spec, whole, _forward_rule, results, hidden, weight, bias, rows)


def _auto_backward(spec: Spec, hidden: Any, weight: Any, bias: Any, *per_token: Any) -> Any:
    def whole(hidden: Any, weight: Any, bias: Any, rows: Any, stats: Any, cotangent: Any) -> Any:
        return _spmd.backward(spec, hidden, weight, bias, rows, stats, None, cotangent)

    _, gradients = _dimensions(spec, hidden, bias)
    return _partitioned(spec, whole, _backward_rule, gradients, hidden, weight, bias, *per_token)


def _partitioned(spec: Spec, whole: Any, rule: Any, results: list[str], hidden: Any, weight: Any, *rest: Any) -> Any:
    """``whole`` of global arrays, which XLA partitions by ``rule``; ``results`` names the dimensions of its results."""
    bias, *per_token = rest
    tokens, wide = _dimensions(spec, hidden, bias)
    names = f"{', '.join(wide + _named(tokens, per_token))} -> {', '.join(results)}"
    return Partitioned(whole, functools.partial(rule, spec), names, ("h",), spec.mesh)(hidden, weight, *rest)


def _dimensions(spec: Spec, hidden: Any, bias: Any) -> tuple[str, list[str]]:
    """The names of the dimensions of everything per token, and of hidden, weight and bias."""
    tokens = " ".join(f"b{dim}" for dim in range(hidden.ndim - 1))
    weight = "v h" if spec.case.options.vocab_dim == 0 else "h v"
    return tokens, [f"{tokens} h".strip(), weight, *_named("v", bias)]


def _named(names: str, tree: Any) -> list[str]:
    return [names] * len(jax.tree.leaves(tree))


def _forward_rule(spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Partition:
    layout = _layout_of_specs(spec, mesh, shapes, specs)

    def device(hidden: Any, weight: Any, bias: Any, rows: Any) -> Any:
        return _device_forward(spec, layout, False, hidden, weight, bias, (rows,))[:2]

    return Partition(device, _operand_specs(layout, shapes), layout.out_spec)


def _backward_rule(spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Partition:
    layout = _layout_of_specs(spec, mesh, shapes, specs)

    def device(hidden: Any, weight: Any, bias: Any, *per_token: Any) -> Any:
        return _device_backward(spec, layout, hidden, weight, bias, per_token)

    operand_specs = _operand_specs(layout, shapes)
    return Partition(device, operand_specs, operand_specs[:3])


def _layout_of_specs(spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Layout:
    (hidden, weight, *_), (hidden_spec, weight_spec, _, *per_token) = shapes, specs
    rows_specs = jax.tree.leaves(per_token, is_leaf=lambda x: isinstance(x, P))
    return layout_of_specs(mesh, hidden, weight, hidden_spec, weight_spec, rows_specs, spec.case.options.vocab_dim)


def _operand_specs(layout: Layout, shapes: Any) -> Any:
    hidden, weight, bias, per_token = layout.in_specs
    own = None if shapes[2] is None else bias
    return hidden, weight, own, *jax.tree.map(lambda _: per_token, tuple(shapes[3:]))
