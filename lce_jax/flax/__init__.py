"""Language-model heads for Flax: import ``lce_jax.flax.nnx`` or ``lce_jax.flax.linen``; each needs flax installed."""
