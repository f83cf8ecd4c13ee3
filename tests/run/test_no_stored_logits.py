"""No function of a few ids, or of two heads, has an array of T x V: lowered for an H200 at a real shape."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import linear_kl, linear_logits, linear_logprobs, linear_topk
from tests.pairs import values_of

pytestmark = pytest.mark.usefixtures("hopper")

T, H, V, K = 8192, 4096, 151936, 64


def candidates(hidden: Any, weight: Any, ids: Any) -> Any:
    return linear_logprobs(hidden, weight, ids[:, 0], candidates=ids).candidate_logprobs


def divergence(direction: Any) -> Any:
    return lambda *operands: linear_kl(*operands[:2], *operands[:2], direction=direction)


def lowered(function: Any) -> str:
    struct = jax.ShapeDtypeStruct
    operands = struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), struct((T, K), "int32")
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def largest(function: Any, dtype: str = r"(?:bf|f|i|ui)\d+") -> int:
    """Elements of the largest tensor of the program."""
    shapes = re.findall(rf"tensor<((?:\d+x)+){dtype}>", lowered(function))
    return max(math.prod(map(int, dims[:-1].split("x"))) for dims in shapes)


FUNCTIONS = {"candidates": candidates, "linear_logits": linear_logits}
FUNCTIONS |= {f"linear_kl, {direction}": divergence(direction) for direction in ("forward", "reverse", "jsd", "tv")}


@pytest.mark.fast("linear_logits", "reverse")
@values_of("name", FUNCTIONS, slow=["linear_kl, forward", "linear_kl, jsd", "linear_kl, tv"])
def test_forward_and_backward(name: str) -> None:
    def step(hidden: Any, weight: Any, ids: Any) -> Any:
        def loss(hidden: Any, weight: Any) -> Any:
            return jnp.sum(FUNCTIONS[name](hidden, weight, ids))

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)

    assert largest(step) == V * H < T * V


def test_the_most_likely_and_what_would_be_seen() -> None:
    assert largest(lambda hidden, weight, _: linear_topk(hidden, weight, K)) == V * H
    assert largest(lambda hidden, weight, _: hidden @ weight.T) == T * V


def test_a_cache_is_in_the_dtype_of_the_weight() -> None:
    """The one array of all logits is the exponentials that ``cache_bytes`` asks for, and dlogits in their place."""

    def step(cache_bytes: int) -> Any:
        def loss(hidden: Any, weight: Any, ids: Any) -> Any:
            out = linear_logprobs(hidden, weight, ids[:, 0], implementation="xla", cache_bytes=cache_bytes)
            return jnp.sum(out.logprobs + out.entropy)

        return jax.grad(loss, argnums=(0, 1))

    assert largest(step(0)) == V * H < T * V
    assert largest(step(1 << 40), "bf16") == T * V
    assert largest(step(1 << 40), "f32") < V * H
