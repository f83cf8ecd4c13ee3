"""The backward of `linear_loss`: what is asked for, the cotangent that comes, and what is left where a call fails."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_logprobs, linear_loss
from tests.torch import problem as p
from tests.torch.launched import launched_directly
from tests.torch.test_linear_loss import MANY, ROUNDING, arguments, ppo, two_passes
from tests.torch.test_main_grad import parameter

pytestmark = pytest.mark.usefixtures("in_float64")

T = 5000  # of three chunks
WAYS = {"jax": contextlib.nullcontext, "direct": launched_directly}
ways = pytest.mark.parametrize("way", WAYS)


def loss(logprobs: Any, entropy: Any, lse: Any, *own: Any) -> Any:
    return sum(own, -logprobs - 0.1 * entropy + 1e-3 * lse)


def wanted(problem: p.Problem) -> tuple[torch.Tensor, ...]:
    leaves = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    return torch.autograd.grad(loss(*p.stored(*leaves)[:3]).sum(), leaves[:2])


@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("function", [linear_logprobs, linear_loss])
@ways
def test_main_grad_gets_what_is_asked_for(way: str, function: Any, cast: bool) -> None:
    """Nothing where hidden's gradient alone is, and the same where the weight's alone is as where all are."""
    problem = p.draw()
    weight, hidden = parameter(problem, grad_added_to_main_grad=False), problem.hidden.clone().requires_grad_()
    given = hidden, weight, problem.labels
    with WAYS[way](), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        if function is linear_loss:
            total, _ = linear_loss(loss, *given, wgrad="main_grad")
        else:
            total = loss(*linear_logprobs(*given, wgrad="main_grad")[:3]).sum()
        torch.autograd.grad(total, hidden, retain_graph=True)
        assert not weight.main_grad.any()
        assert not weight.grad_added_to_main_grad
        torch.autograd.grad(total, weight, retain_graph=True)
        assert weight.grad_added_to_main_grad
        once = weight.main_grad.clone()
        total.backward()
    assert torch.equal(weight.main_grad, 2 * once)
    assert p.relative_norm(once, wanted(problem)[1]) < (1e-2 if cast else 1e-6)


COUNTS = [(3, 25), (5, 7), (59, 51), (4, 8)]  # n, m; 1/n/m is not 1/(n·m) for all but the last


@pytest.mark.parametrize("wgrad", ["return", "main_grad"])
def test_a_cotangent_that_is_rounded_otherwise(wgrad: str) -> None:
    """Gradients are those of the one that comes."""
    problem, differ = p.draw(), 0
    for n, m in COUNTS:
        weight, hidden = parameter(problem), problem.hidden.clone().requires_grad_()
        given = hidden, weight, problem.labels
        total, _ = linear_loss(loss, *given, wgrad=wgrad, cotangent=1 / (n * m))
        scale = total / n / m
        came = torch.autograd.grad(scale, total, retain_graph=True)[0].item()
        differ += came != torch.tensor(1 / (n * m)).item()
        scale.backward()
        dweight = weight.grad if wgrad == "return" else weight.main_grad
        for got, want in zip((hidden.grad, dweight), wanted(problem), strict=True):
            assert p.relative_norm(got, want * came) < 1e-6
    assert differ == len(COUNTS) - 1


def test_gradients_are_scaled_by_the_cotangent_that_comes() -> None:
    problem, known = p.draw(), 1.0
    leaves = problem.leaves()
    total, _ = linear_loss(loss, *leaves, cotangent=known)
    came = 1 + 4 * torch.finfo(torch.float32).eps
    exact, scaled = (torch.autograd.grad(total * x, leaves[:2], retain_graph=True) for x in (known, came))
    assert all(torch.equal(x * came, y) and not torch.equal(x, y) for x, y in zip(exact, scaled, strict=True))
    for far in (1 + 2e-6, -1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"linear_loss\(cotangent=1.0\) was differentiated with a cotangent of "):
            torch.autograd.grad(total * far, leaves[:2], retain_graph=True)


def test_a_refused_cotangent_says_what_main_grad_holds() -> None:
    """Zeroed, as the message says, it serves the next call."""
    problem = p.draw()
    weight = parameter(problem)
    given = problem._replace(weight=weight)
    total, _ = linear_loss(loss, *given, wgrad="main_grad", cotangent=1.0)
    with pytest.raises(ValueError, match=r"weight.main_grad holds the gradient for 1.0 already: zero it"):
        (2 * total).backward()
    weight.main_grad.zero_()
    total, _ = linear_loss(loss, *given, wgrad="main_grad", cotangent=2.0)
    (2 * total).backward()
    assert p.relative_norm(weight.main_grad, 2 * wanted(problem)[1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_callers_to_write(dtype: torch.dtype) -> None:
    problem = p.draw(dtype=dtype)
    leaves, own = problem.leaves(), torch.ones(37, requires_grad=True)
    total, _ = linear_loss(loss, *leaves, own, cotangent=1.0)
    first = torch.autograd.grad(total, (*leaves[:2], own), retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.mul_(2)
    assert all(map(torch.equal, torch.autograd.grad(total, (*leaves[:2], own)), kept))


@pytest.mark.parametrize("failing", [1, 3])
@ways
def test_a_loss_fn_that_raises(way: str, failing: int) -> None:
    """``main_grad`` is as it was, or the error says what it holds."""
    problem, chunks = p.draw(T=T), []
    weight = parameter(problem)
    weight.main_grad.fill_(0.25)

    def raising(*fields: torch.Tensor) -> torch.Tensor:
        chunks.append(len(fields[0]))
        if len(chunks) == failing:
            raise OverflowError("of the loss")
        return loss(*fields)

    told: Any = dict(wgrad="main_grad", cotangent=1.0, chunk_bytes=p.THREE_CHUNKS)
    with WAYS[way](), pytest.raises(OverflowError, match="of the loss") as error:
        linear_loss(raising, *problem._replace(weight=weight), **told)
    notes = getattr(error.value, "__notes__", [])
    unchanged = bool((weight.main_grad == 0.25).all())
    assert unchanged == (way == "jax" or failing == 1)
    said = "weight.main_grad holds the gradients of the first 4096 of 5000 tokens: zero it, or restore what it held"
    assert notes == ([] if unchanged else [said])


def saving(logprobs: Any, entropy: Any, lse: Any) -> Any:
    return logprobs.exp() * entropy + 1e-3 * lse**2


def test_a_checkpoint_runs_each_chunk_twice() -> None:
    """Derivatives of a chunk's losses are computed at once, so nothing that they need is recomputed."""
    problem, chunks = p.draw(T=T), []
    leaves, plain = problem.leaves(), problem.leaves()

    def counted(logprobs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        chunks.append(len(logprobs))
        return saving(logprobs, *others)

    def call() -> torch.Tensor:
        return linear_loss(counted, *leaves, chunk_bytes=p.THREE_CHUNKS)[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # goes on after the call
        torch.utils.checkpoint.checkpoint(call, use_reentrant=False).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    assert chunks == 2 * [2048, 2048, 904]
    linear_loss(saving, *plain, chunk_bytes=p.THREE_CHUNKS)[0].backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves[:2], plain[:2], strict=True))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("options", [{"chunk_bytes": 0}, {"entropy": "metric"}], ids=str)
def test_a_loss_fn_may_overwrite_what_it_gets(options: dict[str, Any], recorded: bool) -> None:
    """After its last use, and what it returned for the chunk before: results and gradients are the same."""
    problem, memory = p.draw(T=T), torch.empty(T)

    def overwriting(*fields: torch.Tensor) -> torch.Tensor:
        losses = loss(*fields)
        for field in fields:
            field.detach().fill_(torch.nan)
        return losses

    def reusing(logprobs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return memory[: len(logprobs)].copy_(logprobs.detach())

    def call(loss_fn: Any) -> list[torch.Tensor]:
        leaves = problem.leaves()
        with torch.set_grad_enabled(recorded):
            total, out = linear_loss(loss_fn, *leaves, **options)
        return [total.detach(), *out[:3], *(torch.autograd.grad(total, leaves[:2]) if recorded else [])]

    plain = call(loss)
    assert all(map(torch.equal, call(overwriting), plain))
    summed, *fields = call(reusing)[:4]
    assert torch.equal(summed, fields[0].sum())
    assert all(map(torch.equal, fields, plain[1:4]))


@pytest.mark.parametrize("T", [0, 6])
def test_no_token_counts_and_only_what_the_loss_uses_has_a_gradient(T: int) -> None:
    labels, own, scale = torch.full((T,), -100), torch.ones(T, requires_grad=True), torch.ones((), requires_grad=True)
    total, _ = linear_loss(
        lambda logprobs, _, __, own: -own * scale * logprobs, torch.ones(T, 8), torch.ones(16, 8), labels, own,
        ignore_index=-100,
    )  # fmt: skip
    total.backward()
    assert total.item() == 0
    assert own.grad is not None
    assert own.grad.tolist() == [0.0] * T
    assert scale.grad == 0


@pytest.mark.parametrize("kind", ["mask", "index", "ignored"])
def test_tokens_that_are_left_out(kind: str) -> None:
    """They count nowhere, whatever they hold, and cost nothing; results of the others keep their bits."""
    problem = p.draw(T=60)
    problem = problem._replace(hidden=problem.hidden.view(3, 20, -1), labels=problem.labels.view(3, 20))
    own = arguments(problem)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    part = p.Problem(problem.hidden[mask], problem.weight, problem.labels[mask]).leaves()
    wanted_own = [x[mask].requires_grad_() for x in own]
    want, _ = linear_loss(ppo, *part, *wanted_own)
    wanted = torch.autograd.grad(want, (*part[:2], *wanted_own))
    full = linear_logprobs(*problem)
    problem.hidden[~mask], own[0][~mask] = torch.nan, torch.nan
    if kind == "ignored":
        problem.labels[~mask] = -100
    keep = {"mask": mask, "index": mask.flatten().nonzero()[:, 0].int(), "ignored": None}[kind]
    leaves, own = problem.leaves(), [x.requires_grad_() for x in own]
    total, out = linear_loss(ppo, *leaves, *own, where=keep, ignore_index=-100 if kind == "ignored" else None)
    grads = torch.autograd.grad(total, (*leaves[:2], *own))
    assert torch.equal(total, want)
    assert torch.equal(out.logprobs, full.logprobs.where(mask, 0.0))
    assert torch.equal(grads[1], wanted[1])
    for got, true in zip((grads[0], *grads[2:]), (wanted[0], *wanted[2:]), strict=True):
        assert torch.equal(got[mask], true)
        assert not got[~mask].any()


def test_no_tokens_and_a_loss_without_a_gradient() -> None:
    weight = torch.ones(16, 8, requires_grad=True)
    for T, loss_fn in ((0, ppo), (3, lambda logprobs, *_: torch.ones_like(logprobs))):
        hidden, own = torch.zeros(T, 8, requires_grad=True), [torch.zeros(T), torch.zeros(T, 2)]
        total, out = linear_loss(loss_fn, hidden, weight, torch.zeros(T, dtype=torch.int64), *own)
        assert out.entropy.shape == (T,)
        assert total.item() == T
        assert not any(grad.any() for grad in torch.autograd.grad(total, (hidden, weight)))


def test_without_a_gradient_it_is_a_plain_forward() -> None:
    """In the per-token arguments, and in whatever loss_fn closes over, autograd differentiates as usual."""
    problem, own = p.draw(T=60), [x.requires_grad_() for x in arguments(p.draw(T=60))]
    scale = torch.tensor(2.0, requires_grad=True)
    total, out = linear_loss(lambda *given: scale * ppo(*given), *problem, *own)
    again, want = two_passes(lambda *given: scale * ppo(*given), *problem, *own)
    inputs = (*own, scale)
    grads, wanted = (torch.autograd.grad(x, inputs) for x in (total, again))
    assert all(map(torch.equal, (total, *out[:3], *grads), (again, *want[:3], *wanted)))
    with torch.no_grad():
        assert torch.equal(linear_loss(lambda *given: scale * ppo(*given), *problem.leaves(), *own)[0], total)


def test_only_gradients_are_kept() -> None:
    leaves, saved = p.draw(T=MANY).leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        linear_loss(lambda logprobs, *_: logprobs, *leaves, chunk_bytes=p.THREE_CHUNKS)
    assert sorted(saved) == sorted([leaves.hidden.shape, leaves.weight.shape])


@pytest.mark.parametrize("T", [300, MANY])
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_main_grad(cast: bool, T: int) -> None:
    """Two micro-batches, forwards before backwards, add up in float32."""
    dtype = torch.float32 if cast else torch.bfloat16
    problem = p.draw(T=T, dtype=dtype)
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(weight.shape), False, True
    want = torch.zeros_like(weight.main_grad, dtype=torch.float64)
    totals = []
    for seed in (0, 1):
        batch = p.draw(T=T, dtype=dtype, seed=seed)._replace(weight=weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            total, _ = linear_loss(ppo, *batch, *arguments(problem), wgrad="main_grad", chunk_bytes=p.THREE_CHUNKS)
        totals.append(total)
        seen = p.Problem(batch.hidden.bfloat16().double(), problem.weight.bfloat16().double(), batch.labels).leaves()
        true, _ = two_passes(ppo, *seen, *arguments(problem), call=p.stored)
        want += torch.autograd.grad(true / 37, seen.weight)[0]
    (sum(totals) / 37).backward()
    assert weight.grad_added_to_main_grad
    assert not weight.grad.to_dense().any()  # the placeholder of zero_out_wgrad
    assert p.relative_norm(weight.main_grad, want) < (1e-6 if T == MANY else 1.2 * ROUNDING)
