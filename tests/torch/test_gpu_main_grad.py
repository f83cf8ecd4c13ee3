"""Direct launches on a Hopper GPU that write to memory which they are given: ``main_grad``, and a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import launch_with, linear_logprobs, linear_loss
from lce_torch_bridge.through_jax import _logprobs
from tests.torch import problem as p
from tests.torch.gpu_problem import draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("direct")]
T, H, V = 3000, 1024, 32000
MATRIX = V * H * 2  # bytes of a second dweight


def parameter(weight: torch.Tensor, **attributes: Any) -> torch.nn.Parameter:
    found = torch.nn.Parameter(weight.clone())
    found.main_grad = torch.zeros(weight.shape, device="cuda")
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def micro_batches() -> list[p.Problem]:
    """Three of them, with the same weight."""
    weight = draw(T, H, V).weight
    return [p.draw(T, H, V, torch.bfloat16, seed).to("cuda")._replace(weight=weight) for seed in range(3)]


def backward(problem: p.Problem, weight: torch.Tensor) -> torch.Tensor:
    hidden = problem.hidden.clone().requires_grad_()
    out = linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad")
    p.objective(out, p.seeds_like(problem.labels)).backward()
    return hidden.grad


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
        weight = parameter(problems[0].weight, grad_added_to_main_grad=False, zero_out_wgrad=zero_out)
        for problem in problems:
            backward(problem, weight)
            weight.main_grad.add_(weight.grad.data if zero_out else 0)  # as DistributedDataParallel's hook
            weight.grad = None
        assert weight.grad_added_to_main_grad
        errors[way] = p.relative_norm(weight.main_grad, exact)
    assert errors["direct"] < 0.9 * errors["jax"]  # dlogits are rounded in both, dweight in one


def test_no_dweight_is_allocated() -> None:
    problem = micro_batches()[0]
    weight = parameter(problem.weight, grad_added_to_main_grad=False)
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


@pytest.mark.parametrize("options", [{}, {"cache_bytes": 1 << 30}, {"gradient_threshold": 1e-4}], ids=str)
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


def ppo(logprobs: Any, entropy: Any, lse: Any, advantages: Any) -> Any:
    del lse
    return -advantages * logprobs.exp() - 0.05 * entropy


def test_linear_loss_adds_to_main_grad_in_the_forward() -> None:
    problem, advantages = draw(T, H, V), torch.randn(T, device="cuda")
    weight = parameter(problem.weight, grad_added_to_main_grad=False)
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
