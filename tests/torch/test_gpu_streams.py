"""The bridge on a real GPU: the order of streams, time and memory. ``pytest -s`` prints the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import torch

import lce_jax
from lce_torch_bridge import linear_kl, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._dlpack import to_jax, to_torch_all
from tests.torch import problem as p
from tests.torch.gpu_problem import draw

pytestmark = pytest.mark.gpu


def busy(milliseconds: float = 3.0) -> None:
    """Work for the current stream, so that what is queued after it comes late."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def test_side_streams_are_waited_for(implementation: str) -> None:
    """0 wrong of 200: operands that a side stream is still writing, and results read on that stream."""
    problem = draw(512, 256, 4096)
    seeds = p.seeds_like(problem.labels)
    want, wanted = p.gradients(problem, seeds, implementation=implementation)
    wrong = 0
    for _ in range(200):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = p.Problem(torch.zeros_like(problem.hidden), torch.zeros_like(problem.weight), problem.labels)
            busy()
            late.hidden.copy_(problem.hidden)
            late.weight.copy_(problem.weight)
            out, grads = p.gradients(late, seeds, implementation=implementation)
            same = torch.stack([(a == b).all() for a, b in zip((*out[:3], *grads), (*want[:3], *wanted), strict=True)])
        torch.cuda.current_stream().wait_stream(stream)
        wrong += not bool(same.all())
    print(f"{implementation}: {wrong} wrong of 200 with side streams")
    assert wrong == 0


def test_threads_wait_for_their_own_streams(implementation: str) -> None:
    """0 wrong of 200: four threads at once, each with operands that a stream of its own is still writing."""
    hidden, weight, labels = draw(512, 256, 4096)
    each = [labels.roll(i) for i in range(4)]
    want = [linear_logprobs(hidden, weight, labels, implementation=implementation).logprobs for labels in each]
    torch.cuda.synchronize()

    def count_wrong(i: int) -> int:
        same = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                late = torch.zeros_like(hidden)
                busy()
                late.copy_(hidden)
                got = linear_logprobs(late, weight, each[i], implementation=implementation).logprobs
                same.append((got == want[i]).all())
            return len(same) - int(torch.stack(same).sum())

    with ThreadPoolExecutor(4) as threads:
        wrong = sum(threads.map(count_wrong, range(4)))
    print(f"{implementation}: {wrong} wrong of 200 in four threads")
    assert wrong == 0


def test_gradients_read_late_on_another_stream(implementation: str) -> None:
    """0 wrong of 50: dropped as soon as their reading is queued, while the next call begins on a stream of its own."""
    problem = draw(512, 256, 4096)
    problems = [problem, p.Problem(*(x.flip(0) for x in problem))]
    seeds = p.seeds_like(problem.labels)
    want = [grad for problem in problems for grad in p.gradients(problem, seeds, implementation=implementation)[1]]
    torch.cuda.synchronize()
    streams, wrong = [torch.cuda.Stream(), torch.cuda.Stream()], 0
    for _ in range(50):
        late = []
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                _, grads = p.gradients(problem, seeds, implementation=implementation)
                busy(20.0)  # longer than the host needs to launch the next call's last kernel
                late += [x.clone() for x in grads]
                del grads
        torch.cuda.synchronize()
        wrong += not all(map(torch.equal, late, want))
    print(f"{implementation}: {wrong} wrong of 50 read late")
    assert wrong == 0


def test_a_write_right_after_the_call(implementation: str) -> None:
    """0 wrong of 200: operands overwritten in place and freed while the GPU has not begun."""
    problem = draw(8192, 256, 4096)  # rows that need no padding: the programs read torch's memory
    seeds = p.seeds_like(problem.labels)
    want, wanted = p.gradients(problem, seeds, implementation=implementation)
    wrong = 0
    for _ in range(200):
        operands = [x.clone() for x in problem]
        busy(1.0)
        out = linear_logprobs(*operands, implementation=implementation)
        for operand in operands:
            operand.fill_(7)
        del operands, operand
        leaves = problem.leaves()
        objective = p.objective(linear_logprobs(*leaves, implementation=implementation), seeds)
        busy(1.0)
        grads = torch.autograd.grad(objective, leaves[:2])
        for leaf in leaves[:2]:
            leaf.detach().fill_(7.0)
        del leaves, objective
        torch.empty_like(problem.weight).fill_(3.0)  # takes the memory that was freed
        pairs = zip((*out[:3], *grads), (*want[:3], *wanted), strict=True)
        wrong += not all(torch.equal(a, b) for a, b in pairs)
    print(f"{implementation}: {wrong} wrong of 200 with writes right after the call")
    assert wrong == 0


def read_late(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    """From now on torch gets to what JAX lends it late: copies are queued, and the memory is JAX's again before."""

    def lent(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
        found = to_torch_all(arrays)
        busy(milliseconds)
        return found

    for module in (_programs,):
        monkeypatch.setattr(module, "to_torch_all", lent)


type Call = Callable[[], list[torch.Tensor]]


def chunks(dtype: torch.dtype) -> Call:
    """A loss of three chunks, and its gradients."""
    problem, advantages = draw(5000, 512, 16000, dtype), torch.linspace(-1, 1, 5000, device="cuda")
    chunk_bytes = p.bytes_of(2048, problem.weight)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return logprobs * x - 0.1 * entropy + 0.01 * lse**2

    def call() -> list[torch.Tensor]:
        leaves = problem.leaves()
        total, out = linear_loss(loss, *leaves, advantages, chunk_bytes=chunk_bytes, implementation="xla")
        return [total, *out[:3], *torch.autograd.grad(total, leaves[:2])]

    return call


def topk() -> Call:
    problem = draw(3000, 512, 16000)
    return lambda: list(linear_topk(*problem[:2], 8, implementation="xla"))


def divergence() -> Call:
    own, teachers = draw(3000, 512, 16000).leaves(), draw(3000, 512, 16000)

    def call() -> list[torch.Tensor]:
        kl = linear_kl(*own[:2], *teachers[:2], implementation="xla")
        return [kl, *torch.autograd.grad(kl.sum(), own[:2])]

    return call


CALLS = {
    "chunks of bfloat16": lambda: chunks(torch.bfloat16),
    "chunks of float16": lambda: chunks(torch.float16),
    "topk": topk,
    "divergence": divergence,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_read_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in 5 of 5 calls."""
    call = CALLS[name]()
    want = call()
    torch.cuda.synchronize()
    read_late(monkeypatch, 20.0)
    for _ in range(5):
        assert all(map(torch.equal, call(), want))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # it is empty, because the refusal comes first
def test_graph_capture_is_refused() -> None:
    problem = draw(64, 256, 1024, torch.float32)  # JAX runs it
    linear_logprobs(*problem)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot run under CUDA graph capture"), torch.cuda.graph(graph):
        linear_logprobs(*problem)
    torch.cuda.synchronize()


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

    device = runtime.find_jax_device(problem.hidden.device)
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
