"""TRL's GRPO trainer without logits: one line, in each process, before the trainer trains.

python examples/trl_grpo.py
"""

from __future__ import annotations

from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import lce_torch_bridge.trl


def odd_words(completions: list[str], **_: Any) -> list[float]:
    """Returns the reward of each answer, its number of odd words."""
    return [float(sum(word[-1] in "13579" for word in text.split())) for text in completions]


def main(steps: int = 2) -> list[float]:
    """Trains a small Qwen 3 with `GRPOTrainer`, rewarded for odd words; returns the losses."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(254))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1))

    installed = lce_torch_bridge.trl.install()
    config = GRPOConfig(
        output_dir="trl-out", per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        max_steps=steps, logging_steps=1, learning_rate=1e-3, report_to=[], save_strategy="no",
        disable_tqdm=True, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, odd_words, config, datasets.Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert installed.calls >= steps, f"{installed.calls} calls in {steps} steps: TRL computes the head by itself"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("loss", *(f"{x:.4f}" for x in main()))
