"""Measures a model before, between and after the phases, on text and prompts that training never sees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.demo import reward, rl
from examples.demo.model import Transformer, put_on_mesh, round_up
from examples.demo.text import sample_prompts, sample_windows

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from examples.demo.rl import RlConfig
    from examples.demo.text import Corpus
    from lce_jax.types._shapes import Array, Float, Int


class Evaluation(NamedTuple):
    """A model's results on held-out files."""

    loss: float  # nats per token
    entropy: float  # of the predictions of those tokens, nats
    reward: float  # mean over completions
    example: str  # one completion


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Windows of text, and prompts in batches as large as a rollout. All models see the same windows and prompts."""

    corpus: Corpus
    config: RlConfig
    mesh: Mesh
    windows: Int[np.ndarray, "B S"]
    prompts: Int[np.ndarray, "R b P"]
    real_reward: float  # the mean reward of the real continuations of the prompts
    key: Array

    @classmethod
    def create(cls, corpus: Corpus, config: RlConfig, mesh: Mesh, seed: int) -> Evaluator:
        """Draws 64 windows of 128 tokens and their labels, and prompts for four batches of completions."""
        rng = np.random.default_rng((seed, 3))
        windows = sample_windows(corpus.held_out, rng, round_up(64, mesh.shape["data"]), 129)
        count = 4 * config.prompts * config.group
        prompts, real = sample_prompts(
            corpus, corpus.held_out, rng, count, config.prompt_length, config.completion_length
        )
        batches = prompts.reshape(4, -1, config.prompt_length)
        key = jax.random.fold_in(jax.random.key(seed), 3)
        return cls(corpus, config, mesh, windows, batches, float(reward.rewards(real, corpus).mean()), key)

    def __call__(self, model: Transformer) -> Evaluation:
        """Measures ``model``."""
        loss, entropy = _text_statistics(model, put_on_mesh(self.mesh, self.windows))
        keys = jax.random.split(self.key, len(self.prompts))
        batches = (put_on_mesh(self.mesh, prompts) for prompts in self.prompts)
        samples = [rl.sample(model, batch, key, self.config) for batch, key in zip(batches, keys, strict=True)]
        completions = np.concatenate(samples)
        example = self.corpus.tokenizer.decode(completions[0].tolist())
        return Evaluation(float(loss), float(entropy), float(reward.rewards(completions, self.corpus).mean()), example)


@nnx.jit
def _text_statistics(model: Transformer, tokens: Int[Array, "B S"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    out = model.head.logprobs(model(tokens[:, :-1]), tokens[:, 1:])
    return -jnp.mean(out.logprobs), jnp.mean(out.entropy)
