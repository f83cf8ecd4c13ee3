"""Direct launches on a Hopper GPU: no client of JAX's, CUDA graphs, threads, memory that is given, the sanitizer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lce_torch_bridge import launch_with, linear_cross_entropy, linear_kl, linear_logprobs, linear_loss
from lce_torch_bridge._types import Tensors, make_call
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.through_jax import _logprobs
from tests.torch import problem as p
from tests.torch.gpu_problem import capture_graph, draw, skip_unless_direct
from tests.torch.processes import ROOT, run
from tests.torch.sanitized import DIVERGENCES
from tests.torch.test_main_grad import backward, parameter, ppo

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("direct")]


def step(problem: p.Problem, seeds: Any, **options: Any) -> list[torch.Tensor]:
    """Results and gradients."""
    out, grads = p.gradients(problem, seeds, **options)
    return [*(x.detach() for x in out[:3]), *grads]


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
        lce_torch_bridge.linear_kl(hidden, weight, hidden.detach(), weight.detach()).sum().backward()
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
    {"cache_bytes": 0},
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
    want, wanted = p.gradients(double, seeds, p.stored, **told)
    _, plain = p.gradients(true, seeds, p.stored, dtype=torch.bfloat16, **told)
    problem.weight[vocab_size:] = float("nan")
    told |= dict(stats=True, cache_bytes=cache_bytes, vocab_size=vocab_size)
    out, (dhidden, dweight) = p.gradients(problem, seeds, **told)
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


CAPTURED: list[dict[str, Any]] = [{"cache_bytes": 0}, {"cache_bytes": 1 << 30}, {"gradient_threshold": 1e-4}]


@pytest.mark.parametrize("candidates", [0, 3])
@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_a_graph_replays_what_eager_runs_compute(options: dict[str, Any], candidates: int) -> None:
    """In a capture nothing may wait for the GPU, so nothing does outside of one."""
    problem = draw(1000, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    if candidates:
        ids = torch.randint(0, 8192, (1000, candidates), device="cuda")
        options, seeds = options | {"candidates": ids}, [*seeds, torch.randn(1000, candidates, device="cuda")]
    graph, captured = capture_graph(lambda: step(problem, seeds, **options))
    for _ in range(100):
        problem.hidden.normal_()
        problem.labels.random_(0, 8192)
        graph.replay()
        assert all(map(torch.equal, captured, step(problem, seeds, **options)))


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("tokens", [700, 3000])
def test_a_graph_replays_a_loss_with_its_gradients(tokens: int, factor: float) -> None:
    """In one chunk or in several, and what its cotangent does to a dweight for which there is a kernel."""
    problem = draw(tokens, 2048, 8192)

    def step() -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in problem[:2]]
        told: Any = dict(ignore_index=None, z_loss=1e-4, chunk_bytes=1024 * 8192 * 2)
        loss = linear_cross_entropy(*leaves, problem.labels, **told)
        return [loss.detach(), *torch.autograd.grad(factor * loss, leaves)]

    graph, captured = capture_graph(step)
    for _ in range(20):
        problem.hidden.normal_()
        problem.labels.random_(0, 8192)
        graph.replay()
        assert all(map(torch.equal, captured, step()))
    leaves = [x.double().requires_grad_() for x in problem[:2]]
    z = leaves[0] @ leaves[1].T
    want = torch.nn.functional.cross_entropy(z, problem.labels) + 1e-4 * (z.logsumexp(-1) ** 2).mean()
    assert abs((captured[0] / want).item() - 1) < 1e-5
    for got, true in zip(captured[1:], torch.autograd.grad(factor * want, leaves), strict=True):
        assert p.relative_norm(got, true) < 4e-3  # dlogits and the gradient are rounded, one of them once more by 0.3


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


T, H, V = 3000, 1024, 32000
MATRIX = V * H * 2  # bytes of a second dweight


def micro_batches() -> list[p.Problem]:
    """Three of them, with the same weight."""
    weight = draw(T, H, V).weight
    return [p.draw(T, H, V, torch.bfloat16, seed).to("cuda")._replace(weight=weight) for seed in range(3)]


def peak(function: Any, *given: Any) -> int:
    """The bytes of torch's memory that a call takes beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(*given)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("zero_out", [False, True])
def test_three_micro_batches_are_never_rounded(zero_out: bool) -> None:
    problems, errors = micro_batches(), {}
    exact = sum(p.exact(x, p.seeds_like(x.labels))[1][1] for x in problems)
    for way in ("jax", "direct"):
        launch_with(way)
        weight = parameter(problems[0], grad_added_to_main_grad=False, zero_out_wgrad=zero_out)
        for problem in problems:
            backward(problem, weight)
            weight.main_grad.add_(weight.grad.data if zero_out else 0)  # as DistributedDataParallel's hook
            weight.grad = None
        assert weight.grad_added_to_main_grad
        errors[way] = p.relative_norm(weight.main_grad, exact)
    assert errors["direct"] < 0.9 * errors["jax"]  # dlogits are rounded in both, dweight in one


def test_no_dweight_is_allocated() -> None:
    problem = micro_batches()[0]
    weight = parameter(problem, grad_added_to_main_grad=False)
    backward(problem, weight)
    weight.grad = None
    extra = peak(backward, problem, weight)
    plain = problem.leaves()

    def returned() -> None:
        out = linear_logprobs(*plain)
        torch.autograd.grad(p.objective(out, p.seeds_like(problem.labels)), plain[:2])

    returned()
    assert extra <= peak(returned) - 0.9 * MATRIX
    assert weight.grad._nnz() == 0


@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_a_main_grad_that_lies_otherwise(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels return what torch adds to it, rounded once."""
    monkeypatch.setattr(_logprobs, "gradients", None)  # JAX's, which may not run
    problem = draw(700, 512, 8192)
    leaves, seeds = problem.leaves(), p.seeds_like(problem.labels)
    want, dweight = torch.autograd.grad(p.objective(linear_logprobs(*leaves, **options), seeds), leaves[:2])
    memory = torch.zeros(512, 8192, device="cuda").t(), torch.zeros(8192 * 512 + 1, device="cuda")[1:].view(8192, 512)
    for main_grad in memory:
        weight, hidden = torch.nn.Parameter(problem.weight.clone()), problem.hidden.clone().requires_grad_()
        weight.main_grad = main_grad
        out = linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad", **options)
        p.objective(out, seeds).backward()
        assert torch.equal(hidden.grad, want)
        assert torch.equal(main_grad, dweight.float())


def test_a_cache_is_overwritten_by_the_last_backward() -> None:
    problem = draw(T, H, V)
    leaves, seeds = problem.leaves(), p.seeds_like(problem.labels)

    def grads(keep: bool) -> list[torch.Tensor]:
        total = p.objective(linear_logprobs(*leaves, cache_bytes=1 << 30), seeds)
        twice = [torch.autograd.grad(total, leaves[:2], retain_graph=True) for _ in range(keep)]
        return [*sum(twice, ()), *torch.autograd.grad(total, leaves[:2])]

    first, kept = grads(False), grads(True)
    assert all(map(torch.equal, first, grads(False)))
    assert all(map(torch.equal, first, kept[2:]))
    assert max(map(p.relative_norm, first, kept[:2])) < 5e-4  # dhidden is summed in another order
    cache = 4096 * V * 2
    assert peak(grads, False) < cache + MATRIX + (64 << 20)


def test_linear_loss_adds_to_main_grad_in_the_forward() -> None:
    problem, advantages = draw(T, H, V), torch.randn(T, device="cuda")
    weight = parameter(problem, grad_added_to_main_grad=False)
    hidden = problem.hidden.clone().requires_grad_()
    chunk_bytes = 2048 * V * 2

    def step(leaf: torch.Tensor, **told: Any) -> None:
        total, _ = linear_loss(ppo, hidden, leaf, problem.labels, advantages, chunk_bytes=chunk_bytes, **told)
        (0.5 * total).backward()

    plain = problem.weight.clone().requires_grad_()
    step(plain)
    dhidden, hidden.grad = hidden.grad, None
    step(weight, wgrad="main_grad", cotangent=0.5)
    assert torch.equal(hidden.grad, dhidden)  # 0.5 rounds nothing
    assert torch.equal(weight.main_grad.bfloat16(), plain.grad)
    hidden.grad = weight.grad = plain.grad = None
    extra = peak(lambda: step(weight, wgrad="main_grad", cotangent=0.5))
    assert extra < chunk_bytes + (64 << 20)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_what_a_loss_holds(factor: float) -> None:
    """One chunk's exponentials and the gradients. The cotangent makes no second dweight."""
    problem = draw(T, H, V)
    leaves = problem.leaves()

    def step() -> None:
        (factor * linear_cross_entropy(*leaves, ignore_index=None)).backward()
        leaves.hidden.grad = leaves.weight.grad = None

    step()
    assert peak(step) < 4096 * V * 2 + MATRIX + 3 * T * H * 4 + (64 << 20)


def draw_teacher(problem: p.Problem, G: int = 256) -> list[torch.Tensor]:
    """Hidden states and head of a teacher, of another size."""
    return [*p.draw(len(problem.hidden), G, len(problem.weight), torch.bfloat16, seed=1).to("cuda")[:2]]


def diverge(problem: p.Problem, teacher: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The divergence and both gradients."""
    leaves = problem.leaves()[:2]
    kl = linear_kl(*leaves, *teacher, **options)
    return [kl.detach(), *torch.autograd.grad((seeds_of(kl) * kl).sum(), leaves)]


def seeds_of(kl: torch.Tensor) -> torch.Tensor:
    """Cotangents without a copy from the host, which no graph captures."""
    return torch.linspace(-1, 1, len(kl), device="cuda")


KEPT = [
    {"direction": direction, "cache_bytes": cache_bytes}
    for direction in ("forward", "reverse", "jsd", "tv")
    for cache_bytes in (0, 8 << 20, 1 << 30)
]
OF_HEADS: list[dict[str, Any]] = [
    {"vocab_size": 8001, "temperature": 0.7, "teacher_temperature": 1.3, "logit_softcap": 5.0,
     "teacher_logit_softcap": None, "cache_bytes": 8 << 20},
    {"direction": "jsd", "beta": 0.8, "vocab_size": 100, "temperature": 0.5},
    {"direction": "tv", "vocab_size": 100, "temperature": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", [*KEPT, *OF_HEADS], ids=str)
def test_divergences_are_those_of_jax(options: dict[str, Any]) -> None:
    """The kernels are the same. XLA has another logarithm and another division in the steps for each token."""
    problem = draw(700, 512, 8192)
    teacher = draw_teacher(problem)
    found = diverge(problem, teacher, **options)
    assert all(map(torch.equal, found, diverge(problem, teacher, **options)))
    launch_with("jax")
    wanted = diverge(problem, teacher, **options, implementation="mosaic_gpu")
    assert p.value_error(found[0], wanted[0]) < 4e-6
    assert max(map(p.relative_norm, found[1:], wanted[1:])) < 2e-4  # few roundings to bfloat16 differ


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_a_trace_knows_what_a_divergence_keeps(options: dict[str, Any]) -> None:
    """The shapes that torch.compile is told."""
    problem = draw(700, 512, 8192)
    teacher_hidden, teacher_weight = draw_teacher(problem)
    beta = {"beta": 0.5} if options["direction"] in ("jsd", "tv") else {}
    call = make_call(function="linear_kl", vocab_size=8000, **options, **beta)
    heads: Any = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    x = Tensors(problem.hidden, problem.weight, None, problem.labels)._replace(**heads)
    found = _operators.run_forward(x, call, True, choose_way(x.hidden))
    told = _operators.make_empty_results(x, call, True)
    assert [(y.shape, y.stride(), y.dtype) for y in found] == [(y.shape, y.stride(), y.dtype) for y in told]


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_a_graph_replays_divergences(options: dict[str, Any]) -> None:
    problem = draw(1000, 512, 8192)
    teacher = draw_teacher(problem)
    graph, captured = capture_graph(lambda: diverge(problem, teacher, **options))
    for _ in range(10):
        problem.hidden.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, diverge(problem, teacher, **options)))


@pytest.mark.parametrize("options", [{}, {"cache_bytes": 1 << 30}, {"direction": "jsd"}], ids=str)
def test_what_a_divergence_holds(options: dict[str, Any]) -> None:
    """Besides the gradients one chunk of dlogits, dhidden in float32, both copies of hidden states, and the cache."""
    problem = draw(T, H, V)
    teacher = draw_teacher(problem, H)
    leaves, options = problem.leaves()[:2], {"cache_bytes": 0, **options}

    def step() -> None:
        linear_kl(*leaves, *teacher, **options).sum().backward()
        leaves[0].grad = leaves[1].grad = None

    step()
    rows = 4096  # of the programs
    cache = rows * V * 4 if options["cache_bytes"] else 0  # e and its ratio, two bytes each
    assert peak(step) < MATRIX + (345 << 20) + rows * H * (4 + 2 + 2 + 2) + cache + (64 << 20)


def test_a_divergence_adds_to_main_grad() -> None:
    problem = draw(T, H, V)
    teacher, weight = draw_teacher(problem), parameter(problem, grad_added_to_main_grad=False)
    before, hidden = weight.main_grad.clone(), problem.hidden.clone().requires_grad_()
    _, dhidden, dweight = diverge(problem, teacher)
    kl = linear_kl(hidden, weight, *teacher, wgrad="main_grad")
    (seeds_of(kl) * kl).sum().backward()
    assert torch.equal(hidden.grad, dhidden)
    assert p.relative_norm(weight.main_grad - before, dweight) < 4e-3  # the rounding of dweight
    assert weight.grad._nnz() == 0


SECONDS = 240


class Run(NamedTuple):
    """A tool, none for the kernels alone, what it watches, and its options."""

    tool: str
    parts: tuple[str, ...] = ("plain", "cached", "loss", "candidates", "live")
    options: tuple[str, ...] = ()


RUNS = {
    "memcheck": Run("memcheck"),
    "racecheck": Run("racecheck"),
    "synccheck": Run("synccheck"),
    "initcheck": Run("initcheck", ("forward",)),
    "memcheck, as on an A100": Run("memcheck", ("as=8.0", "plain", "cached", "live")),
    "racecheck, as on an RTX 5090": Run("racecheck", ("as=12.0", "plain", "cached", "live")),
    "filled memory": Run("", ("filled", "plain", "cached", "loss", "candidates", "live")),
    "memcheck of two heads": Run("memcheck", DIVERGENCES),
    "racecheck of two heads": Run("racecheck", DIVERGENCES),
    "filled memory of two heads": Run("", ("filled", *DIVERGENCES)),
}


class Started(NamedTuple):
    """A process, how it was started, and where it writes."""

    process: subprocess.Popen[bytes]
    command: list[str]
    log: Path


def start(command: list[str], log: Path) -> Started:
    # Each tensor is an allocation of its own: what lies beside it belongs to nobody.
    alone = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("wb") as file:
        told: Any = dict(cwd=ROOT, env=os.environ | alone, stdout=file, stderr=subprocess.STDOUT)
        return Started(subprocess.Popen(command, **told), command, log)


def wait_for(watched: Started) -> int:
    """Returns the exit code of a process. It may take `SECONDS`."""
    try:
        return watched.process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {SECONDS} s\n{watched.log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """All runs, started at once."""
    skip_unless_direct()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    runs = {}
    for name, of in RUNS.items():
        if of.tool and sanitizer is None:
            continue
        tool = [str(sanitizer), "--error-exitcode", "9", "--tool", of.tool, *of.options] if of.tool else []
        command = [*tool, sys.executable, "-m", "tests.torch.sanitized", *of.parts]
        runs[name] = start(command, tmp_path_factory.mktemp("sanitizer") / "log")
    yield runs
    for watched in runs.values():
        watched.process.kill()
        watched.process.wait()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found(started: dict[str, Started], name: str) -> None:
    """A run whose tool crashes starts once more, alone: compute-sanitizer 2025.3 may crash beside others of it."""
    if name not in started:
        pytest.skip("no compute-sanitizer")
    tool, watched = RUNS[name].tool, started[name]
    code = wait_for(watched)
    if tool and code == -signal.SIGSEGV:
        for other in started.values():
            wait_for(other)
        watched = started[name] = start(watched.command, watched.log)
        code = wait_for(watched)
    said = watched.log.read_text()
    assert code == 0, said[-6000:]
    assert not tool or "ERROR SUMMARY: 0 errors" in said or "0 hazards displayed" in said, said[-6000:]
    assert "done everything" in said
