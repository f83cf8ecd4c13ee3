"""Fine-tuning with the Trainer of Hugging Face, without logits: the model returns its loss in place of them.

python examples/hugging_face_trainer.py
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from lce_torch_bridge import linear_cross_entropy

calls = 0  # in this process


def check_head(head: Any) -> None:
    """Refuses a head that is more than its weight and bias: these alone are read, so an adapter would not train."""
    copies = getattr(head, "modules_to_save", None)  # PEFT trains a copy, and `head.weight` is the copy's
    for layer in [head] if copies is None else copies.values():
        forward = getattr(layer, "_old_forward", layer.forward)  # accelerate puts its own around it
        hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
        hooked = any(not hook.__module__.startswith("torch.distributed") for hook in hooks)
        if hooked or getattr(forward, "__func__", None) is not torch.nn.Linear.forward:
            raise NotImplementedError(
                f"the head, {type(layer)}, is more than its weight and bias: leave it out of target_modules "
                "(modules_to_save trains all of it), of quantization and of hooks, or merge_and_unload() an adapter"
            )


def without_logits(model: PreTrainedModel) -> PreTrainedModel:
    """Given labels, ``model`` returns a loss and no logits; without labels it is as before, for ``generate``.

    For causal language models whose head is a linear layer, before the Trainer wraps them (DDP, FSDP2).
    """
    check_head(model.get_output_embeddings())
    stock = model.forward
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "output_router_logits"):
        if getattr(config, name, None) not in (None, False, 1):
            raise NotImplementedError(f"{name}={getattr(config, name)}: this recipe's loss leaves it out")

    @functools.wraps(type(model).forward)  # the Trainer reads the signature
    def forward(*arguments: Any, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        global calls
        if labels is None:
            return stock(*arguments, **inputs)
        calls += 1
        head = model.get_output_embeddings()  # at each call, because PEFT may replace it later
        check_head(head)
        hidden = model.base_model(*arguments, **inputs, use_cache=False).last_hidden_state
        total = linear_cross_entropy(  # the hidden state of a token predicts the next one
            hidden[:, :-1], head.weight, labels[:, 1:], bias=head.bias, logit_softcap=softcap, reduction="sum"
        )
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=total / count)

    model.forward = forward
    return model


def main(steps: int = 4, change: Any = without_logits) -> list[float]:
    """Teaches a small Qwen 3 to count, in micro-batches of unequal numbers of labels; returns the losses."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = change(Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)))
    tokens = (torch.arange(16)[:, None] * 7 + torch.arange(16)) % 64
    labels = tokens.where(torch.arange(16) >= 2 + torch.arange(16)[:, None] // 2, -100)  # the prompts do not count
    rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        told = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1,
            learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, told, train_dataset=rows)
        trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    assert calls, "the Trainer computes the loss of the model's logits by itself"
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
