"""A bfloat16 head's logits are float32 and never rounded: as with ``preferred_element_type``, or casts before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from lce_jax import linear_logprobs
from tests import oracle

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]  # rounding as users get it
T, H, V = 32, 64, 520


def stored(logits_of: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy from stored logits, all after these in float32."""
    logp = jax.nn.log_softmax(logits_of(hidden, weight).astype(jnp.float32))
    return jnp.take_along_axis(logp, labels[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, 1)


def preferred(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def cast_first(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(hidden.astype(jnp.float32), weight.astype(jnp.float32).T, precision="highest")


def rounded(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """To bfloat16. XLA may leave a cast there and back out; a reduced precision it may not."""
    return lax.reduce_precision(preferred(hidden, weight), exponent_bits=8, mantissa_bits=7)


def test_bfloat16_products_are_never_rounded() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (V, H)) * 3 / H**0.5).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (T,), 0, V)

    def run(results: Any) -> Any:
        def objective(hidden: jax.Array, weight: jax.Array) -> Any:
            logprobs, entropy = results(hidden, weight, labels)
            return jnp.sum(logprobs - 0.1 * entropy), (logprobs, entropy)

        (_, found), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(hidden, weight)
        return found, grads

    found, grads = run(lambda *operands: linear_logprobs(*operands)[:2])
    far = run(lambda *operands: stored(rounded, *operands))
    for way in (preferred, cast_first):
        want, wanted = run(lambda *operands, way=way: stored(way, *operands))
        for got, true, off in zip(found, want, far[0], strict=True):
            assert oracle.value_error(got, true) <= 5e-6
            assert oracle.value_error(off, true) >= 1e-3  # half a unit of 8 bits, of logits to 10
        for got, true in zip(grads, wanted, strict=True):
            assert oracle.relative_norm(got, true) <= 5e-3  # one rounding of dlogits, one of the gradient, in 8 bits
