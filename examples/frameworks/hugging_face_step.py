"""A training step of a causal language model of Transformers on one GPU: its own loss, Liger's and ours, in turns.

python -m examples.frameworks.hugging_face_step 4 16

The model has random weights with the sizes of Qwen 3 0.6B in bfloat16, sequences of 4,096 tokens, activation
checkpoints and fused AdamW. Loss and gradient of the head are compared before anything is timed. The arguments are the
numbers of sequences in a step; --rounds says how often the heads take turns. "Liger's body" also uses Liger's kernels
for norms, activations and rotary embeddings; --heads leaves it out. --experts takes a mixture of experts instead. It
needs transformers, liger-kernel and 80 GB; --tiny runs a small model on a CPU, without Liger.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lce_torch_bridge.transformers

STEPS = 2  # between two readings of the clock
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960, use_cache=False,
)  # fmt: skip
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32)  # fmt: skip


def options(document: str | None, *switches: str) -> argparse.Namespace:
    """Parses the options of this command and of `trl_step`, and adds the model's sizes and a sequence's length."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sequences", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=4)
    for switch in ("--tiny", *switches):
        parser.add_argument(switch, action="store_true")
    arguments = parser.parse_args()
    arguments.sizes, arguments.length = (SIZES | TINY, 64) if arguments.tiny else (SIZES, 4096)
    print(torch.cuda.get_device_name() if ON_GPU else "CPU", torch.__version__)
    return arguments


def model_of(sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16).train()


def mixture_of(sizes: dict[str, Any]) -> Any:
    """Returns Qwen 3's mixture of experts, eight layers of 16 experts, with its router's loss."""
    torch.manual_seed(0)
    moe = dict(num_hidden_layers=min(8, sizes["num_hidden_layers"]), num_experts=16, num_experts_per_tok=2,
               moe_intermediate_size=sizes["intermediate_size"] // 4, output_router_logits=True)  # fmt: skip
    with torch.device(DEVICE):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | moe)).to(torch.bfloat16).train()


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def forget_peak() -> None:
    gc.collect()  # a trainer refers to itself
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> str:
    """Returns the peak of torch's allocator, and the card's memory outside it: CUDA's context, libraries, JAX."""
    if not ON_GPU:
        return "no card"
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {outside / 2**30:.1f} GiB outside torch"


def ways(arguments: argparse.Namespace) -> tuple[Any, dict[str, Callable[[], None]]]:
    """Returns a model, and functions that make it train with its own head, with Liger's and with ours."""
    model = mixture_of(arguments.sizes) if arguments.experts else model_of(arguments.sizes)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    patched: list[Any] = []

    def stock() -> None:
        while patched:
            patched.pop().undo()
        vars(model).pop("forward", None)

    def liger() -> None:
        from liger_kernel.transformers.model.qwen3 import lce_forward

        stock()
        model.forward = types.MethodType(lce_forward, model)

    def ours() -> None:
        stock()
        patched.append(lce_torch_bridge.transformers.patch(model, strict=True))

    with_liger = {"Liger's head": liger} if ON_GPU and not arguments.experts else {}
    return model, {"stock": stock, **with_liger, "our head": ours}


def compare(model: Any, forwards: dict[str, Callable[[], None]], ids: torch.Tensor) -> list[str]:
    """Prints each loss, and its head gradient's distance to the first. Returns the heads that fit in memory."""
    fits: list[str] = []
    want = None  # in the host's memory
    for name, prepare in forwards.items():
        prepare()
        model.zero_grad(set_to_none=True)
        forget_peak()
        try:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        except torch.cuda.OutOfMemoryError:
            print(f"{len(ids):3d} sequences, {name}: out of memory", flush=True)
            continue
        got = model.lm_head.weight.grad.float()
        want = got.cpu() if want is None else want
        error = torch.dist(got, want.to(DEVICE)) / want.norm()
        fits.append(name)
        report = f"loss {loss.item():.5f}, gradient of the head {error:.1e} from that of {fits[0]}"
        print(f"{len(ids):3d} sequences, {name}: {report}", flush=True)
    return fits


def measure(model: Any, forwards: dict[str, Callable[[], None]], sequences: int, arguments: argparse.Namespace) -> None:
    """Prints milliseconds a step, tokens per second and memory."""
    ids = torch.randint(0, arguments.sizes["vocab_size"], (sequences, arguments.length), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    seconds: dict[str, list[float]] = {name: [] for name in compare(model, forwards, ids)}
    memories: dict[str, str] = {}

    def steps(name: str, count: int) -> None:
        forwards[name]()
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        synchronize()

    for name in seconds:
        forget_peak()
        steps(name, 2)
        memories[name] = memory()
    for _ in range(arguments.rounds):
        for name, samples in seconds.items():
            steps(name, 1)
            start = time.perf_counter()
            steps(name, STEPS)
            samples.append((time.perf_counter() - start) / STEPS)
    for name, samples in seconds.items():
        median = statistics.median(samples)
        speed = f"{median * 1e3:.1f} ms, {ids.numel() / median:,.0f} tokens/s, {memories[name]}"
        print(f"{sequences:3d} sequences, {name}: {speed}", flush=True)


def main(arguments: argparse.Namespace) -> None:
    """Measures the model's own body, then Liger's."""
    for sequences in arguments.sequences:
        measure(*ways(arguments), sequences, arguments)
    if arguments.heads or arguments.experts or not ON_GPU:
        return
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    for sequences in arguments.sequences:
        model, forwards = ways(arguments)
        del forwards["stock"]
        measure(model, {f"Liger's body, {name}": way for name, way in forwards.items()}, sequences, arguments)


if __name__ == "__main__":
    main(options(__doc__, "--heads", "--experts"))
