"""The small operands of a right call. Tests of mistakes change one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

HIDDEN, WEIGHT, LABELS = jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros((4,), jnp.int32)
MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
