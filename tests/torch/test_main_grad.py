"""Megatron's gradient-accumulation fusion: what its own fused layers do with ``main_grad``."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lce_torch_bridge import linear_logprobs
from tests.torch import problem as p

pytestmark = pytest.mark.usefixtures("in_float64")


def parameter(problem: p.Problem, **attributes: object) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad = torch.zeros(weight.shape)
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def backward(problem: p.Problem, weight: torch.Tensor, **options: object) -> torch.Tensor:
    hidden = problem.hidden.clone().requires_grad_()
    out = linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad", **options)
    p.objective(out, p.seeds_like(problem.labels)).backward()
    return hidden.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_micro_batches_add_up_in_float32(dtype: torch.dtype) -> None:
    problems = [p.draw(dtype=dtype, seed=seed)._replace(weight=p.draw(dtype=dtype).weight) for seed in range(3)]
    weight = parameter(problems[0], grad_added_to_main_grad=False)
    want = torch.zeros(weight.shape)
    for problem in problems:
        dhidden = backward(problem, weight)
        assert weight.grad_added_to_main_grad
        weight.grad, weight.grad_added_to_main_grad = None, False  # as DistributedDataParallel's hook does
        _, grads = p.gradients(problem, p.seeds_like(problem.labels))
        assert torch.equal(dhidden, grads[0])
        want += grads[1]  # in the weight's dtype, as Megatron's path without Transformer Engine has it
    assert weight.main_grad.dtype == torch.float32
    assert torch.equal(weight.main_grad, want)


@pytest.mark.parametrize("zero_out", [False, True])
def test_what_stands_in_for_the_gradient(zero_out: bool) -> None:
    weight = parameter(p.draw(), grad_added_to_main_grad=False, zero_out_wgrad=zero_out)
    backward(p.draw(), weight)
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == weight.dtype
    assert (weight.grad == 0).all() == zero_out


def test_without_the_flag_there_is_no_gradient() -> None:
    weight = parameter(p.draw())
    backward(p.draw(), weight)
    assert weight.grad is None
    assert weight.main_grad.abs().sum() > 0
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_tied_to_an_embedding() -> None:
    """The placeholder is zeros, so that the gradient is what the embedding adds alone."""
    problem = p.draw()
    weight = parameter(problem, grad_added_to_main_grad=False, zero_out_wgrad=True)
    embedded = torch.nn.functional.embedding(problem.labels, weight)
    out = linear_logprobs(embedded, weight, problem.labels, wgrad="main_grad")
    out.logprobs.sum().backward()
    plain = problem.weight.clone().requires_grad_()
    linear_logprobs(
        torch.nn.functional.embedding(problem.labels, plain), plain, problem.labels
    ).logprobs.sum().backward()
    assert p.relative_norm(weight.grad + weight.main_grad, plain.grad) < 1e-6
    assert weight.main_grad.norm() > 0
    assert weight.grad.norm() > 0


def test_frozen_or_without_gradients_it_needs_no_main_grad() -> None:
    problem = p.draw()
    frozen = torch.nn.Parameter(problem.weight, requires_grad=False)
    backward(problem, frozen)
    with torch.no_grad():
        linear_logprobs(problem.hidden, torch.nn.Parameter(problem.weight), problem.labels, wgrad="main_grad")


def test_the_weight_may_not_change_before_the_backward() -> None:
    problem = p.draw()
    weight = parameter(problem)
    out = linear_logprobs(*problem._replace(weight=weight), wgrad="main_grad")
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


def test_nothing_keeps_the_parameter_alive() -> None:
    weight = parameter(p.draw())
    backward(p.draw(), weight)
    linear_logprobs(*p.draw()._replace(weight=weight), wgrad="main_grad")  # a graph without a backward pass
    alive = [weakref.ref(weight), weakref.ref(weight.main_grad)]
    del weight
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(main_grad=None), "needs weight.main_grad, which Megatron's DistributedDataParallel makes"),
        (dict(main_grad=torch.zeros(3, 3)), r"main_grad \(3, 3\) must have the shape of weight \(104, 32\)"),
        (dict(main_grad=torch.zeros(104, 32, device="meta")), "main_grad is on meta, weight on cpu"),
        (dict(__fsdp_param__=True), "does not serve Megatron-FSDP"),
    ],
)
def test_refusals(attributes: dict, message: str) -> None:
    problem = p.draw()
    with pytest.raises(ValueError, match=message):
        linear_logprobs(*problem._replace(weight=parameter(problem, **attributes)), wgrad="main_grad")
