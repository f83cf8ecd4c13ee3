"""TRL 1.16 with this package's head: its GRPO, RLOO, SFT, KTO and DPO trainers compute no logits of their own.

TRL has no switch: each of these trainers gives its model a fused head, and the head calls one function. Before the
trainer trains, in each process:

    import trl_head
    trl_head.install()

python examples/trl_head.py
"""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge import linear_logprobs

calls = 0  # in this process


class Logprobs:
    """In place of ``trl.trainer.utils._ChunkedLogProbFunction``."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        temperature: float, chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "mean_logits", "is_top1"),
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """[N] each: log-probabilities, entropy, log Σ p², mean logit, whether the target's logit is the largest."""
        global calls
        del chunk_size
        if calls == 0:
            print("trl_head: log-probabilities of the head come from lce_torch_bridge", flush=True)
        calls += 1
        out = linear_logprobs(
            hidden, weight.to(hidden.dtype), targets, bias=bias, temperature=temperature,
            logit_softcap=final_logit_softcapping, logit_scale=logit_scale,
            entropy="entropy" in outputs,
            stats=bool({"is_top1", "log_sum_sq_probs"} & set(outputs)), mean_logit="mean_logits" in outputs,
        )  # fmt: skip
        mean = None if out.mean_logit is None else out.mean_logit.detach()
        squares = out.sum_p_squared.log() if "log_sum_sq_probs" in outputs else None
        return out.logprobs, out.entropy, squares, mean, is_largest(out) if "is_top1" in outputs else None


def is_largest(out: Any) -> torch.Tensor:
    """Whether the label's logit is the largest. Logits closer than float32 sees beside lse count as equal."""
    rounding = 4 * torch.finfo(torch.float32).eps * torch.maximum(out.lse.abs(), out.max_logit.abs())
    return out.logprobs >= out.max_logit - out.lse - rounding


def install() -> None:
    """Puts `Logprobs` into TRL; the fused heads look it up at each call."""
    from trl.trainer import utils

    utils._ChunkedLogProbFunction = Logprobs


def odd_words(completions: list[str], **_: Any) -> list[float]:
    """The reward of each answer."""
    return [float(sum(word[-1] in "13579" for word in text.split())) for text in completions]


def main(steps: int = 2) -> list[float]:
    """Steps of `GRPOTrainer` on a small Qwen 3, rewarded for odd words; returns the losses."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(254))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1))

    install()
    told = GRPOConfig(
        output_dir="trl-out", per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        max_steps=steps, logging_steps=1, learning_rate=1e-3, report_to=[], save_strategy="no",
        disable_tqdm=True, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, odd_words, told, datasets.Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert calls >= steps, f"{calls} calls in {steps} steps: TRL computes the head by itself"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("loss", *(f"{x:.4f}" for x in main()))
