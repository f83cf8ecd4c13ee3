"""A training step of a causal language model of Transformers on one GPU: its own loss, Liger's and ours, in turns.

python -m examples.frameworks.hugging_face_step 4 16

Random weights of the sizes of Qwen 3 0.6B in bfloat16, sequences of 4,096 tokens, activation checkpoints, fused AdamW.
"Liger's body" is Liger's kernels for norms, activations and rotary embeddings as well. The argument is how many
sequences a step has. Needs transformers and liger-kernel, and 80 GB.
"""

from __future__ import annotations

import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from liger_kernel.transformers import apply_liger_kernel_to_qwen3
from liger_kernel.transformers.model.qwen3 import lce_forward
from transformers import Qwen3Config, Qwen3ForCausalLM

import lce_torch_bridge.transformers

LENGTH, ROUNDS, STEPS = 4096, 4, 2
SIZES: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960, use_cache=False,
)  # fmt: skip


def ways() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """A model, and its forward as it is, with Liger's head and with ours."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    stock = model.forward
    lce_torch_bridge.transformers.patch(model)
    return model, {"stock": stock, "Liger's head": types.MethodType(lce_forward, model), "our head": model.forward}


def measure(model: Any, forwards: dict[str, Callable[..., Any]], sequences: int) -> None:
    """Prints milliseconds a step, tokens per second and torch's peak; a way that does not fit says so."""
    ids = torch.randint(0, SIZES["vocab_size"], (sequences, LENGTH), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}

    def steps(name: str, count: int) -> None:
        model.forward = forwards[name]
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    for name in forwards:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            steps(name, 2)
        except torch.cuda.OutOfMemoryError:
            print(f"{sequences:3d} sequences, {name}: out of memory", flush=True)
            continue
        seconds[name], peaks[name] = [], torch.cuda.max_memory_allocated() / 2**30
    for _ in range(ROUNDS):
        for name, found in seconds.items():
            steps(name, 1)
            start = time.perf_counter()
            steps(name, STEPS)
            found.append((time.perf_counter() - start) / STEPS)
    for name, found in seconds.items():
        median = statistics.median(found)
        speed = f"{median * 1e3:.1f} ms, {sequences * LENGTH / median:,.0f} tokens/s, {peaks[name]:.1f} GiB"
        print(f"{sequences:3d} sequences, {name}: {speed}", flush=True)


def main(every: list[int]) -> None:
    """With the model's own body, then with Liger's."""
    for sequences in every:
        measure(*ways(), sequences)
    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    for sequences in every:
        model, forwards = ways()
        del forwards["stock"]
        measure(model, {f"Liger's body, {name}": forward for name, forward in forwards.items()}, sequences)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    main([int(word) for word in sys.argv[1:]] or [4, 16])
