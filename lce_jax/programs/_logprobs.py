"""`lce_jax.linear_logprobs` as the runner takes it: its two programs, and what is kept between them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lce_jax._types import Primals, Results
from lce_jax.call._rows import Rows
from lce_jax.call._spec import Spec
from lce_jax.mathematics import _logprobs
from lce_jax.programs import _one_device
from lce_jax.programs._one_device import Kept
from lce_jax.runner import _over_devices
from lce_jax.runner._derivative import Capability
from lce_jax.runner._over_devices import Kind, Program, spread


def forward(spec: Spec, primals: Primals, rows: Rows, differentiated: bool) -> tuple[Results, Kept]:
    """The results, and what a backward needs. Where XLA decides how operands are split, no tile is kept."""
    options, keeps, unused = spec.case.options, differentiated, []
    left = _over_devices.is_left_to_xla(spec, (primals, rows))
    if left:
        if differentiated and options.cache_bytes:
            unused.append("cache_bytes keeps nothing")
        if differentiated and options.gradient_threshold:
            unused.append("gradient_threshold is not used, and the gradients are exact,")
        spec, keeps = _exact(spec), False
    apart = bool(keeps and options.keeps_tiles)
    operands = _over_devices.head(options.vocab_dim), Kind.TOKENS
    results = Kind.RESULTS, (Kind.TOKENS, Kind.DEVICE)
    run = functools.partial(_one_device.forward, keep_cache=keeps)
    program = Program(run, operands, results, joins=not apart, unused=tuple(unused))
    out, kept = spread(spec, program, primals, rows)
    if left and options.reports_dropped_mass:
        out = out._replace(outputs=out.outputs._replace(dropped_mass=jnp.zeros_like(out.outputs.lse)))
    return out, kept


def backward(spec: Spec, primals: Primals, rows: Rows, kept: Kept, cotangent: Results) -> Primals:
    """The gradients of the operands."""
    spec = _exact(spec) if _over_devices.is_left_to_xla(spec, (primals, rows)) else spec
    own = _over_devices.head(spec.case.options.vocab_dim)
    operands = own, Kind.TOKENS, (Kind.TOKENS, Kind.DEVICE), Kind.RESULTS
    program = Program(_one_device.backward, operands, own)
    return spread(spec, program, primals, rows, kept, cotangent)


def of_no_tokens(spec: Spec, rows: Rows) -> Results:
    """The results of a call without tokens, in the shape of its labels."""
    shapes = jax.eval_shape(lambda: _logprobs.results_of_none(0, spec.case.stat_dtype, spec.case.options))
    return jax.tree.map(lambda x: jnp.zeros(rows.labels.shape + x.shape[1:], x.dtype), shapes)


LOGPROBS = Capability(forward, backward, of_no_tokens)


def _exact(spec: Spec) -> Spec:
    """The same call without a ``gradient_threshold``."""
    options = dataclasses.replace(spec.case.options, gradient_threshold=0.0)
    return dataclasses.replace(spec, case=dataclasses.replace(spec.case, options=options))
