"""`lce_jax.linear_kl` on global arrays of a mesh, and under ``vmap``.

The operands' types say how a call is split, as in `_partition`; a batch of calls is one call with more tokens, as in
`_batching`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from lce_jax import _batching, _kl, _partition
from lce_jax._kl import Kept, KLSpec
from lce_jax._kl_math import Pair
from lce_jax._layout import Layout
from lce_jax._rows import Rows
from lce_jax._types import Primals

if TYPE_CHECKING:
    from jaxtyping import Array


def forward(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows]) -> tuple[Array, Kept]:
    """`_kl.forward`, over the mesh that the operands' types name."""

    @jax.custom_batching.custom_vmap
    def call(primals: Pair[Primals], rows: Pair[Rows]) -> Any:
        layout = _layout(spec, primals, rows)
        if layout is None:
            return _kl.forward(spec, primals, rows)

        def device(student: Primals, per_token: Any, teacher: Primals) -> Any:
            both, (rows,) = Pair(student, teacher), per_token
            found = _kl.forward(_device_spec(spec, layout, both, rows), both, rows)
            return jax.tree.map(layout.own_rows, found)

        return _over_devices(spec, layout, device, layout.out_spec, primals, (rows,))

    @call.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        if _batching.has_own_columns(in_batched):
            out = _batching.one_by_one(functools.partial(forward, spec), in_batched, operands)
        else:
            primals, rows = _batching.with_batch(size, in_batched, operands)
            out = forward(_of_tokens(spec, rows.student.labels.size), primals, rows)
        return out, jax.tree.map(lambda _: True, out)

    return call(primals, rows)


def backward(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], kept: Kept, cotangent: Array) -> Primals:
    """`_kl.backward`, over the mesh that the operands' types name."""

    @jax.custom_batching.custom_vmap
    def call(primals: Pair[Primals], *per_token: Any) -> Any:
        layout = _layout(spec, primals, per_token)
        if layout is None:
            return _kl.backward(spec, primals, *per_token)

        def device(student: Primals, per_token: Any, teacher: Primals) -> Primals:
            both, (rows, *rest) = Pair(student, teacher), per_token
            return _kl.backward(_device_spec(spec, layout, both, rows), both, rows, *rest)

        found = _over_devices(spec, layout, device, layout.primal_specs, primals, per_token)
        return jax.tree.map(_partition.as_type_of, found, primals.student)

    @call.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        del size
        out = _batching.one_by_one(functools.partial(backward, spec), in_batched, operands)
        return out, jax.tree.map(lambda _: True, out)

    return call(primals, rows, kept, cotangent)


def _layout(spec: KLSpec, primals: Pair[Primals], per_token: Any) -> Layout | None:
    """The layout of operands over Explicit axes: the student's, and of its tokens also the teacher's."""
    if spec.mesh is None:
        return None
    per_token = (per_token, primals.teacher.hidden)
    layout = _partition.layout_of_types(spec.models.student, primals.student, per_token)
    sizes = {x.weight.shape[model.case.options.vocab_dim] for x, model in zip(primals, spec.models, strict=True)}
    if layout is not None and len(sizes) > 1:
        return dataclasses.replace(layout, vocab_axes=None, gather_dim=None)  # both weights are gathered
    return layout


def _over_devices(
    spec: KLSpec, layout: Layout, device: Callable[..., Any], out_specs: Any, primals: Pair[Primals], per_token: Any
) -> Any:
    """``device(student, per_token, teacher)`` on every device."""
    teachers = dataclasses.replace(layout, vocab_dim=spec.models.teacher.case.options.vocab_dim)
    teacher, _ = teachers.place(primals.teacher, ())
    return layout.over_devices(device, out_specs, primals.student, per_token, teacher, teachers.primal_specs)


def _device_spec(spec: KLSpec, layout: Layout, primals: Pair[Primals], rows: Pair[Rows]) -> KLSpec:
    """The spec of one device's share."""
    of_models = zip(spec.models, primals, rows, strict=True)
    models = Pair(*(_partition.device_spec(model, layout, own, of) for model, own, of in of_models))
    return dataclasses.replace(spec, models=models, mesh=None)


def _of_tokens(spec: KLSpec, num_tokens: int) -> KLSpec:
    """The spec of a call with so many tokens."""
    cases = (dataclasses.replace(model.case, num_tokens=num_tokens) for model in spec.models)
    models = zip(spec.models, cases, strict=True)
    return dataclasses.replace(spec, models=Pair(*(dataclasses.replace(model, case=case) for model, case in models)))
