"""How far a trainer's log-probabilities are from its sampler's, if one thing differs between the two calls.

python examples/sampler_mismatch.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lce_jax import floors, linear_logprobs

TOKENS, SIZE, VOCAB, ROWS = 4096, 64, 1000, 1024  # the weight has 24 rows of padding
TEMPERATURE, TOP_P = 0.8, 0.95


def sample(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, their log-probabilities after temperature and top-p, and the smallest logit that top-p kept."""
    ordered = jnp.sort(logits, descending=True)
    probabilities = jax.nn.softmax(ordered / TEMPERATURE)
    before = jnp.cumsum(probabilities, -1) - probabilities  # the probability of all larger logits
    smallest = jnp.min(ordered, -1, where=before < TOP_P, initial=jnp.inf)
    allowed = jnp.where(logits >= smallest[:, None], logits / TEMPERATURE, -jnp.inf)
    tokens = jax.random.categorical(key, allowed)
    return tokens, jnp.take_along_axis(jax.nn.log_softmax(allowed), tokens[:, None], -1)[:, 0], smallest


def compare(trainer: jax.Array, sampler: jax.Array) -> dict[str, float]:
    """Returns what a trainer can log of two log-probabilities of each sampled token."""
    gap = trainer - sampler
    low, high = jnp.quantile(jnp.exp(gap), jnp.array([0.01, 0.99]))
    k3 = jnp.mean(jnp.expm1(gap) - gap)  # an estimate of KL(sampler ‖ trainer), never negative
    numbers = {"mean": jnp.mean(gap), "largest": jnp.max(jnp.abs(gap)), "low": low, "high": high, "k3": k3}
    return {name: float(x) for name, x in numbers.items()}


def measure() -> dict[str, dict[str, float]]:
    """Returns what `compare` finds for each way to call the trainer."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (TOKENS, SIZE), jnp.bfloat16)
    master = jnp.pad(jax.random.normal(keys[1], (VOCAB, SIZE)) * 2 / SIZE**0.5, ((0, ROWS - VOCAB), (0, 0)))
    weight = master.astype(jnp.bfloat16)
    logits = jnp.dot(hidden, weight[:VOCAB].T, preferred_element_type=jnp.float32)
    tokens, sampled, smallest = sample(logits, keys[2])
    floor = floors.of_smallest(smallest, "float32")
    options: dict[str, Any] = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "entropy": False}

    def train(weight: jax.Array, floor: Any = floor / TEMPERATURE, tokens: jax.Array = tokens, **others: Any) -> Any:
        return linear_logprobs(hidden, weight, tokens, logit_floor=floor, **(options | others)).logprobs

    rounded, of_rounded, least = sample(logits.astype(jnp.bfloat16).astype(jnp.float32), keys[2])
    least = floors.of_smallest(least, "bfloat16") / TEMPERATURE
    return {
        "the same on both sides": compare(train(weight), sampled),
        "sampler rounds logits to bfloat16": compare(train(weight, least, rounded), of_rounded),
        "trainer's head is float32": compare(train(master), sampled),
        "padding counted, no top-p": compare(train(weight, None, vocab_size=None), train(weight, None)),
        "top-p left out": compare(train(weight, None), sampled),
        "temperature left out": compare(train(weight, floor, temperature=1.0), sampled),
    }


def main() -> None:
    print(f"{'':34}{'mean gap':>9}{'largest':>9}  ratios, 1 % to 99 %{'k3':>9}")
    for name, x in measure().items():
        print(f"{name:34}{x['mean']:9.1e}{x['largest']:9.1e}{x['low']:10.3f} to {x['high']:.3f}{x['k3']:11.1e}")


if __name__ == "__main__":
    main()
