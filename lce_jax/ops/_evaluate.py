"""One call of `lce_jax.linear_logprobs`, from validated options to results: where it runs, its operands say."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lce_jax._types import Results
from lce_jax.call import _arguments, _checks, _options
from lce_jax.call._arguments import LayoutOf
from lce_jax.call._options import CallOptions
from lce_jax.mesh import _collectives, _meshes
from lce_jax.programs._logprobs import LOGPROBS
from lce_jax.runner import _derivative

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def evaluate(hidden: Array, weight: Array, labels: Array, where: Array | None, options: CallOptions) -> Results:
    """`lce_jax.linear_logprobs`: on one device, over the mesh that its operands name, or inside ``shard_map``."""
    case = _arguments.case(hidden, weight, labels, where, options)
    operands = (hidden, weight, labels, where, options.bias, options.temperature)
    mesh = _meshes.mesh_of(operands, options.static.function, options.static.keeps_tiles)
    mesh = mesh if options.axis_name is None else None
    columns = case.vocab_size * _checks.axis_size(options.axis_name)
    spec = _arguments.spec(case, options, columns, at_lowering=mesh is not None and mesh.empty)
    primals, rows = _arguments.operands(spec, hidden, weight, labels, where, options)
    spec = dataclasses.replace(spec, mesh=mesh)
    rows, agree = _arguments.same_on_all_shards(primals, rows, options.axis_name, case.vocab_size)
    return _collectives.nan_where_different(agree, _derivative.run(LOGPROBS, spec, primals, rows))


def evaluate_over(
    layout_of: LayoutOf, hidden: Array, weight: Array, labels: Array, where: Array | None, options: CallOptions
) -> Results:
    """`lce_jax.sharded_linear_logprobs`: over the layout that ``layout_of`` finds."""
    _options.no_axis_name(options)
    case = _arguments.case(hidden, weight, labels, where, options)
    layout = layout_of(hidden, weight, options.static.vocab_dim)
    spec = dataclasses.replace(_arguments.spec(case, options, case.vocab_size, layout), mesh=layout)
    return _derivative.run(LOGPROBS, spec, *_arguments.operands(spec, hidden, weight, labels, where, options))
