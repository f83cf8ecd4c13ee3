"""TRL's trainers with TRL's own function and with `lce_torch_bridge.trl`, in one process; prints JSON.

``python -m examples.frameworks.trl_worker``, in an environment with trl.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")

import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import datasets
import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.trainer import distillation_trainer, utils

from examples import trl_grpo
from lce_torch_bridge import trl as ours

STEPS = 3
STOCK, STOCK_DIVERGENCE = utils._ChunkedLogProbFunction, distillation_trainer.ChunkedDivergenceFunction


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=1)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")


def gap(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).abs() / y.abs().clamp(min=1)).max().item()


def fused_head() -> dict[str, Any]:
    """Compares all fields and gradients of `add_fused_lm_head`."""
    head = model()
    utils.add_fused_lm_head(head, temperature=0.8, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(16) < 4, -100)
    results = []
    for function in (ours._Logprobs, STOCK):
        utils._ChunkedLogProbFunction = function
        head.zero_grad()
        out = head(tokens, labels=labels, fused_lm_head=True)
        (out.loss - 0.1 * out.entropy.sum()).backward()
        results.append((out, [x.grad.clone() for x in head.parameters()]))
    (got, grads), (want, want_grads) = results
    return {
        "fields": max(gap(getattr(got, name), getattr(want, name)) for name in ("log_probs", "entropy", "mean_logits")),
        "top1": torch.equal(got.is_top1, want.is_top1),
        "gradients": max(((x - y).norm() / y.norm()).item() for x, y in zip(grads, want_grads, strict=True)),
    }


PAIRS = {"prompt": [f"w{i} w{i + 1}" for i in range(12)], "chosen": [f"w{i + 2} w{i}" for i in range(12)]}
DATA: dict[str, dict[str, list[Any]]] = {
    "GRPO": {"prompt": PAIRS["prompt"]},
    "RLOO": {"prompt": PAIRS["prompt"]},
    "SFT": {"text": [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(12)]},
    "KTO": {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [i % 2 == 0 for i in range(12)]},
    "DPO": PAIRS | {"rejected": [f"w{i + 5} w{i + 7} w{i}" for i in range(12)]},
}
SAMPLED = {"GRPO", "RLOO"}
BETAS = {"forward KL": 0.0, "JSD": 0.3, "reverse KL": 1.0}  # of the distillation trainer


def train(name: str, reference: str) -> tuple[list[float], torch.Tensor]:
    """Trains. Returns the losses, and the head's weight after the steps."""
    sampling: dict[str, Any] = dict(num_generations=4, max_completion_length=6, temperature=0.9)
    fields = sampling if name in SAMPLED else {}
    if name != "SFT":
        fields |= dict(beta=0.1)
    config = getattr(trl, f"{name}Config")(
        output_dir=f"{reference}/out", per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, seed=0, **fields,
    )  # fmt: skip
    inputs: dict[str, Any] = dict(args=config, processing_class=tokenizer(), train_dataset=data(name))
    if name in SAMPLED:
        inputs |= dict(reward_funcs=trl_grpo.odd_words)
    torch.manual_seed(0)
    trainer = getattr(trl, f"{name}Trainer")(Qwen3ForCausalLM.from_pretrained(reference), **inputs)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [float(x) for x in losses], trainer.model.lm_head.weight.detach().clone()


def data(name: str) -> datasets.Dataset:
    return datasets.Dataset.from_dict(DATA[name])


def distil(beta: float, reference: str) -> tuple[list[float], torch.Tensor]:
    """Distils in three steps on the student's answers, with another model as the teacher. Returns what `train` does."""
    config = trl.DistillationConfig(
        output_dir=f"{reference}/out", per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, beta=beta,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, seed=0,
        max_completion_length=6, temperature=0.9,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = trl.DistillationTrainer(
        Qwen3ForCausalLM.from_pretrained(reference), teacher_model=model(seed=1), args=config,
        processing_class=tokenizer(), train_dataset=datasets.Dataset.from_dict({"prompt": PAIRS["prompt"]}),
    )  # fmt: skip
    trainer.train()
    return losses_and_entropies(trainer), trainer.model.lm_head.weight.detach().clone()


def losses_and_entropies(trainer: Any) -> list[float]:
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [float(entry[name]) for entry in logged for name in ("loss", "entropy")]


def compare(name: str, reference: str, start: torch.Tensor) -> dict[str, Any]:
    """Compares the losses of three steps. A wrong gradient in the first step would show in the next losses."""
    utils._ChunkedLogProbFunction, distillation_trainer.ChunkedDivergenceFunction = STOCK, STOCK_DIVERGENCE
    run = functools.partial(distil, BETAS[name]) if name in BETAS else functools.partial(train, name)
    want, weight = run(reference)
    least = 1e-3 if name in BETAS else 1.0  # the other losses are about 0 by design
    with ours.install() as installed:
        before = installed.calls
        got, _ = run(reference)
    return {
        "losses": max(abs(x - y) / max(abs(y), least) for x, y in zip(got, want, strict=True)),
        "moved": ((weight - start).norm() / start.norm()).item(),
        "steps": len(got) // (2 if name in BETAS else 1),
        "calls": installed.calls - before,
    }


def main() -> None:
    results: dict[str, Any] = {"fused head": fused_head()}
    with tempfile.TemporaryDirectory() as folder:
        first: Callable[[], Any] = model
        first().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        start = first().lm_head.weight.detach().clone()
        results |= {name: compare(name, folder, start) for name in (*DATA, *BETAS)}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where the program writes trl-out
        results["program"] = trl_grpo.main()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
