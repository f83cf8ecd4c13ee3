"""From a caller's arguments to what is computed: they are checked once, and the implementation is chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _devices, _dispatch, _jax, scalars
from lce_jax._types import Case, Primals
from lce_jax.call import _checks, _options, _rows
from lce_jax.call._keywords import LogprobOptions
from lce_jax.call._options import CallOptions
from lce_jax.call._rows import Rows
from lce_jax.call._spec import Spec
from lce_jax.mesh import _collectives
from lce_jax.mesh._layout import Layout

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool

type LayoutOf = Callable[[Any, Any, int], Layout]  # of checked hidden and weight, and the weight's vocabulary dimension


def case(hidden: Any, weight: Any, labels: Any, where: Any, options: CallOptions) -> Case:
    """A call's shapes and dtypes, validated against each other. Arrays may be tracers or ShapeDtypeStructs."""
    static = options.static
    _checks.operands(hidden, weight, labels, where, options.bias, static)
    _checks.candidate_shape(options.candidates, labels.shape, "labels")
    dtype, given = (jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in (weight, hidden))
    return Case(
        num_tokens=math.prod(labels.shape),
        hidden_size=weight.shape[static.hidden_dim],
        vocab_size=weight.shape[static.vocab_dim],
        dtype=dtype,
        options=static,
        given_dtype=None if given == dtype else given,
        partial_rows=where is not None,
        device=_devices.current_device(weight, hidden, labels, where),
    )


def spec(
    case: Case, options: CallOptions, columns: int, layout: Layout | None = None, at_lowering: bool = False
) -> Spec:
    """The static part of a call whose vocabulary has ``columns``, or of one device's share of it over ``layout``.

    ``at_lowering``: an implementation that the device refuses is refused when the program is lowered, for whichever
    device that is.
    """
    vocab_size = _checks.vocabulary(options.vocab_size, columns)
    if layout is not None:
        case = dataclasses.replace(
            _dispatch.over(case, layout.mesh),
            num_tokens=case.num_tokens // layout.token_shards,
            vocab_size=case.vocab_size // layout.vocab_shards,
        )
    if columns < scalars.INT32_MAX:  # else how many shards there are is not known here
        scalars.whole_parts(case.options.vocab_part_size, columns, case.vocab_size)
    choose = _dispatch.choose_or_stand_in if at_lowering else _dispatch.choose
    implementation, _ = choose(case, options.implementation)
    return Spec(
        case,
        implementation.NAME,
        options.implementation,
        vocab_size,
        padded=vocab_size < columns,
        axis_name=options.axis_name if layout is None else layout.vocab_axes,
        gather_dim=None if layout is None else layout.gather_dim,
    )


def operands(
    spec: Spec, hidden: Any, weight: Any, labels: Any, where: Any, options: CallOptions
) -> tuple[Primals, Rows]:
    """The arrays of a call: those with gradients, and the per-token ones."""
    given = Primals(hidden, weight, options.bias)
    primals = jax.tree.map(lambda x: _jax.without_reduced(jnp.asarray(x)), given)
    rest = (options.logit_scale, options.logit_softcap, options.candidates, options.logit_floor)
    of_call = functools.partial(_rows.of_call, labels, where, options.temperature)
    return primals, of_call(spec.vocab_size, spec.case.stat_dtype, *rest)


def same_on_all_shards(
    primals: Primals, rows: Rows, axis_name: Any, columns: int
) -> tuple[Rows, Bool[Array, "*b"] | None]:
    """Inside ``shard_map``: the rows typed as equal on every shard of ``axis_name``, and where they really are.

    ``columns`` are those of one shard, which must be its own. Without an axis the rows come as they are, with None.
    """
    if axis_name is None:
        return rows, None
    _checks.split(primals.weight, axis_name, columns)
    return _collectives.same_on_all_shards(rows, rows.labels.ndim, axis_name)


def of_one_shard(
    hidden: Any, weight: Any, labels: Any, where: Any, num_rows: Any, options: LogprobOptions, mean_logit: bool
) -> tuple[Spec, Primals, Rows]:
    """The call of one shard of a vocabulary, for `lce_jax.local`."""
    checked = _options.of_call(options, mean_logit)
    if checked.axis_name is not None:
        raise ValueError(f"axis_name={checked.axis_name!r}: functions of lce_jax.local know no axis, use local.merge")
    found = case(hidden, weight, labels, where, checked)
    if num_rows is not None:
        if where is not None:
            raise ValueError("where and num_rows both say which rows count: give one of them")
        found = dataclasses.replace(found, partial_rows=True)
    if labels.ndim != 1:
        raise ValueError(f"labels {tuple(labels.shape)} must be flat here: [T], with hidden [T, H]")
    # The columns of all shards: only the caller knows how many there are, so any given vocab_size may leave padding.
    of_shard = dataclasses.replace(spec(found, checked, scalars.INT32_MAX), padded=checked.vocab_size is not None)
    primals, rows = operands(of_shard, hidden, weight, labels, where, checked)
    if num_rows is not None:
        rows = rows._replace(num_rows=_rows.count(num_rows, found.num_tokens))
    return of_shard, primals, rows
