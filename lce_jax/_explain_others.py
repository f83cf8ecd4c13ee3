"""What `explain` says of functions that are no pass over one vocabulary, and how any call lies on a mesh."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from lce_jax import _bind, _checks, _gathered_plan, _kl_plan, _options, scalars
from lce_jax._kl import KLSpec
from lce_jax._kl_call import KLCall
from lce_jax._kl_math import Pair
from lce_jax._layout import layout_of_arrays, layout_of_names
from lce_jax._options import CallOptions
from lce_jax._plans import ALONE, Surroundings
from lce_jax._types import is_array

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._layout import Axes, Layout
    from lce_jax._plans import Plan
    from lce_jax._types import Case, LogprobOptions

NOT_OF = {
    "linear_topk": _options.NOT_OF_TOPK,
    "linear_logits": _options.NOT_OF_TOPK,
    "linear_kl": (*_options.NOT_OF_TOPK, "implementation"),
}
FUNCTION_OF = {"k": "linear_topk", "ids": "linear_logits", "teacher": "linear_kl"}


class Place(NamedTuple):
    """Where a call runs: the mesh and axes that the caller names, if any."""

    mesh: Mesh | AbstractMesh | None = None
    vocab_axis: Axes = None
    batch_axes: Axes = None
    sequence_axis: Axes = None

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | None, *axes: Axes) -> Place:
        """With a hash, also where a caller gives lists of axes."""
        return cls(mesh, *(names if names is None or isinstance(names, str) else tuple(names) for names in axes))

    @property
    def is_named(self) -> bool:
        """Whether the caller names any."""
        return self.mesh is not None or bool(self.vocab_axis or self.batch_axes or self.sequence_axis)


class Placed(NamedTuple):
    """One device's part of a call."""

    layout: Layout | None
    around: Surroundings
    columns: int  # of all devices; the largest number there is, where it is not known
    by_xla: bool  # whether XLA partitions the call over Auto axes


def placed(hidden: Any, weight: Any, per_token: list[Any], case: Case, options: CallOptions, place: Place) -> Placed:
    """How the operands lie on the mesh."""
    layout, around, columns, vocab_dim = None, ALONE, case.vocab_size, case.options.vocab_dim
    if place.is_named:
        _options.no_axis_name(options)
        layout = layout_of_names(hidden, weight, vocab_dim, **place._asdict())
    elif options.axis_name is None:
        layout = layout_of_arrays(hidden, weight, per_token, vocab_dim)
    else:
        columns = scalars.INT32_MAX  # the columns of all shards: how many shards there are is not known here
    by_xla = layout is not None and not place.is_named and AxisType.Explicit not in layout.mesh.axis_types
    if layout is not None:
        around = Surroundings(
            gathers_hidden=layout.gather_dim is not None,
            sums_dweight=layout.token_shards > 1,
            shards=layout.vocab_shards,
        )
    elif options.axis_name is None:
        around = Surroundings(true_columns=_checks.vocabulary(options.vocab_size, columns))
    return Placed(layout, around, columns, by_xla)


def check_function(asked: dict[str, Any], options: LogprobOptions, *others: Any) -> None:
    """Refuses what the function that ``asked`` is about does not have: options, and the arguments of losses."""
    names = [name for name, x in asked.items() if x is not None]
    if not names:
        return
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} belong to different functions: give one of them")
    function = FUNCTION_OF[names[0]]
    if any(is_array(x) or x for x in others):
        raise ValueError(f"{names[0]} is that of {function}, which is no loss: leave out the arguments of losses")
    _options.refuse(function, options, NOT_OF[function])


def of_logits(
    hidden: Any, weight: Any, labels: Any, ids: Any, where: Any, place: Place, options: LogprobOptions
) -> Plan:
    """That of `lce_jax.linear_logits` at ``ids``."""
    _checks.num_candidates(ids, "ids")
    _checks.candidate_shape(ids, tuple(hidden.shape[:-1]), "hidden before H", "ids")
    checked = _options.of_call(options).named("linear_logits")
    case = _bind.case(hidden, weight, labels, where, checked)
    static = dataclasses.replace(case.options, num_candidates=ids.shape[-1])
    case = dataclasses.replace(case, options=static, partial_rows=False)  # it moves no rows
    found = placed(hidden, weight, [ids], case, checked, place)
    spec = _bind.spec(case, checked, found.columns, found.layout)
    return _gathered_plan.plan(spec.case, found.around, spec.implementation)


def of_kl(
    hidden: Any, weight: Any, labels: Any, teacher: Any, where: Any, place: Place, options: LogprobOptions
) -> Plan:
    """That of `lce_jax.linear_kl` with the teacher's hidden states and weight."""
    if not isinstance(teacher, tuple | list) or len(teacher) != 2:
        raise TypeError(f"teacher must be the pair of its hidden states and its weight, got {type(teacher).__name__}")
    call = KLCall.of(Pair((hidden, weight), tuple(teacher)), where, "forward", options, options.get("axis_name"))
    checked, case = call.options.student, call.cases.student
    _bind.case(hidden, weight, labels, where, checked)
    tokens = jax.ShapeDtypeStruct(tuple(labels.shape), jnp.int32)
    found = placed(hidden, weight, [tokens if where is None else where], case, checked, place)
    if found.layout is not None and found.layout.vocab_axes is not None:
        call.check_equal_columns()
    shards = 1 if found.layout is None else found.layout.vocab_shards
    specs = Pair(
        *(
            _bind.spec(own, chosen, max(own.vocab_size, found.columns), found.layout)
            for own, chosen in zip(call.cases, call.options, strict=True)
        )
    )
    columns = min(spec.case.vocab_size for spec in specs)
    if shards == 1 and checked.axis_name is None:
        columns = min(columns, specs.student.vocab_size)
    return _kl_plan.plan(KLSpec(specs, student_first=False).plan(columns), found.around)
