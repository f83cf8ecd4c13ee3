"""Distillation of a larger model into a smaller one: from its top k, and by the exact KL of both heads.

python -m examples.distillation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.demo.text import Corpus, load_corpus, sample_windows
from lce_jax.flax.nnx import LMHead
from lce_jax.losses import distillation_loss

K = 256  # the teacher's most likely tokens; the more certain the teacher, the fewer suffice


class Model(nnx.Module):
    def __init__(self, vocab: int, size: int, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(vocab, size, rngs=rngs)
        self.trunk = nnx.RNN(nnx.GRUCell(size, size, rngs=rngs))
        self.head = LMHead.tied(self.embed)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.trunk(self.embed(tokens))


def from_labels(model: Model, tokens: jax.Array, _: Any) -> jax.Array:
    """Returns the cross entropy of the text, without a teacher."""
    return model.head.loss(model(tokens[:, :-1]), tokens[:, 1:])


def from_topk(student: Model, tokens: jax.Array, teacher: Model) -> jax.Array:
    """Returns the mean of the cross entropy and of the divergence over the teacher's top k, the rest as one bin."""
    top = teacher.head.topk(teacher(tokens[:, :-1]), K)
    out = student.head.logprobs(student(tokens[:, :-1]), tokens[:, 1:], candidates=top.ids, entropy=False)
    return jnp.mean(0.5 * distillation_loss(out.candidate_logprobs, top.logprobs, top.ids) - 0.5 * out.logprobs)


def from_both_heads(student: Model, tokens: jax.Array, teacher: Model) -> jax.Array:
    """Returns the divergence over the whole vocabulary from both heads, without storing logits."""
    return student.head.kl(student(tokens[:, :-1]), teacher.head, teacher(tokens[:, :-1])).mean()


def train(model: Model, objective: Callable[..., jax.Array], corpus: Corpus, steps: int, teacher: Any) -> None:
    """Trains on the same text in the same order with any objective."""
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(1e-2, steps)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, teacher: Any) -> None:
        gradients = nnx.grad(objective)(model, tokens, teacher)
        optimizer.update(model, gradients)

    rng = np.random.default_rng(0)
    for _ in range(steps):
        step(model, optimizer, jnp.asarray(sample_windows(corpus.train, rng, 16, 65)), teacher)


def main(vocab_size: int = 4000, steps: int = 100) -> dict[str, tuple[float, float]]:
    """Returns each model's loss and exact KL from the teacher, on held-out text in nats per token."""
    corpus = load_corpus(vocab_size)
    held_out = jnp.asarray(sample_windows(corpus.held_out, np.random.default_rng(1), 64, 65))
    teacher = Model(corpus.vocab_size, 192, seed=0)
    train(teacher, from_labels, corpus, 2 * steps, None)

    @nnx.jit
    def measure(model: Model, teacher: Model) -> tuple[jax.Array, jax.Array]:
        return from_labels(model, held_out, None), from_both_heads(model, held_out, teacher)

    results = {"student, untrained": measure(Model(corpus.vocab_size, 48, seed=1), teacher)}
    for objective in (from_labels, from_topk, from_both_heads):
        student = Model(corpus.vocab_size, 48, seed=1)
        train(student, objective, corpus, steps, teacher)
        results[f"student, {objective.__name__}"] = measure(student, teacher)
    return {name: (float(loss), float(kl)) for name, (loss, kl) in results.items()}


if __name__ == "__main__":
    for name, (loss, kl) in main().items():
        print(f"{name:28s} loss {loss:5.3f}   KL from the teacher {kl:5.3f}")
