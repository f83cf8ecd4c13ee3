"""AReaL's FSDP engine with logits and with `lce_torch_bridge.areal`; prints JSON.

``torchrun -m examples.frameworks.areal_worker BACKEND``, in an environment with areal. BACKEND is AReaL's name, such as
"fsdp:d2".
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")

import json
import logging
import sys
import tempfile
from typing import Any

import areal.engine
import torch
from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec
from areal.utils import stats_tracker
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

from lce_torch_bridge import areal as ours

STEPS = 3
LOGGED = ("loss/avg", "vocab_min_logits/avg", "vocab_max_logits/avg")


def make_model(folder: str) -> str:
    """Writes a small model's configuration and a tokenizer into a folder. Returns the folder."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen3Config(**sizes, **heads, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    return folder


def rows(rank: int) -> dict[str, torch.Tensor]:
    """Draws sequences of unequal lengths, other ones on each rank. The first four tokens are the prompt."""
    tokens = torch.randint(1, 128, (4, 24), generator=torch.Generator().manual_seed(rank))
    mask = torch.arange(24) < torch.tensor([24, 20, 13, 9])[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask, "loss_mask": mask & (torch.arange(24) >= 4)}


def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
    """Returns a loss of log-probabilities and entropy, with advantages of either sign."""
    counts = torch.roll(inputs["loss_mask"].bool(), -1, -1)
    advantage = torch.where(inputs["input_ids"] % 3 == 0, 1.0, -0.5)
    return -((logprobs * advantage + 0.1 * entropy) * counts).sum() / counts.sum()


def train(folder: str) -> dict[str, Any]:
    """Takes SFT steps and steps of a policy's loss, with the engine that AReaL's trainers use."""
    torch.manual_seed(0)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0, lr_scheduler_type="constant")
    config = TrainEngineConfig(
        experiment_name="tiny", trial_name="tiny", path=folder, attn_impl="sdpa", init_from_scratch=True,
        dtype="float32", optimizer=optimizer, temperature=0.7, backend=sys.argv[1],
        mb_spec=MicroBatchSpec(max_tokens_per_mb=48), gradient_checkpointing=False,
    )  # fmt: skip
    engine = areal.engine.FSDPLMEngine(config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4))
    rank, losses = int(os.environ["RANK"]), []
    for _ in range(STEPS):
        engine.train_lm([{name: x[i : i + 1] for name, x in rows(rank).items()} for i in range(4)])
        logged = stats_tracker.export_all(reduce_group=engine.data_parallel_group)
        losses.append([logged[f"sft/{name}"] for name in LOGGED])
    norms = [
        engine.train_batch(rows(rank), policy_loss, lambda x: x["loss_mask"].count_nonzero())["grad_norm"]
        for _ in range(STEPS)
    ]
    logprobs = engine.forward_batch(rows(rank))
    parts = {name: x.to_local().detach().clone() for name, x in engine.model.named_parameters()}
    return {"losses": losses, "norms": norms, "logprobs": logprobs, "parameters": parts, "engine": engine}


def relative_error(got: Any, want: Any) -> float:
    return ((got - want).norm() / want.norm()).item()


def main() -> None:
    logging.getLogger("lce_torch_bridge").addHandler(logging.StreamHandler(sys.stdout))
    with tempfile.TemporaryDirectory() as folder:
        want = train(make_model(folder))
        installed = ours.install()
        got = train(folder)
    results = {name: (got[name], want[name]) for name in ("losses", "norms")}
    results |= {"logprobs": relative_error(got["logprobs"], want["logprobs"])}
    results["parameters"] = max(relative_error(got["parameters"][name], x) for name, x in want["parameters"].items())
    (handle,) = installed.deferrals
    results |= {"served": handle.served, "stored": handle.stored}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
