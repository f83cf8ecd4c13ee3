"""Megatron's gradient-accumulation fusion: what its own layers do with ``main_grad``, by JAX and launched directly."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_logprobs, linear_loss
from tests.torch import problem as p
from tests.torch.executor import launched_directly

pytestmark = pytest.mark.usefixtures("in_float64")
WAYS = {"jax": contextlib.nullcontext, "direct": launched_directly}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def direct() -> Iterator[None]:
    with launched_directly():
        yield


def parameter(problem: p.Problem, **attributes: object) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad = torch.zeros(weight.shape, device=weight.device)
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


@ways
def test_without_the_flag_there_is_no_gradient(way: str) -> None:
    weight = parameter(p.draw())
    with WAYS[way]():
        backward(p.draw(), weight)
    assert weight.grad is None
    assert weight.main_grad.abs().sum() > 0
    assert not hasattr(weight, "grad_added_to_main_grad")


@ways
@pytest.mark.parametrize("first", ["head", "embedding"])
def test_tied_to_an_embedding(first: str, way: str) -> None:
    """The gradient is what the embedding adds alone, whichever comes first."""
    problem = p.draw()
    weight = parameter(problem, grad_added_to_main_grad=False, zero_out_wgrad=True)
    plain = problem.weight.clone().requires_grad_()
    with WAYS[way]():
        for leaf, options in ((weight, {"wgrad": "main_grad"}), (plain, {})):
            hidden = torch.nn.functional.embedding(problem.labels, leaf)
            out = linear_logprobs(hidden if first == "head" else problem.hidden, leaf, problem.labels, **options)
            (out.logprobs.sum() + (0 if first == "head" else hidden.sum())).backward()
    assert not weight.grad.is_sparse
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
        (dict(main_grad=None), "needs weight.main_grad"),
        (dict(main_grad=torch.zeros(3, 3)), r"main_grad \(3, 3\) must have the shape of weight \(104, 32\)"),
        (dict(main_grad=torch.zeros(104, 32, device="meta")), "main_grad is on meta, weight on cpu"),
        (dict(__fsdp_param__=True), "does not serve Megatron-FSDP"),
    ],
)
def test_refusals(attributes: dict, message: str) -> None:
    problem = p.draw()
    with pytest.raises(ValueError, match=message):
        linear_logprobs(*problem._replace(weight=parameter(problem, **attributes)), wgrad="main_grad")


def micro_batches(dtype: torch.dtype = torch.bfloat16) -> list[p.Problem]:
    """Three of them, with the same weight."""
    return [p.draw(dtype=dtype, seed=seed)._replace(weight=p.draw(dtype=dtype).weight) for seed in range(3)]


def accumulated(problems: list[p.Problem], **attributes: Any) -> torch.nn.Parameter:
    weight = parameter(problems[0], **attributes)
    for problem in problems:
        backward(problem, weight)
        weight.grad = None  # as DistributedDataParallel's hook does
    return weight


def exact(problems: list[p.Problem]) -> torch.Tensor:
    return sum(p.exact(problem, p.seeds_like(problem.labels))[1][1] for problem in problems)  # type: ignore[return-value]


def test_three_micro_batches_are_never_rounded() -> None:
    problems = micro_batches()
    rounded = p.relative_norm(accumulated(problems).main_grad, exact(problems))
    with launched_directly():
        found = p.relative_norm(accumulated(problems).main_grad, exact(problems))
    assert found < 1e-6
    assert rounded > 1e-3  # bfloat16


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("zero_out", [False, True])
def test_what_stands_in_for_the_gradient_takes_no_memory(zero_out: bool) -> None:
    weight = parameter(p.draw(), grad_added_to_main_grad=False, zero_out_wgrad=zero_out)
    for _ in range(2):  # also where the first one is still there
        backward(p.draw(), weight)
        assert weight.grad_added_to_main_grad
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        assert weight.grad.is_sparse
        assert weight.grad._nnz() == 0
    before = weight.main_grad.clone()
    weight.main_grad.add_(weight.grad.data)  # as Megatron's hook adds the zeros
    assert torch.equal(weight.main_grad, before)


@pytest.mark.parametrize("kind", ["bfloat16", "not aligned", "transposed"])
def test_what_no_kernel_can_add_to_is_added_to_as_before(kind: str) -> None:
    problem = p.draw(dtype=torch.bfloat16)
    V, H = problem.weight.shape
    sums = []
    for way in (contextlib.nullcontext(), launched_directly()):
        memory = {
            "bfloat16": torch.zeros(V, H, dtype=torch.bfloat16),
            "not aligned": torch.zeros(V * H + 1)[1:].view(V, H),
            "transposed": torch.zeros(H, V).t(),
        }
        weight = parameter(problem, main_grad=memory[kind])
        with way:
            backward(problem, weight)
        sums.append(weight.main_grad)
    assert torch.equal(*sums)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_once(reentrant: bool) -> None:
    problem = p.draw(dtype=torch.bfloat16)
    weight = parameter(problem, grad_added_to_main_grad=False)
    hidden = problem.hidden.clone().requires_grad_()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return linear_logprobs(hidden, weight, problem.labels, wgrad="main_grad").logprobs.sum()

    torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=reentrant).backward()
    plain = problem.weight.float().requires_grad_()
    p.stored(problem.hidden.float(), plain, problem.labels).logprobs.sum().backward()
    assert p.relative_norm(weight.main_grad, plain.grad) < 1e-6


def test_a_checkpoint_that_hands_over_a_copy_of_the_weight() -> None:
    """The copy has no ``main_grad``, and each call that the message names serves."""
    problem = p.draw()
    weight, hidden = parameter(problem), problem.hidden.clone().requires_grad_()

    def head(hidden: torch.Tensor, leaf: torch.Tensor = weight, wgrad: str = "main_grad") -> torch.Tensor:
        return linear_logprobs(hidden, leaf, problem.labels, wgrad=wgrad).logprobs.sum()

    def checkpointed(*given: Any, reentrant: bool = True) -> None:
        torch.utils.checkpoint.checkpoint(head, *given, use_reentrant=reentrant).backward()

    with pytest.raises(ValueError, match=r"Leave weight out of the arguments of the checkpoint"):
        checkpointed(hidden, weight)
    assert not weight.main_grad.any()
    (want,) = torch.autograd.grad(head(hidden, weight, "return"), weight)
    checkpointed(hidden)
    checkpointed(hidden, weight, reentrant=False)
    assert torch.equal(weight.main_grad, 2 * want)
    checkpointed(hidden, weight, "return")
    assert torch.equal(weight.grad, want)


def ppo(logprobs: Any, entropy: Any, lse: Any, advantages: Any) -> Any:
    del lse
    return -advantages * logprobs.exp() - 0.05 * entropy


ROUNDING = 1.7e-3  # of one rounding to bfloat16: 2⁻⁹ of each element, uniformly
T, FACTOR = 5000, 0.37  # of three chunks


@ways
@pytest.mark.parametrize("tokens", [300, T])
def test_linear_loss_adds_in_the_forward_to_what_is_given(way: str, tokens: int) -> None:
    """For a cotangent that is known: nothing of dweight is kept, and each gradient is rounded once."""
    problem = p.draw(T=tokens, dtype=torch.bfloat16)
    advantages = torch.randn(tokens, generator=torch.Generator().manual_seed(4))
    weight = parameter(problem, grad_added_to_main_grad=False, zero_out_wgrad=True)
    weight.main_grad.fill_(0.25)
    hidden, own = problem.hidden.clone().requires_grad_(), advantages.clone().requires_grad_()
    told = dict(wgrad="main_grad", cotangent=FACTOR, chunk_bytes=p.THREE_CHUNKS)
    with WAYS[way]():
        total, out = linear_loss(ppo, hidden, weight, problem.labels, own, **told)
    added = weight.main_grad - 0.25
    (FACTOR * total).backward()
    assert torch.equal(weight.main_grad - 0.25, added)
    assert weight.grad_added_to_main_grad
    assert weight.grad.is_sparse

    leaves = [x.double().requires_grad_() for x in (problem.hidden, problem.weight, advantages)]
    want = p.stored(*leaves[:2], problem.labels)
    true = ppo(*want[:3], leaves[2]).sum()
    wanted = torch.autograd.grad(FACTOR * true, leaves)
    assert abs((total / true).item() - 1) < 1e-5
    assert p.value_error(out.logprobs, want.logprobs) < 2e-6
    assert p.relative_norm(hidden.grad, wanted[0]) < 1.2 * ROUNDING  # not two of them
    assert p.relative_norm(added, wanted[1]) < 1e-6
    assert p.relative_norm(own.grad, wanted[2]) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss_fn", [ppo, lambda logprobs, *_: -logprobs], ids=["saving", "linear"])
def test_a_recomputed_forward_may_not_add(loss_fn: Any, reentrant: bool) -> None:
    """Nothing is in ``main_grad`` then, and it serves each of the two calls that the message names."""
    problem, hidden = p.draw(), p.draw().hidden.requires_grad_()
    weight, plain = parameter(problem), problem.weight.clone().requires_grad_()

    def head(hidden: torch.Tensor, leaf: torch.Tensor = weight, **told: Any) -> torch.Tensor:
        return linear_loss(loss_fn, hidden, leaf, problem.labels, torch.ones(37), **told)[0]

    def checkpointed(**told: Any) -> None:
        call = functools.partial(head, wgrad="main_grad", **told)
        torch.utils.checkpoint.checkpoint(call, hidden, use_reentrant=reentrant).backward()

    (want,) = torch.autograd.grad(head(hidden, plain), plain)
    with pytest.raises(NotImplementedError, match="leave the head out of the checkpoint, or leave cotangent out"):
        checkpointed(cotangent=1.0)
    assert not weight.main_grad.any()
    for serve in (checkpointed, lambda: head(hidden, wgrad="main_grad", cotangent=1.0).backward()):
        weight.main_grad.zero_()
        serve()
        assert torch.equal(weight.main_grad, want)
