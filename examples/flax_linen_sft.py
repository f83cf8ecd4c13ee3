"""Fine-tuning of a Flax Linen model of your own: the module returns its loss in place of logits.

python examples/flax_linen_sft.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from lce_jax.flax.linen import LMHead


class Model(nn.Module):
    """Any trunk, and a head with its own weight. ``LMHead.tied(self.embed)`` shares the embedding."""

    vocab: int
    size: int

    def setup(self) -> None:
        self.embed = nn.Embed(self.vocab, self.size)
        self.trunk = nn.RNN(nn.GRUCell(self.size))
        self.head = LMHead(self.size, self.vocab)

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = self.trunk(self.embed(tokens[:, :-1]))  # `self.head(hidden)` gives logits for sampling
        return self.head.loss(hidden, tokens[:, 1:], where=mask[:, 1:])


def main(steps: int = 30) -> list[float]:
    """Teaches the model to count; returns the losses in nats per token."""
    model, optimizer = Model(64, 32), optax.adam(1e-2)
    tokens = (jnp.arange(8)[:, None] * 7 + jnp.arange(16)) % 64
    mask = jnp.arange(16) >= 4 + jnp.zeros_like(tokens)  # the prompt's tokens do not count

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(model.apply)(parameters, tokens, mask)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    parameters = model.init(jax.random.key(0), tokens, mask)
    state, losses = optimizer.init(parameters), []
    for _ in range(steps):
        parameters, state, loss = step(parameters, state)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
