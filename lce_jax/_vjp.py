"""The one ``custom_vjp``, over any implementation's (statistics, gradients) pair.

The residuals are the call's own operands, the merged statistics (a few numbers per token)
and, if asked for, the implementation's cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from lce_jax import _batching, _compat
from lce_jax._rows import Rows
from lce_jax._shard import Spec
from lce_jax._types import Primals, Results


@functools.partial(jax.jit, static_argnums=0, inline=True)
def linear_logprobs(spec: Spec, primals: Primals, rows: Rows) -> Results:
    """Per-token results over the whole vocabulary, in the shape of labels; differentiable in ``primals``.

    Jitted, so that calls outside ``jit`` compile once; within ``jit`` it is inlined.
    """
    return _linear_logprobs(spec, primals, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logprobs(spec: Spec, primals: Primals, rows: Rows) -> Results:
    out, *_ = _batching.forward(spec, primals, rows, keep_cache=False)
    return out


def _linear_logprobs_fwd(spec: Spec, primals: Primals, rows: Rows) -> tuple[Results, Any]:
    forward = _compat.first_order_only(functools.partial(_batching.forward, spec, keep_cache=True))
    out, stats, cache = forward(primals, rows)
    return out, (primals, rows, stats, cache)


def _linear_logprobs_bwd(spec: Spec, residuals: Any, cotangent: Results) -> tuple[Primals, None]:
    backward = _compat.first_order_only(functools.partial(_batching.backward, spec))
    return backward(*residuals, cotangent), None


_linear_logprobs.defvjp(_linear_logprobs_fwd, _linear_logprobs_bwd)
