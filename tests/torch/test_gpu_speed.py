"""The bridge's time and memory on a real GPU. ``pytest -s`` prints the figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import lce_jax
from lce_torch_bridge import linear_logprobs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._runtime import to_jax
from tests.torch import problem as p
from tests.torch.gpu_problem import draw

pytestmark = pytest.mark.gpu


def median_time(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Seconds until the result is there, and until the call returns."""
    whole, host = [], []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        host.append(time.perf_counter() - start)
        wait(result)
        whole.append(time.perf_counter() - start)
    return float(np.median(whole[3:])), float(np.median(host[3:]))


@pytest.mark.parametrize("implementation", ["mosaic_gpu"], indirect=True)
@pytest.mark.parametrize("cache_bytes", [0, 4 << 30])
def test_the_whole_call_is_as_fast_as_from_jax(implementation: str, cache_bytes: int) -> None:
    """Forward and backward at (4096, 4096, 151936), bfloat16: within 3 %. Memory and host time beside it."""
    T, H, V = 4096, 4096, 151_936
    problem = draw(T, H, V)
    seeds = p.seeds_like(problem.labels)
    leaves = problem.leaves()
    options = dict(implementation=implementation, cache_bytes=cache_bytes)

    @jax.jit
    def from_jax(hidden: Any, weight: Any, labels: Any, seeds: Any) -> Any:
        out, backward = jax.vjp(lambda h, w: lce_jax.linear_logprobs(h, w, labels, **options), hidden, weight)
        return out, backward(out._replace(logprobs=seeds[0], entropy=seeds[1], lse=seeds[2]))

    def from_torch() -> Any:
        out = linear_logprobs(*leaves, **options)
        return torch.autograd.grad(out[:3], leaves[:2], seeds)

    device = runtime.jax_device(problem.hidden.device)
    operands = [jax.device_put(np.asarray(to_jax(problem.labels.int())), device), [to_jax(seed) + 0 for seed in seeds]]
    operands = [to_jax(problem.hidden) + 0, to_jax(problem.weight) + 0, *operands]
    jax.block_until_ready(from_jax(*operands))
    from_torch()
    torch.cuda.synchronize()
    rounds = [
        (
            median_time(lambda: from_jax(*operands), jax.block_until_ready),
            median_time(from_torch, lambda _: torch.cuda.synchronize()),
        )
        for _ in range(3)
    ]
    (jax_time, jax_host), (torch_time, torch_host) = np.median(rounds, axis=0)
    torch.cuda.reset_peak_memory_stats()
    from_torch()
    torch.cuda.synchronize()
    mib = (torch.cuda.max_memory_allocated() >> 20, device.memory_stats()["peak_bytes_in_use"] >> 20)
    print(
        f"\n{implementation}, cache {cache_bytes >> 20} MiB, {torch.cuda.get_device_name()}: "
        f"JAX {jax_time * 1e3:.2f} ms, PyTorch {torch_time * 1e3:.2f} ms ({torch_time / jax_time - 1:+.2%}); "
        f"host {jax_host * 1e6:.0f} us and {torch_host * 1e6:.0f} us; peaks torch {mib[0]} MiB, JAX {mib[1]} MiB"
    )
    assert torch_time < 1.03 * jax_time


def test_host_time_of_a_call() -> None:
    """Without compiling or waiting for the GPU: 0.6 ms more than JAX's 0.1; the aim is 0.3.

    The host decides, and hosts of equal GPUs differ by a factor of two: the bound is in JAX's own time.
    """
    name = "mosaic_gpu"  # XLA's loops over a number of rows known at run time wait for the GPU
    problem = draw(4096, 512, 8192)
    labels = to_jax(problem.labels.int()) + 0
    hidden, weight = to_jax(problem.hidden) + 0, to_jax(problem.weight) + 0
    jitted = jax.jit(lambda h, w, y: lce_jax.linear_logprobs(h, w, y, implementation=name))
    leaves = problem.leaves()
    for call in (lambda: jitted(hidden, weight, labels), lambda: linear_logprobs(*leaves, implementation=name)):
        call()
    wait = lambda _: torch.cuda.synchronize()  # noqa: E731
    times = []
    for _ in range(5):
        _, from_jax = median_time(lambda: jitted(hidden, weight, labels), jax.block_until_ready)
        _, forward = median_time(lambda: linear_logprobs(*leaves, implementation=name), wait)
        times.append((from_jax, forward))
    from_jax, forward = np.median(times, axis=0)
    print(f"\nhost time: JAX {from_jax * 1e6:.0f} us, PyTorch {forward * 1e6:.0f} us")
    assert forward < 10 * from_jax


def test_time_and_memory_fall_with_the_kept_share(implementation: str) -> None:
    problem = draw(16384, 2048, 131_072)
    seeds = p.seeds_like(problem.labels)
    times = {}
    for share in (1.0, 0.25):
        rows = torch.randperm(16384, device="cuda")[: int(16384 * share)].sort().values

        def call(rows: torch.Tensor = rows) -> Any:
            return p.gradients(problem, seeds, implementation=implementation, where=rows)

        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times[share], _ = median_time(call, lambda _: torch.cuda.synchronize())
        mib = torch.cuda.max_memory_allocated() >> 20
        print(f"{implementation}: {share:.0%} kept: {times[share] * 1e3:.2f} ms, {mib} MiB of torch's")
    assert times[0.25] < 0.4 * times[1.0]
