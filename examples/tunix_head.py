"""Tunix (0.1.7): its trainers without logits, for the models that sow their final hidden states (Gemma, Qwen).

    trainer = PeftTrainer(model, optimizer, config).with_gen_model_input_fn(...).with_loss_fn(tunix_head.loss)

    with tunix_head.without_logits():  # GRPOLearner: policy, old policy and reference
        GRPOLearner(...).train(dataset)

python examples/tunix_head.py
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import algo_core, common

from lce_jax import linear_cross_entropy, linear_logprobs, rows


def hidden_states(model: nnx.Module, *inputs: Any, **more: Any) -> jax.Array:
    """Returns final hidden states [B, L, D]. XLA leaves out the logits, because nothing reads them."""
    model(*inputs, **more, output_hidden_states=True)
    (sown,) = nnx.pop(model, nnx.Intermediate)["all_hidden_states"].get_value()
    return sown


def head(model: nnx.Module) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the head's weight in the dtype of the model's products, and options for its layout and softcap."""
    options: dict[str, Any] = {"logit_softcap": getattr(model.config, "final_logit_softcap", None)}
    layer = model.lm_head if hasattr(model, "lm_head") else model.embedder
    if adapters := [name for name, x in vars(layer).items() if isinstance(x, nnx.LoRAParam)]:
        raise NotImplementedError(
            f"the head holds {' and '.join(adapters)}, which this loss does not read: leave it out of LoraProvider's "
            "module_path, or give both to linear_cross_entropy(lora=), as in examples/lora_head.py"
        )
    if hasattr(model, "lm_head"):
        return model.lm_head.w.get_value().astype(model.config.dtype), options | {"weight_layout": "hv"}
    return model.embedder.input_embedding.get_value().astype(model.config.dtype), options


def loss(
    model: nnx.Module, input_tokens: jax.Array, input_mask: jax.Array, positions: jax.Array, attention_mask: jax.Array
) -> jax.Array:
    """Returns what `PeftTrainer` minimizes by default: the mean over the tokens in ``input_mask``."""
    hidden = hidden_states(model, input_tokens, positions, None, attention_mask)
    weight, options = head(model)
    return linear_cross_entropy(hidden[:, :-1], weight, input_tokens[:, 1:], where=input_mask[:, 1:] > 0, **options)


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature"))
def per_token_logps(
    graphdef: Any, state: Any, prompt_tokens: jax.Array, completion_tokens: jax.Array, pad_id: int, eos_id: int,
    images: None = None, stop_gradient: bool = True, return_logits: bool = False, segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None, temperature: float = 1.0,
) -> Any:  # fmt: skip
    """Replaces `tunix.rl.common.compute_per_token_logps`. It returns the entropy [B, L] in place of the logits.

    Packed sequences come with ``segment_ids`` and without prompts. The first token of each has a log-probability of 0.
    """
    if images is not None:
        raise NotImplementedError("this recipe takes no images: use Tunix's own function")
    model = nnx.merge(graphdef, state)
    packing = segment_ids, segment_positions
    tokens, positions, mask, seen = common.process_ids(prompt_tokens, completion_tokens, pad_id, eos_id, *packing)
    takes_segments = "segment_ids" in inspect.signature(model.__call__).parameters  # for its attention
    segments = {"segment_ids": seen if segment_ids is None else segment_ids} if takes_segments else {}
    hidden = hidden_states(model, tokens, positions, None, mask, **segments)
    weight, options = head(model)
    first = max(prompt_tokens.shape[1] - 1, 0)  # the row that predicts the first token of the completion
    labels = rows.next_tokens(tokens, segment_ids=segment_ids)[:, first:]
    out = linear_logprobs(
        hidden[:, first:], weight, labels, where=labels != -100,
        temperature=temperature or 1.0, entropy=return_logits, **options,
    )  # fmt: skip
    if stop_gradient:
        out = jax.lax.stop_gradient(out)

    def to_tokens(x: jax.Array) -> jax.Array:
        return rows.at_tokens(x, segment_ids=segment_ids)[:, -completion_tokens.shape[1] :]

    return (to_tokens(out.logprobs), to_tokens(out.entropy)) if return_logits else to_tokens(out.logprobs)


@contextlib.contextmanager
def without_logits() -> Iterator[None]:
    """Makes GRPO's policy, old policy and reference take their log-probabilities from `per_token_logps`."""
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return per_token_logps(*arguments, **named)

    with (
        mock.patch.object(common, "compute_per_token_logps", counted),
        mock.patch.object(algo_core, "compute_entropy_from_logits", lambda entropy: entropy),
    ):
        yield
    assert calls, "Tunix has not called compute_per_token_logps within without_logits()"


def main(steps: int = 3) -> list[float]:
    """Trains a small Qwen 3 with `PeftTrainer`; returns the losses in nats per token."""
    import optax
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=512, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def inputs(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
        mask = batch.input_tokens != 0
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    tokens = jax.random.randint(jax.random.key(1), (4, 32), 1, 512)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.arange(32) >= 8 + jnp.zeros_like(tokens))
    training = peft_trainer.TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-3), training)
    trainer.with_gen_model_input_fn(inputs).with_loss_fn(loss).train([batch] * steps)
    return [float(x) for x in trainer.metrics_logger.get_metric_history("", "loss", "train")]


if __name__ == "__main__":
    print("loss", *(f"{x:.3f}" for x in main()), "nats per token")
