"""What `explain` says of `linear_kl` and `linear_logits`, which are no pass over one vocabulary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _dispatch, mosaic
from lce_jax._types import is_array
from lce_jax.call import _bind, _options
from lce_jax.call._keywords import TeacherOptions
from lce_jax.call._kl import KLArguments
from lce_jax.call._kl_spec import KLSpec
from lce_jax.call._place import Place, placed
from lce_jax.mathematics._kl import Direction, Pair
from lce_jax.xla import _kl, _logits

if TYPE_CHECKING:
    from lce_jax._plans import Plan
    from lce_jax.call._keywords import ExplainOptions, LogprobOptions

NOT_OF = {
    "linear_topk": _options.NOT_OF_TOPK,
    "linear_logits": _options.NOT_OF_TOPK,
    "linear_kl": tuple(name for name in _options.NOT_OF_TOPK if name != "cache_bytes"),
}
FUNCTION_OF = {"k": "linear_topk", "ids": "linear_logits", "teacher": "linear_kl"}


def check_function(asked: dict[str, Any], options: ExplainOptions, *others: Any) -> None:
    """Refuses what the function that ``asked`` is about does not have: options, and the arguments of losses."""
    names = [name for name, x in asked.items() if x is not None]
    if "teacher" not in names and (wrong := [name for name in options if name in TeacherOptions.__annotations__]):
        raise TypeError(f"{wrong[0]} is that of linear_kl: give teacher too")
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
    checked = _options.of_ids(options, hidden, ids)
    case = _bind.case(hidden, weight, labels, where, checked)
    case = dataclasses.replace(case, partial_rows=False)  # it moves no rows
    found = placed(hidden, weight, [ids], case, checked, place)
    spec = _bind.spec(case, checked, found.columns, found.layout)
    return _logits.plan(spec.case, found.around)


def of_kl(
    hidden: Any,
    weight: Any,
    labels: Any,
    teacher: Any,
    direction: Direction,
    where: Any,
    place: Place,
    options: ExplainOptions,
) -> Plan:
    """That of `lce_jax.linear_kl` with the teacher's hidden states and weight."""
    if not isinstance(teacher, tuple | list) or len(teacher) != 2:
        raise TypeError(f"teacher must be the pair of its hidden states and its weight, got {type(teacher).__name__}")
    arrays = Pair((hidden, weight), tuple(teacher))
    call = KLArguments.of(arrays, where, direction, options, options.get("axis_name"))
    cases, checked = call.cases(), call.options.student
    _bind.case(hidden, weight, labels, where, checked)
    tokens = jax.ShapeDtypeStruct(tuple(labels.shape), jnp.int32)
    found = placed(hidden, weight, [tokens if where is None else where], cases.student, checked, place)
    layout, names_axis = found.layout, checked.axis_name is not None
    call.check_columns(cases, names_axis or (layout is not None and layout.vocab_axes is not None))
    pairs = zip(cases, call.options, strict=True)
    models = Pair(*(_bind.spec(x, own, max(x.vocab_size, found.columns), layout) for x, own in pairs))
    columns = min(model.case.vocab_size for model in models)
    if not names_axis and (layout is None or layout.vocab_shards == 1):
        columns = min(columns, models.student.vocab_size)
    planned = KLSpec(models, call.direction, call.implementation).plan(columns)
    name, refused = _dispatch.choose_kl(planned.cases, implementation=call.implementation)
    plan = mosaic.kl_plan if name == mosaic.NAME else _kl.explained
    return dataclasses.replace(plan(planned, found.around), refused=refused)
