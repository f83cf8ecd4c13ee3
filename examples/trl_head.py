"""TRL 1.16 with this package's head: its GRPO, RLOO, SFT, KTO, DPO and distillation trainers compute no logits.

TRL has no switch: the first five give their models a fused head, which calls one function, and the distillation trainer
calls another. Before the trainer trains, in each process:

    import trl_head
    trl_head.install()

python examples/trl_head.py
"""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge import linear_entropy, linear_kl, linear_logprobs

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
        del chunk_size
        count("log-probabilities of the head")
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


class Divergence:
    """In place of ``trl.kernels.chunked_divergence.ChunkedDivergenceFunction``."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor, teacher_bias: torch.Tensor | None,
        beta: float, temperature: float = 1.0,
        logit_scale: float = 1.0, softcap: float | None = None,
        teacher_logit_scale: float = 1.0, teacher_softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """[N] each: the divergence, and the student's entropy without a gradient."""
        count("divergences")
        weight, teacher_weight = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        own: dict[str, Any] = {"temperature": temperature, "logit_scale": logit_scale, "logit_softcap": softcap}
        kl = linear_kl(
            hidden, weight, teacher_hidden, teacher_weight, bias=bias, teacher_bias=teacher_bias, **own,
            direction={0.0: "forward", 1.0: "reverse"}.get(beta, "jsd"), beta=beta if 0.0 < beta < 1.0 else None,
            teacher_logit_scale=teacher_logit_scale, teacher_logit_softcap=teacher_softcap,
        )  # fmt: skip
        with torch.no_grad():
            entropy, _ = linear_entropy(hidden, weight, bias=bias, **own)
        return kl, entropy


def count(what: str) -> None:
    """One call more, and a line of the first."""
    global calls
    if calls == 0:
        print(f"trl_head: {what} come from lce_torch_bridge", flush=True)
    calls += 1


def refuse_wrapped_head(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Torch calls it before a module becomes part of another, as when an adapter (LoRA) is put around a layer.

    TRL hands over the head's weight alone: an adapter around the head would neither count nor train. TRL's trainers
    refuse those of PEFT that are there before `install`.
    """
    head = model._modules.get(name)
    if module is None or not any(layer is head for layer in module.children()):
        return
    if hasattr(module, "modules_to_save") or type(module).__module__.startswith("torch."):
        return  # PEFT's copy in modules_to_save gives its own weight, and FSDP what it wraps
    if getattr(model, "get_output_embeddings", lambda: None)() is head:
        raise NotImplementedError(
            f"{type(module)} around {name}, whose weight alone is read: leave {name} out of target_modules"
        )


def install() -> None:
    """Puts `Logprobs` and `Divergence` into TRL, which looks them up at each call."""
    torch.nn.modules.module.register_module_module_registration_hook(refuse_wrapped_head)
    from trl.trainer import distillation_trainer, utils

    utils._ChunkedLogProbFunction = Logprobs
    distillation_trainer.ChunkedDivergenceFunction = Divergence


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
