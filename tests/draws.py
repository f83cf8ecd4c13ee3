"""Draws the arrays of test modules at their import, with NumPy, because JAX would compile a program for each shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


class Draws:
    """A sequence of arrays, the same in each run."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape), jnp.float32)

    def uniform(self, low: float, high: float, *shape: int) -> jax.Array:
        return jnp.asarray(self._rng.uniform(low, high, shape), jnp.float32)

    def integers(self, low: int, high: int, *shape: int) -> jax.Array:
        """From ``low`` to ``high - 1``."""
        return jnp.asarray(self._rng.integers(low, high, shape), jnp.int32)

    def chances(self, share: float, *shape: int) -> jax.Array:
        """True with this probability."""
        return jnp.asarray(self._rng.random(shape) < share)
