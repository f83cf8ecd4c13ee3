"""The bridge on a real GPU, in the order of streams: operands still being written, results read late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
import torch

from lce_torch_bridge import linear_kl, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _programs
from lce_torch_bridge.through_jax._runtime import to_torch_all
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
