"""The ``custom_vjp`` of `lce_jax.linear_kl`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _compat, _kl_over_mesh
from lce_jax._kl import KLSpec
from lce_jax._kl_math import Pair
from lce_jax._rows import Rows
from lce_jax._types import Primals

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnums=0, inline=True)
def linear_kl(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows]) -> Float[Array, "*b"]:
    """The divergence of each token, in the shape of the rows; differentiable in the student's operands.

    Jitted, so that calls outside ``jit`` compile once; within ``jit`` it is inlined.
    """
    if not rows.student.labels.size:
        zeros = jnp.zeros(rows.student.labels.shape, spec.dtype)
        return _compat.vary_like(zeros, (primals.student.hidden, rows.student.labels))
    return _linear_kl(spec, primals.student, primals.teacher, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_kl(spec: KLSpec, student: Primals, teacher: Primals, rows: Pair[Rows]) -> Float[Array, "*b"]:
    return _kl_over_mesh.forward(spec, Pair(student, teacher), rows)[0]


def _fwd(spec: KLSpec, student: Primals, teacher: Primals, rows: Pair[Rows]) -> tuple[Array, Any]:
    forward = _compat.first_order_only(functools.partial(_kl_over_mesh.forward, spec))
    out, kept = forward(Pair(student, teacher), rows)
    return out, (Pair(student, teacher), rows, kept)


def _bwd(spec: KLSpec, residuals: Any, cotangent: Array) -> tuple[Primals, None, None]:
    backward = _compat.first_order_only(functools.partial(_kl_over_mesh.backward, spec))
    return backward(*residuals, cotangent), None, None


_linear_kl.defvjp(_fwd, _bwd)
