"""Every public function, compiled for TPUs that need not be there: `make test-tpu`. Nothing is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import UnsupportedError, explain
from lce_jax.explain import __main__ as command
from lce_jax.explain import _hlo
from lce_jax.explain._targets import TPUS
from tests.compiled import needs_libtpu

pytestmark = needs_libtpu
B, T, H, V, K = 2, 4096, 256, 32768, 8  # a tile has an eighth of the columns
SHAPES = {
    "hidden": ((B, T, H), jnp.bfloat16, P("data")),
    "weight": ((V, H), jnp.bfloat16, P("tensor")),
    "labels": ((B, T), jnp.int32, P("data")),
    "where": ((B, T), jnp.bool_, P("data")),
    "temperature": ((B, T), jnp.float32, P("data")),
    "ids": ((B, T, K), jnp.int32, P("data")),
}
ENTROPY_BONUS = 0.01

type Call = Callable[..., Any]


def function(name: str, sharded: bool) -> Any:
    return getattr(lce_jax, f"sharded_{name}" if sharded else name)


def logprobs(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    options |= {"where": given["where"], "temperature": given["temperature"], "logit_softcap": 30.0}
    out = function("linear_logprobs", sharded)(hidden, weight, given["labels"], **options)
    return jnp.sum(out.logprobs + ENTROPY_BONUS * out.entropy)


def candidates(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    out = function("linear_logprobs", sharded)(hidden, weight, given["labels"], candidates=given["ids"], **options)
    return jnp.sum(out.candidate_logprobs)


def cross_entropy(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    return function("linear_cross_entropy", sharded)(hidden, weight, given["labels"], label_smoothing=0.1, **options)


def loss(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    def of_token(logprob: Any, entropy: Any, _: Any) -> Any:
        return -logprob - ENTROPY_BONUS * entropy

    return function("linear_loss", sharded)(of_token, hidden, weight, given["labels"], where=given["where"], **options)[0]


def kl(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    teacher = jax.lax.stop_gradient((2 * hidden, weight))
    return jnp.sum(function("linear_kl", sharded)(hidden, weight, *teacher, where=given["where"], **options))


def logits(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    return jnp.sum(function("linear_logits", sharded)(hidden, weight, given["ids"], **options))


def topk(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    return function("linear_topk", sharded)(hidden, weight, K, where=given["where"], **options)


DIFFERENTIABLE: dict[str, Call] = {
    "linear_logprobs": logprobs, "candidates": candidates, "linear_cross_entropy": cross_entropy, "linear_loss": loss,
    "linear_kl": kl, "linear_logits": logits,
}  # fmt: skip
CALLS = DIFFERENTIABLE | {"linear_topk": topk}
