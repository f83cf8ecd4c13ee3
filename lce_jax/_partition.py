"""A call on global arrays of a mesh, partitioned as a matrix product is: by how its operands are split.

Under Explicit axes the operands' types say how, and `jax.shard_map` runs one device's program over that layout. Under
Auto axes it is unknown until XLA partitions the whole program: a rule names the dimensions (batch, sequence,
vocabulary, hidden), XLA splits them, and a callback writes one device's program. Either way that is the program of
`_spmd`, with the collectives that the split needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import _devices, _dispatch, _meshes, _spmd
from lce_jax._layout import Layout, layout_of_specs
from lce_jax._rows import Rows
from lce_jax._shard import Spec
from lce_jax._types import Options, Primals, Results, ShardStatistics
from lce_jax._xla_partitioning import Partition, Partitioned, warn_once

if TYPE_CHECKING:
    from jaxtyping import Array


type Program = Callable[[Spec, Primals, Rows], Any]  # one device's part, with its collectives, or all of a call


def mesh_of(operands: Any, function: str, keeps_tiles: bool = False) -> AbstractMesh | None:
    """The mesh over which the operands may be split; None for one device, and inside ``shard_map``.

    Where neither types nor `jax.set_mesh` name a mesh, there may be one all the same: ``jit(..., in_shardings=...)``
    tells only XLA. So a traced call gets the rule too, with an empty mesh: on a machine with several devices, and on
    one without a GPU, where programs are compiled ahead of time for devices that the lowering alone names. A single
    GPU compiles for itself, without the rule, which would double the time to trace the kernels.
    """
    arrays = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    mesh = _meshes.mesh_of_types(arrays)
    if AxisType.Manual in mesh.axis_types:
        _meshes.check_other_axes(mesh, arrays, function)
        return None
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    if mesh.empty and traced:
        mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh if mesh.size > 1 and not mesh.manual_axes else None
    has_gpu = _devices.current_device().platform == "gpu"
    return mesh if traced and (not has_gpu or (not keeps_tiles and jax.device_count() > 1)) else None


def forward(spec: Spec, primals: Primals, rows: Rows, keep_cache: bool) -> tuple[Results, ShardStatistics, Any]:
    """`_spmd.forward` of global arrays. Under Auto axes no tile is kept, because their arrays have no global shape."""
    layout = layout_of_types(spec, primals, rows)
    if layout is None:
        return *_auto_forward(spec, primals, rows, keep_cache), None
    device = functools.partial(_device_forward, spec, layout, keep_cache)
    outputs = (layout.out_spec, layout.out_spec, layout.every_device)
    return layout.over_devices(device, outputs, primals, (rows,))


def backward(
    spec: Spec, primals: Primals, rows: Rows, stats: ShardStatistics, cache: Any, cotangent: Results
) -> Primals:
    """`_spmd.backward` of global arrays."""
    per_token = (rows, stats, cotangent)
    layout = layout_of_types(spec, primals, per_token)
    if layout is None:
        return _auto_backward(spec, primals, *per_token)
    device = functools.partial(_device_backward, spec, layout)
    gradients = layout.over_devices(device, layout.primal_specs, primals, per_token, cache, layout.every_device)
    return jax.tree.map(as_type_of, gradients, primals)


def per_token(program: Program, spec: Spec, primals: Primals, rows: Rows) -> Any:
    """``program`` of global arrays, all of whose results are per token."""
    layout = layout_of_types(spec, primals, rows)
    if layout is None:
        return _auto(program, spec, primals, rows)
    device = functools.partial(_device_program, program, spec, layout)
    return layout.over_devices(lambda primals, rows, _: device(primals, *rows), layout.out_spec, primals, (rows,))


def _device_program(program: Program, spec: Spec, layout: Layout, primals: Primals, rows: Rows) -> Any:
    """One device's program of ``program``: its own tokens' results."""
    return jax.tree.map(layout.own_rows, program(device_spec(spec, layout, primals, rows), primals, rows))


def _device_forward(
    spec: Spec,
    layout: Layout,
    keep_cache: bool,
    primals: Primals,
    per_token: tuple[Rows],
    cache: None = None,
) -> tuple[Results, ShardStatistics, Any]:
    """One device's program of the forward: its own tokens' results, and its own cache."""
    del cache
    (rows,) = per_token
    local = device_spec(spec, layout, primals, rows)
    *results, kept = _spmd.forward(local, primals, rows, keep_cache)
    return *jax.tree.map(layout.own_rows, results), kept


def _device_backward(
    spec: Spec, layout: Layout, primals: Primals, per_token: tuple[Any, ...], cache: Any = None
) -> Primals:
    """One device's program of the backward: dhidden of its tokens, dweight and dbias of its columns, fully summed."""
    rows, stats, cotangent = per_token
    local = device_spec(spec, layout, primals, rows)
    return _spmd.backward(local, primals, rows, stats, cache, cotangent)


def device_spec(spec: Spec, layout: Layout, primals: Primals, rows: Rows) -> Spec:
    """The spec of one device's share, its implementation chosen for the share's shapes."""
    columns = primals.weight.shape[spec.case.options.vocab_dim]
    case = _dispatch.over(spec.case, layout.mesh)
    case = dataclasses.replace(case, num_tokens=rows.labels.size, vocab_size=columns)
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


def layout_of_types(spec: Spec, primals: Primals, per_token: Any) -> Layout | None:
    """The layout that the operands' types name; None if all axes of their mesh are Auto."""
    return explicit_layout(spec.case.options, primals, per_token)


def explicit_layout(options: Options, primals: Primals, per_token: Any) -> Layout | None:
    """`layout_of_types` of a call with these options."""
    hidden, weight, _ = primals
    mesh = _meshes.mesh_of_types((hidden, weight, per_token))
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return None
    if auto := _meshes.auto_axes(mesh):
        warn_once(
            f"{options.function} takes its operands as whole over {', '.join(map(repr, auto))}, Auto axes of a mesh "
            f"that also has Explicit ones: make them Explicit, or call {options.sharded_function}"
        )
    hidden_spec, weight_spec = (jax.typeof(x).sharding.spec for x in (hidden, weight))
    rows_specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(per_token)]
    return layout_of_specs(mesh, hidden, weight, hidden_spec, weight_spec, rows_specs, options.vocab_dim)


def as_type_of(gradient: Array, operand: Any) -> Array:
    """A gradient split as its operand is."""
    sharding = jax.typeof(operand).sharding
    return gradient if sharding.mesh.empty else jax.sharding.reshard(gradient, sharding)


# Auto axes


def _auto_forward(spec: Spec, primals: Primals, rows: Rows, keep_cache: bool) -> Any:
    unused = _unused(spec.case.options) if keep_cache else ()
    out, stats = _auto(_forward_without_cache, _exact(spec), primals, rows, unused)
    if spec.case.options.reports_dropped_mass:
        out = out._replace(outputs=out.outputs._replace(dropped_mass=jnp.zeros_like(out.outputs.lse)))
    return out, stats


def _unused(options: Options) -> tuple[str, ...]:
    """What of the options is lost without tiles of the forward."""
    given = {
        "cache_bytes keeps nothing": options.cache_bytes,
        "gradient_threshold is not used, and the gradients are exact,": options.gradient_threshold,
    }
    return tuple(message for message, asked in given.items() if asked)


def _exact(spec: Spec) -> Spec:
    """The same call without a ``gradient_threshold``."""
    options = dataclasses.replace(spec.case.options, gradient_threshold=0.0)
    return dataclasses.replace(spec, case=dataclasses.replace(spec.case, options=options))


def _forward_without_cache(spec: Spec, primals: Primals, rows: Rows) -> Any:
    return _spmd.forward(spec, primals, rows, keep_cache=False)[:2]


def _auto(program: Program, spec: Spec, primals: Primals, rows: Rows, unused: tuple[str, ...] = ()) -> Any:
    whole = functools.partial(program, spec)
    tokens, _ = _dimensions(spec, primals)
    results = _named(tokens, jax.eval_shape(whole, primals, rows))
    rule = functools.partial(_program_rule, program, spec)
    return _partitioned(spec, whole, rule, results, unused, primals, rows)


def _auto_backward(spec: Spec, primals: Primals, *per_token: Any) -> Any:
    spec = _exact(spec)

    def whole(primals: Primals, rows: Rows, stats: ShardStatistics, cotangent: Results) -> Any:
        return _spmd.backward(spec, primals, rows, stats, None, cotangent)

    _, gradients = _dimensions(spec, primals)
    return _partitioned(spec, whole, functools.partial(_backward_rule, spec), gradients, (), primals, *per_token)


def _partitioned(
    spec: Spec, whole: Any, rule: Any, results: list[str], unused: tuple[str, ...], primals: Primals, *per_token: Any
) -> Any:
    """``whole`` of global arrays, which XLA partitions by ``rule``; ``results`` names the dimensions of its results."""
    tokens, wide = _dimensions(spec, primals)
    names = f"{', '.join(wide + _named(tokens, per_token))} -> {', '.join(results)}"
    options = spec.case.options
    unsplit = ("h", "k") if options.num_candidates or options.top_k else ("h",)
    function = Partitioned(whole, rule, names, unsplit, spec.mesh, spec.case, spec.requested, unused)
    return function(primals, *per_token)


def _dimensions(spec: Spec, primals: Primals) -> tuple[str, list[str]]:
    """The names of the dimensions of everything per token, and of hidden, weight and bias."""
    tokens = " ".join(f"b{dim}" for dim in range(primals.hidden.ndim - 1))
    weight = "v h" if spec.case.options.vocab_dim == 0 else "h v"
    return tokens, [f"{tokens} h".strip(), weight, *_named("v", primals.bias)]


def _named(names: str, tree: Any) -> list[str]:
    """``names`` for each leaf, and "k" after it where the leaf has a dimension of candidates."""
    return [names if x.ndim == len(names.split()) else f"{names} k".strip() for x in jax.tree.leaves(tree)]


def _program_rule(program: Program, spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Partition:
    layout = _layout_of_specs(spec, mesh, shapes, specs)
    device = functools.partial(_device_program, program, spec, layout)
    return Partition(device, _operand_specs(layout, shapes), layout.out_spec)


def _backward_rule(spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Partition:
    layout = _layout_of_specs(spec, mesh, shapes, specs)

    def device(primals: Primals, *per_token: Any) -> Any:
        return _device_backward(spec, layout, primals, per_token)

    operand_specs = _operand_specs(layout, shapes)
    return Partition(device, operand_specs, operand_specs[0])


def _layout_of_specs(spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Layout:
    (primals, *_), (of_primals, *per_token) = shapes, specs
    rows_specs = jax.tree.leaves(per_token, is_leaf=lambda x: isinstance(x, P))
    vocab_dim = spec.case.options.vocab_dim
    return layout_of_specs(
        mesh, primals.hidden, primals.weight, of_primals.hidden, of_primals.weight, rows_specs, vocab_dim
    )


def _operand_specs(layout: Layout, shapes: Any) -> Any:
    primals, *per_token = shapes
    specs = layout.primal_specs
    specs = specs if primals.bias is not None else specs._replace(bias=None)
    return specs, *jax.tree.map(lambda _: layout.row_spec, tuple(per_token))
