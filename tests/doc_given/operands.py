"""Hidden states, a head, labels and what an objective needs beside them; a mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

keys = jax.random.split(jax.random.key(0), 3)
hidden = jax.random.normal(keys[0], (4, 16, 64))
weight = jax.random.normal(keys[1], (512, 64)) / 8
labels = jax.random.randint(keys[2], (4, 16), 0, 512)
completion_mask = jnp.broadcast_to(jnp.arange(16) >= 8, labels.shape)
old_logprobs, advantages = jnp.full(labels.shape, -6.0), jnp.ones(labels.shape)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
