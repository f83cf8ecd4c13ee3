"""Speed and memory of the language-model head: ``python -m lce_jax.bench``."""
