"""NNX heads and a model with a head, which the tests of `lce_jax.flax.nnx` share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lce_jax.flax.nnx import LMHead
from tests.flax_cases import HIDDEN, PADDED, ROWS, VOCAB, Head, loss_from_logits, spoiled_padding


def make_head(use_bias=False, **options):
    head = LMHead(HIDDEN, VOCAB, weight_init=spoiled_padding, rngs=nnx.Rngs(0), use_bias=use_bias, **options)
    if use_bias:
        assert head.bias.shape == (ROWS,)
        assert not np.any(head.bias[...])
        bias = spoiled_padding(jax.random.key(3), (ROWS,), jnp.float32)
        head.bias[...] = jax.device_put(bias, head.bias[...].sharding)
    return head


def functional(head):
    """Returns the head as a function of its parameters."""
    graph, state = nnx.split(head)
    return Head(lambda state, name, *args, **options: getattr(nnx.merge(graph, state), name)(*args, **options), state)


class Model(nnx.Module):
    """An embedding, a layer, and a head that is tied to the embedding or has its own weight."""

    def __init__(self, tied, rngs, vocab_axis=None, **options):
        embedding_init = nnx.initializers.normal(1.0)
        if vocab_axis is not None:
            embedding_init = nnx.with_partitioning(embedding_init, (vocab_axis, None))
        self.embed = nnx.Embed(ROWS, HIDDEN, embedding_init=embedding_init, rngs=rngs)
        self.layer = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        if tied:
            self.head = LMHead.tied(self.embed, vocab_size=VOCAB, vocab_axis=vocab_axis, **options)
        else:
            self.head = LMHead(HIDDEN, VOCAB, vocab_axis=vocab_axis, rngs=rngs, **PADDED, **options)

    def __call__(self, tokens):
        return jnp.tanh(self.layer(self.embed(tokens)))


def fused_loss(model, tokens, labels):
    return model.head.loss(model(tokens), labels, ignore_index=-100)


def stored_loss(model, tokens, labels):
    return loss_from_logits(model.head(model(tokens)), labels)
