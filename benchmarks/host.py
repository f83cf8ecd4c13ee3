"""``python -m benchmarks.host``: the host's time of a small call of the bridge that launches kernels directly.

It is the time until forward and backward have returned, while the GPU is idle. The time of a bare
``torch.autograd.Function`` with the same operands, results and gradients is subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lce_torch_bridge import launch_with, linear_logprobs

T, H, V = 256, 1024, 32_000
CALLS, ROUNDS = 200, 7


class Bare(torch.autograd.Function):
    """A function whose results and gradients are uninitialized memory."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns three results per token."""
        ctx.save_for_backward(hidden, weight)
        return tuple(hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Returns dhidden and dweight."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def time_call(call: Callable[[], Any]) -> float:
    """Returns the median time until a call returns, in microseconds."""
    seconds = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    """Times both in turns, and prints their medians and the difference."""
    launch_with("direct")
    hidden, weight = (torch.randn(n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (T, V))
    labels, seed = torch.randint(V, (T,), device="cuda"), torch.ones(T, device="cuda")

    def ours() -> Any:
        out: Any = linear_logprobs(hidden, weight, labels)
        return torch.autograd.grad(out[:3], (hidden, weight), [seed] * 3)

    def bare() -> Any:
        return torch.autograd.grad(Bare.apply(hidden, weight), (hidden, weight), [seed] * 3)

    time_call(ours), time_call(bare)
    rounds = [(time_call(ours), time_call(bare)) for _ in range(ROUNDS)]
    call, function = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(f"({T}, {H}, {V}) on {torch.cuda.get_device_name()}: {call:.0f} µs, a bare Function {function:.0f} µs")
    print(f"difference: {call - function:.0f} µs")


if __name__ == "__main__":
    main()
