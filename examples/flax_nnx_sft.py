"""Fine-tuning of a Flax NNX model of your own: ``head.loss`` takes the place of logits and softmax.

python examples/flax_nnx_sft.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lce_jax.flax.nnx import LMHead


class Model(nnx.Module):
    """Any trunk; the head is tied to the embedding. ``LMHead(size, vocab, rngs=rngs)`` has its own weight."""

    def __init__(self, vocab: int, size: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, size, rngs=rngs)
        self.trunk = nnx.RNN(nnx.GRUCell(size, size, rngs=rngs))
        self.head = LMHead.tied(self.embed)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.trunk(self.embed(tokens))  # hidden states; `model.head(hidden)` gives logits for sampling


def loss_of(model: Model, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return model.head.loss(model(tokens[:, :-1]), tokens[:, 1:], where=mask[:, 1:])


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, mask)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 30) -> list[float]:
    """Teaches the model to count; returns the losses in nats per token."""
    model = Model(64, 32, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = (jnp.arange(8)[:, None] * 7 + jnp.arange(16)) % 64
    mask = jnp.arange(16) >= 4 + jnp.zeros_like(tokens)  # the prompt's tokens do not count
    return [float(step(model, optimizer, tokens, mask)) for _ in range(steps)]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
