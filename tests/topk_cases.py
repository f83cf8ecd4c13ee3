"""Operands of `linear_topk` whose logits are exact, and the one right answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def integers(num_tokens: Any, V: int, dtype: str, H: int = 6, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Draws hidden and weight of small integers: all products are exact, and most logits occur many times."""
    rng = np.random.default_rng(seed)
    leading = num_tokens if isinstance(num_tokens, tuple) else (num_tokens,)
    hidden, weight = rng.integers(-2, 3, (*leading, H)), rng.integers(-2, 3, (V, H))
    return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype)


def assert_exact(out: Any, hidden: Any, weight: Any, k: int) -> None:
    """Checks ids exactly, by logit and then by id, and log-probabilities and lse to float32's rounding."""
    z = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    ids = np.argsort(-z, axis=-1, kind="stable")[..., :k]
    lse = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    assert np.array_equal(out.ids, ids)
    assert np.max(np.abs(np.asarray(out.lse) - lse)) < 4e-6
    assert np.max(np.abs(np.asarray(out.logprobs) - (np.take_along_axis(z, ids, -1) - lse[..., None]))) < 4e-6
