"""Evaluation without logits: perplexity, entropy, and how often the label has the largest logit.

python examples/token_accuracy.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lce_jax import linear_logprobs


@jax.jit
def evaluate(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns means over the tokens whose label is not -100."""
    counts = labels != -100
    out = linear_logprobs(hidden, weight, labels, where=counts, stats=True)  # `correct` is one of the statistics
    total = jnp.maximum(counts.sum(), 1)
    return {
        "accuracy": jnp.sum(out.correct) / total,
        "perplexity": jnp.exp(-jnp.sum(out.logprobs) / total),
        "entropy": jnp.sum(out.entropy) / total,
    }


def main() -> dict[str, float]:
    """Evaluates hidden states that point at their labels, with noise."""
    keys = jax.random.split(jax.random.key(0), 3)
    weight = jax.random.normal(keys[0], (512, 32))
    labels = jax.random.randint(keys[1], (4, 64), 0, 512)
    hidden = weight[labels] / 8 + jax.random.normal(keys[2], (4, 64, 32)) / 2
    return {name: float(x) for name, x in evaluate(hidden, weight, labels.at[:, :8].set(-100)).items()}


if __name__ == "__main__":
    print(", ".join(f"{name} {value:.3f}" for name, value in main().items()))
