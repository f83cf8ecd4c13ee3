"""Steps of TRL's SFT and GRPO trainers on one GPU: with TRL's own head, which stores no logits either, and with ours.

python -m examples.frameworks.trl_step 4 16

The model is the one of `hugging_face_step`. GRPO's completions are random ids, not sampled ones, so a step is a
forward, a backward and an update. All runs start from the same weights. They print the first step's loss, gradient norm
and entropy, and the distance of its head's gradient to the gradient with TRL's head. The arguments are the numbers of
sequences of 4,096 tokens in a step; --rounds says how often the two heads take turns. It needs trl; --tiny runs a small
model on a CPU.
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

STEPS, WARM = 4, 2  # the steps of a run, and its first steps that are not timed
LOGGED = ("loss", "grad_norm", "entropy")
transformers.logging.set_verbosity_error()


class Clock(TrainerCallback):
    """Records the seconds of each step, and the first step's gradient of the head, in the host's memory."""

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


def make_trainer(kind: str, sequences: int, arguments: argparse.Namespace, folder: str) -> Any:
    """Returns a trainer of ``STEPS`` steps, with the same weights and tokens each time."""
    drawn = random.Random(0)
    prompt_length = arguments.length // 8

    def ids(rows: int, length: int) -> list[list[int]]:
        return [[drawn.randrange(2, arguments.sizes["vocab_size"]) for _ in range(length)] for _ in range(rows)]

    prompts, completions = ids(sequences, prompt_length), ids(sequences, arguments.length - prompt_length)

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
    words = tokenizer(arguments.sizes["vocab_size"])
    inputs: dict[str, Any] = dict(model=model_of(arguments.sizes), processing_class=words)
    rows = sequences * STEPS
    if kind == "SFT":
        config = SFTConfig(**common, max_length=arguments.length, dataset_kwargs={"skip_prepare_dataset": True})
        data = datasets.Dataset.from_dict({"input_ids": ids(rows, arguments.length)})
        return SFTTrainer(args=config, train_dataset=data, **inputs)
    config = GRPOConfig(
        **common, num_generations=4, steps_per_generation=1, max_completion_length=arguments.length - prompt_length
    )
    data = datasets.Dataset.from_dict({"prompt": [f"w{i}" for i in range(rows)]})
    return GRPOTrainer(args=config, train_dataset=data, reward_funcs=reward, rollout_func=complete, **inputs)


def run(kind: str, sequences: int, arguments: argparse.Namespace) -> tuple[Clock, str, dict[str, float]]:
    """Trains. Returns the clock, the memory, and what the first step logs."""
    forget_peak()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, sequences, arguments, folder)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return clock, memory(), {name: float(first[name]) for name in LOGGED}


def measure(kind: str, sequences: int, arguments: argparse.Namespace) -> None:
    """Prints milliseconds a step, tokens per second and memory, of TRL's head and of ours in turns."""
    seconds: dict[str, list[float]] = {"TRL's head": [], "our head": []}
    want = None
    for turn in range(arguments.rounds):
        for name in list(seconds):
            installed = lce_torch_bridge.trl.install() if name == "our head" else None
            before = 0 if installed is None else installed.calls
            title = f"{sequences:3d} sequences, {kind}, {name}"
            try:
                clock, used, first = run(kind, sequences, arguments)
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
    for name, samples in seconds.items():
        median = statistics.median(samples)
        speed = f"{median * 1e3:.1f} ms, {sequences * arguments.length / median:,.0f} tokens/s"
        print(f"{sequences:3d} sequences, {kind}, {name}: {speed}", flush=True)


def main(arguments: argparse.Namespace) -> None:
    for kind in ("SFT", "GRPO"):
        for sequences in arguments.sequences:
            measure(kind, sequences, arguments)


if __name__ == "__main__":
    main(options(__doc__))
