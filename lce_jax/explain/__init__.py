"""`explain`, the function, which `lce_jax.explain` also names; and ``python -m lce_jax.explain``, a command."""

from lce_jax.explain._call import explain

__all__ = ["explain"]
