"""Language-model heads for Flax: import ``lce_jax.flax.nnx`` or ``lce_jax.flax.linen``."""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError("lce_jax.flax needs Flax >= 0.12.7: in the checkout, pip install '.[flax]'", name="flax")
