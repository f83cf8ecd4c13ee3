"""The rows of the most likely tokens: this package, and a selection from stored logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.candidates import Candidate
from benchmarks.measure import compile_jax
from benchmarks.problem import TOPK_NAME, Problem, num_largest
from benchmarks.shapes import TOPK
from lce_jax import linear_topk

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def topk_candidates(problem: Problem) -> list[Candidate]:
    """`linear_topk`, and ``jax.lax.top_k`` of float32 logits."""
    softcap, k = problem.shape.head.logit_softcap, num_largest(problem.shape.head)

    def ours(hidden: Array, weight: Array) -> dict[str, Array]:
        top = linear_topk(hidden, weight, k, logit_softcap=softcap)
        return {TOPK_NAME: top.logprobs, "lse": top.lse, "ids": top.ids}

    def stored(hidden: Array, weight: Array) -> dict[str, Array]:
        z = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        z = z if softcap is None else softcap * jnp.tanh(z / softcap)
        largest, ids = lax.top_k(z, k)
        lse = jax.nn.logsumexp(z, axis=1)
        return {TOPK_NAME: largest - lse[:, None], "lse": lse, "ids": ids}

    def row(key: str, label: str, function: Callable[..., dict[str, Array]]) -> Candidate:
        compiled = functools.partial(compile_jax, function, problem.hidden, problem.weight)
        return Candidate(key, label, TOPK, compiled, results=_without_ids)

    return [
        row("ours", f"lce_jax.linear_topk, k {k}", ours),
        row("materialised", f"XLA, stored float32 logits, jax.lax.top_k, k {k}", stored),
    ]


def _without_ids(found: dict[str, Array]) -> dict[str, Array]:
    """The ids are an output too, but rounding may exchange two of them: the log-probabilities are compared."""
    return {name: x for name, x in found.items() if name != "ids"}
