"""The function `lce_jax.explain`, and the command ``python -m lce_jax.explain``."""

from lce_jax.explain._call import explain

__all__ = ["explain"]
