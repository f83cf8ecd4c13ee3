"""Tunix's trainers with stored logits and with ``examples/tunix_head.py``, in one process; prints JSON.

``python -m examples.frameworks.tunix_worker``, in an environment with google-tunix.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4", HF_HUB_OFFLINE="1")

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, reshard, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.sft import peft_trainer, utils
from tunix.tests import test_common

from examples import tunix_head

STEPS, B, L = 5, 4, 24
CHUNK_BYTES = 1 << 20  # a loss keeps the exponentials of one chunk, by default of all tokens of so small a problem


def config(tied: bool, vocab: int) -> qwen3.ModelConfig:
    return qwen3.ModelConfig(
        num_layers=1, vocab_size=vocab, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=tied, dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip


def inputs(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
    mask = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def sft(tied: bool, loss: Callable[..., Any] | None, mesh: Any = None) -> tuple[list[float], Any]:
    """Trains five steps. Returns the losses, and the parameters after them."""
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        model = qwen3.Qwen3(config(tied, 256), rngs=nnx.Rngs(0))
        if mesh is not None:
            model = reshard.reshard_model_to_mesh(model, mesh)
        tokens = jax.random.randint(jax.random.key(1), (STEPS, B, L), 1, 256)
        mask = jnp.arange(L) >= jnp.arange(B)[:, None] + 3
        batches = [peft_trainer.TrainingInput(input_tokens=np.asarray(x), input_mask=np.asarray(mask)) for x in tokens]
        settings = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=STEPS)
        trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-3), settings).with_gen_model_input_fn(inputs)
        if loss is not None:
            trainer = trainer.with_loss_fn(loss)
        trainer.train(batches)
        losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    return [float(x) for x in losses], nnx.state(model, nnx.Param)


def grpo(fused: bool) -> tuple[list[float], Any]:
    """Trains with GRPOLearner, two passes over each rollout. Returns losses and KL divergences, and the parameters."""
    vocab = test_common.MockVocab()
    model, reference = (qwen3.Qwen3(config(True, vocab.GetPieceSize()), rngs=nnx.Rngs(seed)) for seed in (0, 1))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=model, reference=reference, tokenizer=vocab,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine="vanilla", offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(1e-1), eval_every_n_steps=100, max_steps=STEPS
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=0.9, seed=0
            ),
        ),
    )  # fmt: skip
    prompts = ["input string", "hello world", "My name", "hello there"] * STEPS
    dataset = grain.MapDataset.source(prompts).batch(2).map(lambda x: {"prompts": x, "answer": x})
    with tunix_head.without_logits() if fused else contextlib.nullcontext():
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            algo_config=grpo_learner.GRPOConfig(num_generations=2, num_iterations=2, beta=0.1),
            reward_fns=lambda completions, **_: [
                float(len(set(text.split()))) + i for i, text in enumerate(completions)
            ],
        )
        learner.train(dataset)
    logged = cluster.actor_trainer.metrics_logger
    history = [logged.get_metric_history("actor", name, "train") for name in ("loss", "kl")]
    return [float(x) for values in history for x in values], nnx.state(cluster.actor_trainer.model, nnx.Param)


def difference(got: tuple[list[float], Any], want: tuple[list[float], Any], start: Any) -> dict[str, Any]:
    """Returns the errors of the losses and, by norm, of the parameters, and how far training has moved the parameters.

    The error of a loss is relative to max(1, |loss|), because a loss of GRPO is a difference of gains of order 1.
    """
    losses = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(got[0], want[0], strict=True))

    def norm(x: Any, y: Any) -> float:
        moved = jax.tree.map(lambda a, b: jnp.sum((np.asarray(a) - np.asarray(b)) ** 2), x, y)
        return math.sqrt(sum(jax.tree.leaves(moved)))

    size = norm(want[1], jax.tree.map(jnp.zeros_like, want[1]))
    return {
        "losses": losses,
        "parameters": norm(got[1], want[1]) / size,
        "moved": norm(want[1], start) / size,
        "steps": len(want[0]),
    }


def largest_array(loss: Callable[..., Any]) -> int:
    """Returns the number of elements of the largest array in the compiled gradient of a loss."""
    graph, state = nnx.split(qwen3.Qwen3(config(False, 4096), rngs=nnx.Rngs(0)))
    tokens = jnp.ones((8, 128), jnp.int32)
    batch = inputs(peft_trainer.TrainingInput(input_tokens=tokens, input_mask=tokens > 0))
    program = jax.jit(jax.grad(lambda state: loss(nnx.merge(graph, state), **batch))).lower(state).compile().as_text()
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b(?:f32|pred)\[([\d,]+)\]", program))


def compare_packed() -> dict[str, float]:
    """Compares log-probabilities and gradients of two packed rows with Tunix's, at tokens that an answer may have."""
    graph, state = nnx.split(qwen3.Qwen3(config(True, 64), rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 1, 64)
    ids = jnp.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 2 + [2] * 10])
    places = jnp.array([[*range(5), *range(4), *range(3)], [*range(2), *range(10)]])
    counts = (ids > 0) & (places > 0)
    more: dict[str, Any] = {"segment_ids": ids, "segment_positions": places, "temperature": 0.7, "stop_gradient": False}

    def total(state: Any, function: Callable[..., Any]) -> Any:
        logps = function(graph, state, tokens[:, :0], tokens, 0, 1, **more)
        return jnp.sum(jnp.where(counts, logps, 0.0) * jnp.arange(1.0, 13.0)), logps

    functions = tunix_head.per_token_logps, common.compute_per_token_logps
    ((_, got), grads), ((_, want), want_grads) = (jax.value_and_grad(total, has_aux=True)(state, f) for f in functions)
    norms = [jnp.linalg.norm(x) for x in jax.tree.leaves(want_grads)]
    errors = [jnp.linalg.norm(x) for x in jax.tree.leaves(jax.tree.map(jnp.subtract, grads, want_grads))]
    return {
        "values": float(jnp.max(jnp.abs(jnp.where(counts, got - want, 0.0)))),
        "gradients": float(max(errors) / max(norms)),
        "firsts": float(jnp.max(jnp.abs(jnp.where(places == 0, got, 0.0)))),
    }


def main() -> None:
    results: dict[str, Any] = {"packed": compare_packed()}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2), ("fsdp", "tp"))
    for tied in (False, True):
        start = nnx.state(qwen3.Qwen3(config(tied, 256), rngs=nnx.Rngs(0)), nnx.Param)
        stock = sft(tied, None)
        name = "tied" if tied else "own head"
        results[f"SFT, {name}"] = difference(sft(tied, tunix_head.loss), stock, start)
        results[f"SFT, {name}, 2 x 2"] = difference(sft(tied, tunix_head.loss, mesh), stock, start)
    start = nnx.state(qwen3.Qwen3(config(True, 22), rngs=nnx.Rngs(0)), nnx.Param)
    stock = grpo(False)
    with mock.patch.object(tunix_head, "linear_logprobs", wraps=tunix_head.linear_logprobs) as traced:
        results["GRPO"] = difference(grpo(True), stock, start) | {"traced": traced.call_count, "last": stock[0][-1]}
    in_chunks = functools.partial(tunix_head.linear_cross_entropy, chunk_bytes=CHUNK_BYTES)
    with mock.patch.object(tunix_head, "linear_cross_entropy", in_chunks):
        results["largest array"] = [largest_array(x) for x in (tunix_head.loss, peft_trainer._default_loss_fn)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
