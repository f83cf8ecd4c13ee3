"""The runner: how a function that has a derivative becomes one call of JAX.

A `Capability` says what is computed, `_over_devices` where. Here is what they have in common: one ``custom_vjp``, whose
residuals are the call's own operands and what the forward keeps; one derivative alone; and calls without tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lce_jax import _jax
from lce_jax._types import Primals
from lce_jax.runner import _over_devices


class Capability(NamedTuple):
    """A function of global arrays, differentiable in its first operands. Everything else is ``rest``."""

    forward: Callable[..., Any]  # (spec, primals, rest, differentiated) -> results, what is kept for the backward
    backward: Callable[..., Primals]  # (spec, primals, rest, kept, cotangent) -> gradients
    of_no_tokens: Callable[..., Any]  # (spec, rest) -> results


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run(capability: Capability, spec: Any, primals: Primals, rest: Any) -> Any:
    """The results, differentiable in ``primals``.

    Jitted, so that calls outside ``jit`` compile once; within ``jit`` it is inlined.
    """
    if not spec.case.num_tokens:
        return _jax.vary_like(capability.of_no_tokens(spec, rest), (primals.hidden, rest))
    marked = functools.partial(_jax.only_in_reverse.bind, function=spec.case.options.function)
    return _run(capability, spec, jax.tree.map(marked, primals), rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(capability: Capability, spec: Any, primals: Primals, rest: Any) -> Any:
    return capability.forward(spec, primals, rest, False)[0]


def _fwd(capability: Capability, spec: Any, primals: Primals, rest: Any) -> tuple[Any, Any]:
    forward = _jax.not_differentiable(lambda primals, rest: capability.forward(spec, primals, rest, True))
    out, kept = forward(primals, rest)
    return out, (primals, rest, kept)


def _bwd(capability: Capability, spec: Any, residuals: Any, cotangent: Any) -> tuple[Primals, None]:
    gradients = _jax.not_differentiable(functools.partial(capability.backward, spec))(*residuals, cotangent)
    return (gradients if spec.mesh is None else _over_devices.typed_as(gradients, residuals[0])), None


_run.defvjp(_fwd, _bwd)
