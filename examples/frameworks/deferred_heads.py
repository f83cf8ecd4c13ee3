"""A head with deferred logits beside the same functions called directly, and beside logits that are stored.

python -m examples.frameworks.deferred_heads

Cross entropy, and TRL's log-probabilities and entropy of logits, with the gradients of hidden states and weight: times
and peak memory of one call, and the host's time of small calls, which the GPU does not hide. --tiny is for a look on a
CPU. Values are compared with those of stored logits first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from examples.frameworks.hugging_face_step import DEVICE, ON_GPU, forget_peak, synchronize
from lce_torch_bridge import defer_logits, linear_cross_entropy, linear_logprobs

SHAPES = ((4096, 4096, 151936), (8192, 1024, 151936))  # tokens, hidden size, vocabulary
SMALL = (256, 1024, 32000)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of logits in the head's dtype."""
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def policy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of log-probabilities and entropies, as TRL computes both from float32 logits of [b, s, V]."""
    logits = logits.float() / 0.9
    chosen = logits.gather(-1, labels[..., None]).squeeze(-1)
    logprobs = chosen - torch.stack([row.logsumexp(-1) for row in logits])
    chunks = [torch.log_softmax(chunk, -1) for chunk in logits.reshape(-1, logits.shape[-1]).split(128)]
    entropy = torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks])
    return -(logprobs.mean() + 0.01 * entropy.mean())


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a causal language model of Transformers computes it: of float32 logits and the labels of the next tokens."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100
    )


def direct_cross_entropy(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What `cross_entropy` of deferred logits calls."""
    return linear_cross_entropy(hidden, head.weight, labels)


def direct_shifted_cross_entropy(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`shifted_cross_entropy` of one call."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return linear_cross_entropy(hidden, head.weight, labels, ignore_index=-100)


def direct_policy_loss(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`policy_loss` of one call."""
    out: Any = linear_logprobs(hidden, head.weight, labels, temperature=0.9)
    return -(out.logprobs.mean() + 0.01 * out.entropy.mean())


PAIRS = {
    "cross entropy": (cross_entropy, direct_cross_entropy),
    "causal-LM loss": (shifted_cross_entropy, direct_shifted_cross_entropy),
    "policy loss": (policy_loss, direct_policy_loss),
}


def ways(of_logits: Callable[..., Any], direct: Callable[..., Any], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Calls that return the loss and the gradients of hidden and weight: of the same numbers."""
    tokens, size, vocab = shape
    torch.manual_seed(0)
    with torch.device(DEVICE):
        head = torch.nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(4, tokens // 4, size, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(0, vocab, (4, tokens // 4))
        served = torch.nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
    served.weight = head.weight
    defer_logits(served, strict=True)

    def differentiated(loss: Callable[[], torch.Tensor]) -> Any:
        value = loss()
        return value.detach(), *torch.autograd.grad(value, (hidden, head.weight))

    return {
        "stored": lambda: differentiated(lambda: of_logits(head(hidden), labels)),
        "direct": lambda: differentiated(lambda: direct(head, hidden, labels)),
        "deferred": lambda: differentiated(lambda: of_logits(served(hidden), labels)),
    }


def compare(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Prints how far loss and gradients are from those of stored logits."""
    want = [x.float() for x in calls["stored"]()]
    for way, call in calls.items():
        errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(call(), want, strict=True)]
        print(f"{name}, {way}: loss {errors[0]:.1e}, gradients {errors[1]:.1e}, {errors[2]:.1e} from stored logits")


def measure(name: str, calls: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Prints milliseconds and the peak above operands, of each way in turns."""
    found: dict[str, list[float]] = {way: [] for way in calls}
    peaks = {}
    for way, call in calls.items():
        call()
        synchronize()
        forget_peak()
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        call()
        synchronize()
        peaks[way] = (torch.cuda.max_memory_allocated() - before) / 2**30 if ON_GPU else float("nan")
    for _ in range(rounds):
        for way, call in calls.items():
            call()
            synchronize()
            start = time.perf_counter()
            for _ in range(3):
                call()
            synchronize()
            found[way].append((time.perf_counter() - start) / 3)
    for way, seconds in found.items():
        print(f"{name}, {way}: {statistics.median(seconds) * 1e3:.2f} ms, {peaks[way]:.2f} GiB", flush=True)


def measure_host(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Prints the host's microseconds of a call and its backward, the device being ready."""
    for way, call in calls.items():
        seconds = []
        for _ in range(60):
            synchronize()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        print(f"{name}, {way}: {statistics.median(seconds[20:]) * 1e6:.0f} µs on the host", flush=True)


def main() -> None:
    """Prints the comparison and the times of each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shapes = ((64, 32, 512),) if options.tiny else SHAPES
    for name, pair in PAIRS.items():
        for shape in shapes:
            calls = ways(*pair, shape)
            compare(f"{name} {shape}", calls)
            measure(f"{name} {shape}", calls, options.rounds)
        measure_host(f"{name} {SMALL}", ways(*pair, (64, 32, 512) if options.tiny else SMALL))


if __name__ == "__main__":
    main()
