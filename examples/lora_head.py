"""LoRA on the head: logits h·Wᵀ + s·(h·Aᵀ)·Bᵀ, with the weight frozen.

Adding s·B·A to the weight would also work, but in bfloat16 the sum would round away most of a small update.

python examples/lora_head.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lce_jax import linear_cross_entropy


def main(steps: int = 20, rank: int = 4, scale: float = 2.0) -> list[float]:
    """Fits random labels by the adapter alone; returns the losses in nats per token."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, weight = jax.random.normal(keys[0], (32, 16)), jax.random.normal(keys[1], (64, 16)) / 4
    labels = jax.random.randint(keys[2], (32,), 0, 64)
    adapter = {"a": jax.random.normal(keys[3], (16, rank)).T / 4, "b": jnp.zeros((64, rank))}
    optimizer = optax.adam(5e-2)

    @jax.jit
    @jax.value_and_grad
    def loss_of(adapter: dict[str, jax.Array]) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, lora=(adapter["a"], adapter["b"], scale))

    state, losses = optimizer.init(adapter), []
    for _ in range(steps):
        loss, gradients = loss_of(adapter)
        updates, state = optimizer.update(gradients, state)
        adapter = optax.apply_updates(adapter, updates)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
