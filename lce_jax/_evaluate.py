"""One call, from validated options to results: on one device, inside ``shard_map``, or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _bind, _checks, _collectives, _compat, _math, _options, _partition, _vjp
from lce_jax._bind import LayoutOf
from lce_jax._layout import Layout
from lce_jax._options import CallOptions
from lce_jax._rows import Rows
from lce_jax._shard import Spec
from lce_jax._types import Case, Primals, Results

if TYPE_CHECKING:
    from jaxtyping import Array


def evaluate(hidden: Array, weight: Array, labels: Array, where: Array | None, options: CallOptions) -> Results:
    """`lce_jax.linear_logprobs`: on one device, over the mesh that its operands name, or inside ``shard_map``."""
    case = _bind.case(hidden, weight, labels, where, options)
    operands = (hidden, weight, labels, where, options.bias, options.temperature)
    mesh = _partition.mesh_of(operands, options.static.function, options.static.keeps_tiles)
    mesh = mesh if options.axis_name is None else None
    columns = case.vocab_size * _checks.axis_size(options.axis_name)
    spec = _bind.spec(case, options, columns, at_lowering=mesh is not None and mesh.empty)
    primals, rows = _bind.operands(spec, hidden, weight, labels, where, options)
    spec = dataclasses.replace(spec, mesh=mesh)
    rows, agree = _bind.same_on_all_shards(primals, rows, options.axis_name, case.vocab_size)
    return _collectives.nan_where_different(agree, _results(spec, primals, rows))


def evaluate_over(
    layout_of: LayoutOf, hidden: Array, weight: Array, labels: Array, where: Array | None, options: CallOptions
) -> Results:
    """`lce_jax.sharded_linear_logprobs`: ``shard_map`` over the layout that ``layout_of`` finds."""
    _options.no_axis_name(options)
    case = _bind.case(hidden, weight, labels, where, options)
    layout = layout_of(hidden, weight, options.static.vocab_dim)
    spec = _bind.spec(case, options, case.vocab_size, layout)
    operands = _bind.operands(spec, hidden, weight, labels, where, options)
    return layout.differentiated_by_jax(functools.partial(mapped, _results, spec, layout), spec.case.options, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def mapped(program: Callable[..., Any], spec: Spec, layout: Layout, primals: Primals, rows: Rows) -> Any:
    """``program(spec, primals, rows)`` on every device. Jitted, so that calls outside ``jit`` compile once."""

    def device(primals: Primals, rows: Rows) -> Any:
        return jax.tree.map(layout.own_rows, program(spec, primals, rows))

    in_specs = (layout.primal_specs, layout.row_spec)
    over = jax.shard_map(device, mesh=layout.mesh, in_specs=in_specs, out_specs=layout.out_spec)
    return over(*layout.place(primals, rows))


def _results(spec: Spec, primals: Primals, rows: Rows) -> Results:
    if spec.case.num_tokens == 0:
        return _compat.vary_like(of_no_tokens(spec.case, rows.labels), (primals.hidden, rows.labels))
    return _vjp.linear_logprobs(spec, primals, rows)


def of_no_tokens(case: Case, labels: Array) -> Results:
    """The results of a call without tokens, in the shape of its labels."""
    shapes = jax.eval_shape(lambda: _math.results_of_none(0, case.stat_dtype, case.options))
    return jax.tree.map(lambda x: jnp.zeros(labels.shape + x.shape[1:], x.dtype), shapes)
