"""Phase 2: GRPO-style reinforcement learning, with log-probabilities and entropy from ``model.head.logprobs``.

Each step samples a group of completions per prompt and computes their rewards. It then takes a few clipped
policy-gradient steps on the advantage of each completion over its group (Shao et al., "DeepSeekMath", 2024), with an
entropy bonus and without a reference model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.demo import reward
from examples.demo.model import Transformer, put_on_mesh, round_up
from examples.demo.text import sample_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax.sharding import Mesh

    from examples.demo.text import Corpus
    from lce_jax import LogprobOutput
    from lce_jax.types._shapes import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class RlConfig:
    """Sizes of a rollout and the weights of its loss."""

    steps: int
    prompts: int = 4
    group: int = 8  # completions per prompt
    prompt_length: int = 32
    completion_length: int = 32
    temperature: float = 0.5  # of the policy, in samples, log-probabilities and entropy
    minibatches: int = 2  # from the second on, the policy has changed, so the ratio is not 1
    learning_rate: float = 3e-4
    clip: float = 0.2
    entropy_bonus: float = 0.01

    def fit_to_mesh(self, mesh: Mesh) -> RlConfig:
        """Returns a copy whose rollouts and minibatches divide by the mesh's data axis."""
        return dataclasses.replace(self, prompts=round_up(self.prompts, self.minibatches * mesh.shape["data"]))


class Rollout(NamedTuple):
    """Sampled sequences with their prompts, and the update's operands for each token except the first."""

    tokens: Int[Array, "B S"]
    where: Bool[Array, "B S-1"]  # which tokens the policy sampled
    advantages: Float[Array, "B"]
    old_logprobs: Float[Array, "B S-1"]


class RlMetrics(NamedTuple):
    """The mean reward of one step's completions, and the policy's entropy on them in nats per token."""

    reward: float
    entropy: float


@nnx.jit(static_argnums=3)
def sample(model: Transformer, prompts: Int[Array, "B P"], key: Array, config: RlConfig) -> Int[Array, "B C"]:
    """Samples completions of the prompts, by a scan over positions with a cache of keys and values."""
    batch, prompt_length = prompts.shape
    length = config.completion_length
    hidden, cache = model.extend(prompts, model.empty_cache(batch, prompt_length + length), 0)

    def step(carry: tuple, xs: tuple) -> tuple[tuple, Array]:
        hidden, cache = carry
        key, position = xs
        tokens = draw_tokens(key, model.head(hidden) / config.temperature)
        hidden, cache = model.extend(tokens[:, None], cache, position)
        return (hidden[:, -1], cache), tokens

    xs = (jax.random.split(key, length), prompt_length + jnp.arange(length))
    _, completions = jax.lax.scan(step, (hidden[:, -1], cache), xs)
    return completions.T


def draw_tokens(key: Array, logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Draws one token per row.

    `jax.random.categorical` would draw a number per logit, which would be most of a rollout's time on a CPU.
    """
    cumulative = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
    threshold = cumulative[:, -1:] * jax.random.uniform(key, (len(logits), 1))
    return jnp.sum(cumulative < threshold, axis=-1)


def policy(
    model: Transformer, tokens: Int[Array, "B S"], where: Bool[Array, "B S-1"], config: RlConfig, entropy: bool = True
) -> LogprobOutput:
    """Returns the log-probability of each sampled token, and the entropy of the distribution it was sampled from."""
    hidden = model(tokens[:, :-1])
    return model.head.logprobs(hidden, tokens[:, 1:], where=where, temperature=config.temperature, entropy=entropy)


def policy_loss(model: Transformer, rollout: Rollout, config: RlConfig) -> tuple[Array, Array]:
    """Returns PPO's clipped loss minus the entropy bonus, and the entropy; both are means over sampled tokens."""
    out = policy(model, rollout.tokens, rollout.where, config)
    ratio = jnp.exp(out.logprobs - rollout.old_logprobs)
    clipped = jnp.clip(ratio, 1.0 - config.clip, 1.0 + config.clip)
    advantages = rollout.advantages[:, None]
    surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
    gain, entropy = (jnp.sum(x) / jnp.sum(rollout.where) for x in (surrogate * rollout.where, out.entropy))
    return -gain - config.entropy_bonus * entropy, entropy


def group_advantages(rewards: Float[np.ndarray, "b"], group: int) -> Float[np.ndarray, "b"]:
    """Returns each reward minus the mean of its group, in standard deviations of the group."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def train(model: Transformer, corpus: Corpus, config: RlConfig, mesh: Mesh, seed: int) -> Iterator[RlMetrics]:
    """Trains ``model`` in place. Each item is one rollout with its updates."""
    adam = optax.adam(config.learning_rate)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adam), wrt=nnx.Param)
    old_policy = nnx.jit(functools.partial(policy, config=config, entropy=False))

    @nnx.jit
    def update(model: Transformer, optimizer: nnx.Optimizer, rollout: Rollout) -> Float[Array, ""]:
        loss_function = functools.partial(policy_loss, rollout=rollout, config=config)
        (_, entropy), gradients = nnx.value_and_grad(loss_function, has_aux=True)(model)
        optimizer.update(model, gradients)
        return entropy

    rng = np.random.default_rng((seed, 2))
    for key in jax.random.split(jax.random.fold_in(jax.random.key(seed), 2), config.steps):
        rollout, rewards = roll_out(model, old_policy, corpus, config, mesh, rng, key)
        parts = np.split(rng.permutation(len(rewards)), config.minibatches)
        minibatches = [jax.tree.map(lambda x, rows=rows: put_on_mesh(mesh, x[rows]), rollout) for rows in parts]
        entropies = [update(model, optimizer, minibatch) for minibatch in minibatches]
        yield RlMetrics(float(rewards.mean()), float(entropies[0]))


def roll_out(
    model: Transformer,
    old_policy: Callable[..., LogprobOutput],
    corpus: Corpus,
    config: RlConfig,
    mesh: Mesh,
    rng: np.random.Generator,
    key: Array,
) -> tuple[Rollout, Float[np.ndarray, "B"]]:
    """Samples a group of completions for each of a few prompts, and computes their rewards."""
    lengths = (config.prompt_length, config.completion_length)
    prompts, _ = sample_prompts(corpus, corpus.train, rng, config.prompts, *lengths)
    prompts = np.repeat(prompts, config.group, axis=0)
    completions = np.asarray(sample(model, put_on_mesh(mesh, prompts), key, config))
    rewards = reward.rewards(completions, corpus)
    tokens = np.concatenate([prompts, completions], axis=1)
    where = np.zeros(tokens[:, 1:].shape, bool)
    where[:, config.prompt_length - 1 :] = reward.generated(completions, corpus)
    old = old_policy(model, put_on_mesh(mesh, tokens), put_on_mesh(mesh, where))
    advantages = group_advantages(rewards, config.group)
    return Rollout(jnp.asarray(tokens), jnp.asarray(where), jnp.asarray(advantages), old.logprobs), rewards
