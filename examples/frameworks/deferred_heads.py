"""Times a head with deferred logits, the same functions called directly, and stored logits.

python -m examples.frameworks.deferred_heads

It measures cross entropy, and log-probabilities and entropy as TRL computes them from logits, with the gradients of
hidden states and weight: times and peak memory of a call, and the host's time of small calls, which the GPU does not
hide. Values are compared with stored logits first. --tiny runs small shapes on a CPU.
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
    """Returns the cross entropy of logits in the head's dtype."""
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def policy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns a loss of log-probabilities and entropies, as TRL computes them from float32 logits [b, s, V]."""
    logits = logits.float() / 0.9
    chosen = logits.gather(-1, labels[..., None]).squeeze(-1)
    logprobs = chosen - torch.stack([row.logsumexp(-1) for row in logits])
    chunks = [torch.log_softmax(chunk, -1) for chunk in logits.reshape(-1, logits.shape[-1]).split(128)]
    entropy = torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks])
    return -(logprobs.mean() + 0.01 * entropy.mean())


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a causal language model of Transformers, from float32 logits and the next tokens."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100
    )


def direct_cross_entropy(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Calls what `cross_entropy` of deferred logits calls."""
    return linear_cross_entropy(hidden, head.weight, labels)


def direct_shifted_cross_entropy(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes `shifted_cross_entropy` in one call."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return linear_cross_entropy(hidden, head.weight, labels, ignore_index=-100)


def direct_policy_loss(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes `policy_loss` in one call."""
    out: Any = linear_logprobs(hidden, head.weight, labels, temperature=0.9)
    return -(out.logprobs.mean() + 0.01 * out.entropy.mean())


PAIRS = {
    "cross entropy": (cross_entropy, direct_cross_entropy),
    "causal-LM loss": (shifted_cross_entropy, direct_shifted_cross_entropy),
    "policy loss": (policy_loss, direct_policy_loss),
}


def make_calls(
    logits_loss: Callable[..., Any], direct: Callable[..., Any], shape: tuple[int, int, int]
) -> dict[str, Any]:
    """Returns three calls, with the same operands, that return the loss and the gradients of hidden and weight."""
    tokens, size, vocab = shape
    torch.manual_seed(0)
    with torch.device(DEVICE):
        head = torch.nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(4, tokens // 4, size, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(0, vocab, (4, tokens // 4))
        served = torch.nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
    served.weight = head.weight
    defer_logits(served, strict=True)

    def differentiate(loss: Callable[[], torch.Tensor]) -> Any:
        value = loss()
        return value.detach(), *torch.autograd.grad(value, (hidden, head.weight))

    return {
        "stored": lambda: differentiate(lambda: logits_loss(head(hidden), labels)),
        "direct": lambda: differentiate(lambda: direct(head, hidden, labels)),
        "deferred": lambda: differentiate(lambda: logits_loss(served(hidden), labels)),
    }


def compare(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Prints the distances of loss and gradients from stored logits."""
    want = [x.float() for x in calls["stored"]()]
    for way, call in calls.items():
        errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(call(), want, strict=True)]
        print(f"{name}, {way}: loss {errors[0]:.1e}, gradients {errors[1]:.1e}, {errors[2]:.1e} from stored logits")


def measure(name: str, calls: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Times the calls in turns. Prints their milliseconds and their peak memory above operands."""
    samples: dict[str, list[float]] = {way: [] for way in calls}
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
            samples[way].append((time.perf_counter() - start) / 3)
    for way, seconds in samples.items():
        print(f"{name}, {way}: {statistics.median(seconds) * 1e3:.2f} ms, {peaks[way]:.2f} GiB", flush=True)


def measure_host(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Prints the host's microseconds of a call and its backward on an idle device."""
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
            calls = make_calls(*pair, shape)
            compare(f"{name} {shape}", calls)
            measure(f"{name} {shape}", calls, options.rounds)
        measure_host(f"{name} {SMALL}", make_calls(*pair, (64, 32, 512) if options.tiny else SMALL))


if __name__ == "__main__":
    main()
