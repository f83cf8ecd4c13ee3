"""Direct launches on a Hopper GPU: no client of JAX's, CUDA graphs, threads, the other way's results, the sanitizer."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest
import torch

from lce_torch_bridge import launch_with, linear_logprobs
from tests.torch import problem as p
from tests.torch.gpu_problem import draw
from tests.torch.processes import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("direct")]


def step(problem: p.Problem, seeds: Any, **options: Any) -> list[torch.Tensor]:
    """Results and gradients."""
    out, grads = differentiated(problem, seeds, **options)
    return [*(x.detach() for x in out[:3]), *grads]


def differentiated(problem: p.Problem, seeds: Any, call: Any = linear_logprobs, **options: Any) -> Any:
    """Results and gradients."""
    leaves = problem.leaves()
    out = call(*leaves, **options)
    return out, torch.autograd.grad(p.objective(out, seeds), leaves[:2])


def test_the_process_has_no_client_of_jax() -> None:
    """Nor memory besides torch's and the kernels' code, which is judged where no other test uses the card meanwhile."""
    alone = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
    done = run(
        f"""
        import torch
        free = torch.cuda.mem_get_info()[0]
        import lce_torch_bridge
        from jax._src import xla_bridge
        hidden = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(32000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            out = lce_torch_bridge.linear_logprobs(hidden, weight, torch.arange(1000, device="cuda"))
            (out.logprobs.sum() + out.entropy.sum()).backward()
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        assert not xla_bridge.backends_are_initialized()
        assert not {alone} or taken < 200 << 20, taken  # code of the kernels
        """,
        timeout=300,
        JAX_PLATFORMS="cuda,cpu",
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


SEGMENT = 2 << 20  # bytes that torch reserves for small tensors when another one does not fit between them
PADDED = [{"vocab_size": size} for size in (8191, 8000, 4096, 100)]
CALLS: list[dict[str, Any]] = [
    {},
    {"cache_bytes": 1 << 30},
    {"cache_bytes": 4 << 20, "temperature": 0.7},
    *PADDED,
    {"vocab_size": 8000, "cache_bytes": 1 << 30, "stats": True, "logit_softcap": 5.0},
    {"vocab_size": 8001, "logit_scale": 0.5},
]


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_the_results_are_those_of_jax(options: dict[str, Any]) -> None:
    """The kernels are the same. In the gradients, XLA rounds some steps between them in another order."""
    problem = draw(700, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    found = step(problem, seeds, **options)
    assert all(map(torch.equal, found, step(problem, seeds, **options)))
    launch_with("jax")
    wanted = step(problem, seeds, **options)
    assert all(map(torch.equal, found[:3], wanted[:3]))
    assert max(map(p.relative_norm, found[3:], wanted[3:])) < 2e-4  # few roundings to bfloat16 differ


@pytest.mark.parametrize("vocab_size", [8192, 8001, 4096, 100])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_the_tile_with_padding(vocab_size: int, cache_bytes: int) -> None:
    """The columns before padding, which may hold NaN: no further from float64 than stored logits."""
    problem = draw(700, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    told: Any = dict(temperature=0.8, logit_scale=1.3)
    true = problem._replace(weight=problem.weight[:vocab_size], labels=problem.labels)
    double = true._replace(hidden=true.hidden.double(), weight=true.weight.double())
    want, wanted = differentiated(double, seeds, p.stored, **told)
    _, plain = differentiated(true, seeds, p.stored, dtype=torch.bfloat16, **told)
    problem.weight[vocab_size:] = float("nan")
    told |= dict(stats=True, cache_bytes=cache_bytes, vocab_size=vocab_size)
    out, (dhidden, dweight) = differentiated(problem, seeds, **told)
    assert max(map(p.value_error, out[:5], want[:5])) < 1e-5
    assert not dweight[vocab_size:].any()
    assert p.relative_norm(dhidden, wanted[0]) < 1.02 * p.relative_norm(plain[0], wanted[0])
    assert p.relative_norm(dweight[:vocab_size], wanted[1]) < 1.02 * p.relative_norm(plain[1], wanted[1])


def test_a_whole_size_has_the_bits_of_any_other_count() -> None:
    """Its hidden states are read where they lie, those of fewer tokens are copied."""
    problem = draw(8192, 256, 151936)
    for T in (4096, 8192):
        part = p.Problem(problem.hidden[:T], problem.weight, problem.labels[:T])
        rows = torch.arange(0, T, 3, device="cuda")
        full, kept = (linear_logprobs(*part, stats=True, where=keep) for keep in (None, rows))
        assert all(torch.equal(x[rows], y[rows]) for x, y in zip(full[:5], kept[:5], strict=True))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_a_graph_replays_what_eager_runs_compute(cache_bytes: int) -> None:
    problem = draw(1000, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(problem, seeds, cache_bytes=cache_bytes)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(problem, seeds, cache_bytes=cache_bytes)
    for _ in range(100):
        problem.hidden.normal_()
        problem.labels.random_(0, 8192)
        graph.replay()
        assert all(map(torch.equal, captured, step(problem, seeds, cache_bytes=cache_bytes)))


def test_threads_on_streams_of_their_own() -> None:
    problems = [draw(300 + i, 512, 8192) for i in range(4)]
    wanted = [step(problem, p.seeds_like(problem.labels)) for problem in problems]
    torch.cuda.synchronize()
    wrong = [0] * 4

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = step(problems[i], p.seeds_like(problems[i].labels))
                wrong[i] += not all(map(torch.equal, found, wanted[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 4


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_all_counts_of_tokens_in_flat_memory(cache_bytes: int) -> None:
    problem, before = draw(16384, 256, 2048), 0
    counts = [16384, 8192, 4096, *random.Random(0).sample(range(1, 16384), 197)]
    for i, count in enumerate(counts):
        part = p.Problem(problem.hidden[:count], problem.weight, problem.labels[:count])
        step(part, p.seeds_like(part.labels), cache_bytes=cache_bytes)
        if i == 60:
            before = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() <= before + SEGMENT
