"""The door of every function: arguments are checked once, the implementation is chosen, and a `Call` is computed.

hidden, weight, labels, where, options ─ `case` ─ where they lie ─ `spec` ─ `operands` ─▶ Call
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from lce_jax import _devices, _dispatch, _jax, scalars
from lce_jax._types import Case, Primals
from lce_jax.call import _checks, _options, _rows
from lce_jax.call._keywords import LogprobOptions
from lce_jax.call._options import CallOptions
from lce_jax.call._place import Place
from lce_jax.call._rows import Rows
from lce_jax.call._spec import Spec
from lce_jax.mesh import _collectives, _meshes
from lce_jax.mesh._layout import Layout

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool


class Call[S](NamedTuple):
    """What is computed: a static part and arrays."""

    spec: S
    primals: Primals
    rows: Rows
    agree: Bool[Array, "*b"] | None  # inside ``shard_map``: the rows that all shards of the vocabulary were given alike


def bind(
    hidden: Any,
    weight: Any,
    labels: Any,
    where: Any,
    options: CallOptions,
    place: Place | None = None,
    others: Any = (),
    checked: Case | None = None,
) -> Call[Spec]:
    """A call over the mesh at ``place``, over the one that the operands name, or of this device.

    ``labels`` are None for a function that has none. ``others`` are further operands, which may name the mesh too.
    ``checked`` is the `case` of the arguments where it is known.
    """
    found = case(hidden, weight, labels, where, options) if checked is None else checked
    static, axis_name = options.static, options.axis_name
    mesh: Layout | AbstractMesh | None
    if place is not None:
        mesh = place.layout(hidden, weight, options)
    else:
        arrays = (hidden, weight, labels, where, options.bias, options.temperature, options.candidates, others)
        mesh = _meshes.mesh_of(arrays, static.function, static.keeps_tiles)
        mesh = mesh if axis_name is None else None
    shards = 1 if axis_name is None else _checks.axis_size(axis_name)
    bound = spec(found, options, found.vocab_size * shards, mesh)
    primals, rows = operands(bound, hidden, weight, labels, where, options)
    if axis_name is None:
        return Call(dataclasses.replace(bound, mesh=mesh), primals, rows, None)
    _checks.split(primals.weight, axis_name, found.vocab_size)
    rows, agree = _collectives.same_on_all_shards(rows, rows.labels.ndim, axis_name)
    return Call(bound, primals, _rows.tagged(rows), _collectives.where_it_counts(agree, rows.where))


def bind_shard(
    hidden: Any, weight: Any, labels: Any, where: Any, num_rows: Any, options: LogprobOptions, mean_logit: bool
) -> tuple[Spec, Primals, Rows]:
    """The call of one shard of a vocabulary, for `lce_jax.local`: who calls it knows the other shards."""
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
    bound = shard_spec(found, checked)
    primals, rows = operands(bound, hidden, weight, labels, where, checked)
    if num_rows is not None:
        count = _rows.count("num_rows", num_rows, found.num_tokens, ", the rows of labels")
        rows = rows._replace(num_rows=jnp.clip(count, 0, found.num_tokens))  # a traced one may lie outside
    return bound, primals, rows


def shard_spec(case: Case, options: CallOptions) -> Spec:
    """The static part of a call of one shard, of how many its caller alone knows: any vocab_size may leave padding."""
    return dataclasses.replace(spec(case, options, scalars.INT32_MAX), padded=options.vocab_size is not None)


def case(hidden: Any, weight: Any, labels: Any, where: Any, options: CallOptions) -> Case:
    """A call's shapes and dtypes, validated against each other. Arrays may be tracers or ShapeDtypeStructs."""
    static = options.static
    if labels is None:
        _checks.array("hidden", hidden)
        labels = jax.ShapeDtypeStruct(tuple(hidden.shape[:-1]), jnp.int32)
    _checks.operands(hidden, weight, labels, where, options.bias, static)
    if options.candidates is not None:
        scalars.candidate_shape("candidates", options.candidates.shape, labels.shape, "labels")
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


def spec(case: Case, options: CallOptions, columns: int, mesh: Layout | AbstractMesh | None = None) -> Spec:
    """The static part of a call whose vocabulary has ``columns``; over a layout, of one device's share of it."""
    vocab_size = _checks.vocabulary(options.vocab_size, columns)
    if isinstance(mesh, Layout):
        case = dataclasses.replace(
            _dispatch.over(case, mesh.mesh),
            num_tokens=case.num_tokens // mesh.token_shards,
            vocab_size=case.vocab_size // mesh.vocab_shards,
        )
    if case.options.top_k:
        scalars.num_largest(case.options.top_k, vocab_size)
    if columns < scalars.INT32_MAX:  # else how many shards there are is not known here
        scalars.whole_parts(case.options.vocab_part_size, columns, case.vocab_size)
    name = _dispatch.choose(case, options.implementation)[0].NAME
    return Spec(case, name, options.implementation, vocab_size, vocab_size < columns, options.axis_name)


def operands(
    spec: Spec, hidden: Any, weight: Any, labels: Any, where: Any, options: CallOptions
) -> tuple[Primals, Rows]:
    """The arrays of a call: those with gradients, and the per-token ones."""
    if labels is None:
        labels = _rows.no_labels(jnp.asarray(hidden), tuple(hidden.shape[:-1]))
    given = Primals(hidden, weight, options.bias)
    primals = jax.tree.map(lambda x: _jax.without_reduced(jnp.asarray(x)), given)
    factors = (options.temperature, spec.vocab_size, spec.case.stat_dtype, options.logit_scale, options.logit_softcap)
    return primals, _rows.of_call(labels, where, *factors, options.candidates, options.logit_floor)
