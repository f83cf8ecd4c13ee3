"""A head with a bias, against PyTorch in float64 with the logits stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import linear_logprobs
from tests.torch import problem as p

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity
# Rounding the gradient itself to the bias's dtype, as in test_parity.
ROUNDING = {torch.float32: GRADIENT, torch.bfloat16: 2.0e-3, torch.float16: 2.6e-4}

OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=0.7, logit_scale=1.3),
    dict(logit_softcap=2.0, logit_scale=-0.8),
    dict(vocab_size=97, temperature=torch.linspace(0.5, 2, 37)),
]


def draw_bias(V: int = 104, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(5)).to(dtype)


def gradients(
    problem: p.Problem, bias: torch.Tensor, seeds: list[torch.Tensor], call: Any = linear_logprobs, **options: Any
) -> Any:
    """The results, and the gradients in hidden, weight and bias. The fourth seed is the mean logit's."""
    leaves, bias = problem.leaves(), bias.clone().requires_grad_()
    out = call(*leaves, bias=bias, **options)
    objective = p.objective(out, seeds[:3])
    if len(seeds) > 3:
        objective = objective + (seeds[3] * out.mean_logit).sum()
    return out, torch.autograd.grad(objective, (*leaves[:2], bias))


def exact(problem: p.Problem, bias: torch.Tensor, seeds: list[torch.Tensor], **options: Any) -> Any:
    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels)
    return gradients(double, bias.double(), seeds, call=p.stored, **options)


def seeds_like(labels: torch.Tensor) -> list[torch.Tensor]:
    """One for the mean logit, too."""
    return [*p.seeds_like(labels), p.seeds_like(labels, seed=2)[0]]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_every_output_and_gradient(options: dict[str, Any]) -> None:
    problem, bias = p.draw(), draw_bias()
    problem.labels[:4] = torch.tensor([-100, 2**32 + 3, 104, -1])
    seeds = seeds_like(problem.labels)
    told = options | dict(stats=True, mean_logit=True)
    out, grads = gradients(problem, bias, seeds, **told)
    want, wanted = exact(problem, bias, seeds, **options)
    assert max(map(p.value_error, out, want)) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT
    if "vocab_size" in options:
        assert not grads[2][97:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_the_gradient_comes_in_the_dtype_of_the_bias(dtype: torch.dtype, of_weight: torch.dtype) -> None:
    problem, bias = p.draw(dtype=of_weight), draw_bias(dtype=dtype)
    seeds = p.seeds_like(problem.labels)
    out, grads = gradients(problem, bias, seeds)
    want, wanted = exact(problem, bias, seeds)
    assert max(map(p.value_error, out[:3], want[:3])) < VALUE
    assert grads[2].dtype == dtype
    assert p.relative_norm(grads[2], wanted[2]) < ROUNDING[dtype]


def test_a_bias_of_zeros_is_none() -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    out, grads = p.gradients(problem, seeds)
    got, (dhidden, dweight, _) = gradients(problem, torch.zeros(104), seeds)
    assert all(map(torch.equal, out[:3], got[:3]))
    assert max(map(p.relative_norm, (dhidden, dweight), grads)) < GRADIENT


def test_a_bias_may_be_all_that_is_trained() -> None:
    hidden, weight, labels = problem = p.draw()
    bias = draw_bias()
    seeds = p.seeds_like(labels)
    leaf = bias.clone().requires_grad_()
    p.objective(linear_logprobs(hidden, weight, labels, bias=leaf), seeds).backward()
    _, grads = gradients(problem, bias, seeds)
    assert torch.equal(leaf.grad, grads[2])
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, labels, bias=leaf).lse.requires_grad


@pytest.mark.parametrize("keep", [torch.arange(0, 37, 3), torch.arange(37) % 3 == 0], ids=["index", "mask"])
def test_some_tokens(keep: torch.Tensor) -> None:
    problem, bias = p.draw(), draw_bias()
    problem.labels[9] = -100
    seeds = p.seeds_like(problem.labels)
    out, grads = gradients(problem, bias, seeds, where=keep, ignore_index=-100)
    rows = torch.arange(0, 37, 3)
    rows = rows[rows != 9]
    some = p.Problem(problem.hidden[rows], problem.weight, problem.labels[rows])
    want, wanted = exact(some, bias, [seed[rows] for seed in seeds])
    assert max(p.value_error(a[rows], b) for a, b in zip(out[:3], want[:3], strict=True)) < VALUE
    assert p.relative_norm(grads[2], wanted[2]) < GRADIENT
    assert not out.logprobs[9]
    assert not grads[0][9].any()


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    hidden, weight = torch.zeros(*shape, 8, requires_grad=True), torch.ones(16, 8)
    bias = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.zeros(shape, dtype=torch.int64), bias=bias, mean_logit=True)
    assert out.mean_logit.shape == shape
    (out.logprobs.sum() + out.mean_logit.sum()).backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_more_tokens_than_a_program_takes() -> None:
    """The forward in pieces, the backward padded."""
    problem, bias = p.draw(T=8192 + 50, H=8, V=16), draw_bias(16)
    seeds = seeds_like(problem.labels)
    out, grads = gradients(problem, bias, seeds, mean_logit=True)
    want, wanted = exact(problem, bias, seeds)
    assert max(p.value_error(got, true) for got, true in zip(out, want, strict=True) if got is not None) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def test_autocast_leaves_the_bias_as_it_is() -> None:
    problem, bias = p.draw(), draw_bias()
    seeds = p.seeds_like(problem.labels)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = gradients(problem, bias, seeds)
    want, wanted = gradients(problem._replace(weight=problem.weight.bfloat16()), bias, seeds)
    assert all(map(torch.equal, out[:3], want[:3]))
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    assert torch.equal(grads[2], wanted[2])


def test_fullgraph() -> None:
    torch._dynamo.reset()
    problem, bias = p.draw(), draw_bias()
    seeds = seeds_like(problem.labels)

    def call(*leaves: torch.Tensor, **options: Any) -> Any:
        return linear_logprobs(*leaves, mean_logit=True, temperature=0.7, **options)

    out, grads = gradients(problem, bias, seeds, call=call)
    got, compiled = gradients(
        problem, bias, seeds, call=torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    )
    assert all(map(torch.equal, (*out[:3], out.mean_logit, *grads), (*got[:3], got.mean_logit, *compiled)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    problem, bias = p.draw(), draw_bias()
    seeds = p.seeds_like(problem.labels)
    _, want = gradients(problem, bias, seeds)
    leaves, leaf = problem.leaves(), bias.clone().requires_grad_()

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(*operands[:3], bias=operands[3]), seeds)

    checkpoint(call, *leaves, leaf, use_reentrant=reentrant).backward()
    assert all(map(torch.equal, (leaves.hidden.grad, leaves.weight.grad, leaf.grad), want))


def test_torch_func_and_its_limits() -> None:
    problem, bias = p.draw(), draw_bias()
    seeds = p.seeds_like(problem.labels)
    _, want = gradients(problem, bias, seeds)

    def call(bias: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(*problem, bias=bias), seeds)

    assert torch.equal(torch.func.grad(call)(bias), want[2])
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.func.grad(lambda x: torch.func.grad(call)(x).sum())(bias)
    leaf = bias.clone().requires_grad_()
    out = linear_logprobs(*problem, bias=leaf)
    with torch.no_grad():
        leaf.mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.lse.sum().backward()


def test_main_grad_is_the_weights_affair() -> None:
    problem, bias = p.draw(), draw_bias().requires_grad_()
    seeds = p.seeds_like(problem.labels)
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad = torch.zeros_like(weight)
    out = linear_logprobs(problem.hidden, weight, problem.labels, bias=bias, wgrad="main_grad")
    p.objective(out, seeds).backward()
    _, want = gradients(problem, bias.detach(), seeds)
    assert torch.equal(weight.main_grad, want[1])
    assert torch.equal(bias.grad, want[2])


def test_a_part_of_a_larger_tensor() -> None:
    """Neither contiguous nor where XLA wants it."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    for bias in (torch.randn(104, 2)[:, 1], torch.randn(105)[1:]):
        out, grads = gradients(problem, bias, seeds)
        want, wanted = gradients(problem, bias.contiguous().clone(), seeds)
        assert all(map(torch.equal, (*out[:3], *grads), (*want[:3], *wanted)))
