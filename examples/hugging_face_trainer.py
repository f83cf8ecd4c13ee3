"""Fine-tuning with the Trainer of Hugging Face, without logits: one line before the Trainer is made.

python examples/hugging_face_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import lce_torch_bridge.transformers


def main(steps: int = 4, patch: Any = lce_torch_bridge.transformers.patch) -> list[float]:
    """Teaches a small Qwen 3 to count, in micro-batches of unequal numbers of labels; returns the losses."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    patched = patch(model)
    tokens = (torch.arange(16)[:, None] * 7 + torch.arange(16)) % 64
    labels = tokens.where(torch.arange(16) >= 2 + torch.arange(16)[:, None] // 2, -100)  # the prompts do not count
    rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1,
            learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    assert patched.served >= 2 * steps, "the Trainer computes the loss of the model's logits by itself"
    assert not patched.stored, patched.places
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
