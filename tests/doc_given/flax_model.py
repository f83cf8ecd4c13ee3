"""A Flax model from tokens to hidden states, and a batch of tokens."""

import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    """An embedding and a layer over it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32768, 256, rngs=rngs)
        self.trunk = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.trunk(self.embed(tokens))


model = Model(nnx.Rngs(0))
tokens = jnp.arange(128).reshape(4, 32)
