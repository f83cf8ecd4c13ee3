"""`lce_jax.linear_kl` as the runner takes it: the student's head has gradients, the teacher's does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lce_jax._types import Primals
from lce_jax.call._kl_spec import KLSpec
from lce_jax.call._rows import Rows
from lce_jax.mathematics._kl import Pair
from lce_jax.programs import _kl
from lce_jax.programs._kl import Kept
from lce_jax.runner import _over_devices
from lce_jax.runner._derivative import Capability
from lce_jax.runner._over_devices import Kind, Program, spread

if TYPE_CHECKING:
    from lce_jax._shapes import Array

type Rest = tuple[Primals, Pair[Rows]]  # the teacher, and the rows of both


def forward(spec: KLSpec, student: Primals, rest: Rest, differentiated: bool) -> tuple[Array, Kept]:
    """The divergence of each token, and what a backward needs."""
    del differentiated

    def run(spec: KLSpec, student: Primals, rest: Rest) -> tuple[Array, Kept]:
        teacher, rows = rest
        return _kl.forward(spec, Pair(student, teacher), rows)

    own, others = _heads(spec)
    program = Program(run, (own, (others, Kind.TOKENS)), (Kind.RESULTS, Kind.TOKENS), joins=True)
    return spread(spec, program, student, rest)


def backward(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients."""

    def run(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
        teacher, rows = rest
        return _kl.backward(spec, Pair(student, teacher), rows, kept, cotangent)

    own, others = _heads(spec)
    program = Program(run, (own, (others, Kind.TOKENS), Kind.TOKENS, Kind.RESULTS), own)
    return spread(spec, program, student, rest, kept, cotangent)


def _of_no_tokens(spec: KLSpec, rest: Rest) -> Array:
    return jnp.zeros(rest[1].student.labels.shape, spec.dtype)


KL = Capability(forward, backward, _of_no_tokens)


def _heads(spec: KLSpec) -> tuple[Any, Any]:
    own, others = (_over_devices.head(model.options.vocab_dim) for model in spec.models)
    return own, others
