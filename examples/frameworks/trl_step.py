"""Steps of TRL's SFT and GRPO trainers on one GPU: with TRL's own head, which stores no logits either, and with ours.

python -m examples.frameworks.trl_step 4 16

The model is that of `hugging_face_step`. GRPO's completions are random ids in place of sampled ones: a step is a
forward, a backward and an update. Each run starts from the same weights: the first step's loss, norm of the gradient
and entropy are printed, and how far its gradient of the head is from that with TRL's. The arguments are how many
sequences of 4,096 tokens a step has; --rounds, how often the two heads take turns. Needs trl; --tiny is for a look on a
CPU.
"""

from __future__ import annotations

import argparse
import os

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import random
import statistics
import tempfile
import time
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import lce_torch_bridge.trl
from examples.frameworks.hugging_face_step import ON_GPU, forget_peak, memory, model_of, options, synchronize

STEPS, WARM = 4, 2  # of a run, and those of them that are not timed
LOGGED = ("loss", "grad_norm", "entropy")
transformers.logging.set_verbosity_error()


class Clock(TrainerCallback):
    """Seconds of each step, and the first step's gradient of the head, in the host's memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.gradient: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        if self.gradient is None:
            self.gradient = model.lm_head.weight.grad.cpu().float()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, size))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")


def trainer_of(kind: str, sequences: int, told: argparse.Namespace, folder: str) -> Any:
    """Of ``STEPS`` steps, from the same weights and of the same tokens each time."""
    drawn = random.Random(0)
    prompt_length = told.length // 8

    def ids(rows: int, length: int) -> list[list[int]]:
        return [[drawn.randrange(2, told.sizes["vocab_size"]) for _ in range(length)] for _ in range(rows)]

    prompts, completions = ids(sequences, prompt_length), ids(sequences, told.length - prompt_length)

    def complete(*_: Any) -> dict[str, Any]:
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(completion[0] % 7) for completion in completion_ids]

    common: dict[str, Any] = dict(
        output_dir=folder, per_device_train_batch_size=sequences, max_steps=STEPS, logging_steps=1, seed=0,
        learning_rate=1e-6, lr_scheduler_type="constant", optim="adamw_torch_fused", report_to=[], save_strategy="no",
        disable_tqdm=True, bf16=True, use_cpu=not ON_GPU, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    given: dict[str, Any] = dict(model=model_of(told.sizes), processing_class=tokenizer(told.sizes["vocab_size"]))
    rows = sequences * STEPS
    if kind == "SFT":
        own = SFTConfig(**common, max_length=told.length, dataset_kwargs={"skip_prepare_dataset": True})
        data = datasets.Dataset.from_dict({"input_ids": ids(rows, told.length)})
        return SFTTrainer(args=own, train_dataset=data, **given)
    own = GRPOConfig(
        **common, num_generations=4, steps_per_generation=1, max_completion_length=told.length - prompt_length
    )
    data = datasets.Dataset.from_dict({"prompt": [f"w{i}" for i in range(rows)]})
    return GRPOTrainer(args=own, train_dataset=data, reward_funcs=reward, rollout_func=complete, **given)


def run(kind: str, sequences: int, told: argparse.Namespace) -> tuple[Clock, str, dict[str, float]]:
    """The clock, memory, and what the first step logs."""
    forget_peak()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(kind, sequences, told, folder)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return clock, memory(), {name: float(first[name]) for name in LOGGED}


def measure(kind: str, sequences: int, told: argparse.Namespace) -> None:
    """Prints milliseconds a step, tokens per second and memory, of TRL's head and of ours in turns."""
    seconds: dict[str, list[float]] = {"TRL's head": [], "our head": []}
    want = None
    for turn in range(told.rounds):
        for name in list(seconds):
            installed = lce_torch_bridge.trl.install() if name == "our head" else None
            before = 0 if installed is None else installed.calls
            title = f"{sequences:3d} sequences, {kind}, {name}"
            try:
                clock, used, first = run(kind, sequences, told)
            except torch.cuda.OutOfMemoryError:
                print(f"{title}: out of memory", flush=True)
                del seconds[name]
                continue
            finally:
                if installed is not None:
                    installed.undo()
            assert installed is None or installed.calls >= before + STEPS
            seconds[name] += clock.seconds[WARM:]
            want = clock.gradient if want is None else want
            if turn == 0:
                logged = ", ".join(f"{what} {value:.5g}" for what, value in first.items())
                error = torch.dist(clock.gradient, want) / want.norm()
                print(f"{title}: {logged}, gradient of the head off by {error:.1e}; {used}", flush=True)
    for name, found in seconds.items():
        median = statistics.median(found)
        speed = f"{median * 1e3:.1f} ms, {sequences * told.length / median:,.0f} tokens/s"
        print(f"{sequences:3d} sequences, {kind}, {name}: {speed}", flush=True)


def main(told: argparse.Namespace) -> None:
    for kind in ("SFT", "GRPO"):
        for sequences in told.sequences:
            measure(kind, sequences, told)


if __name__ == "__main__":
    main(options(__doc__))
