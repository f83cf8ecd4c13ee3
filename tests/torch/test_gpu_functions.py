"""Candidates, logits at ids, a loss in the forward and the most likely tokens on a real GPU, against float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from tests.torch import problem as p
from tests.torch import test_kernels_threshold as threshold
from tests.torch.gpu_problem import draw

pytestmark = pytest.mark.gpu

VALUE = 1e-5  # as in test_gpu


def twice(call: Any) -> Any:
    """The results of a call, which a second one must have in the same bits."""
    first, second = call(), call()
    assert all(map(torch.equal, first, second))
    return first


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_candidates(implementation: str, cache_bytes: int) -> None:
    problem = draw(3000, 512, 16000)
    seeds, ids = p.seeds_like(problem.labels, K=64), p.candidates_like(problem.labels, K=64, V=16000)
    options: Any = dict(candidates=ids, vocab_size=15993)
    want, wanted = p.exact(problem, seeds, **options)
    _, plain = p.gradients(problem, seeds, call=p.stored, dtype=torch.bfloat16, **options)

    def call() -> Any:
        out, grads = p.gradients(problem, seeds, implementation=implementation, cache_bytes=cache_bytes, **options)
        return *out[:3], out.candidate_logprobs, *grads

    *fields, dhidden, dweight = twice(call)
    assert max(map(p.value_error, fields, (*want[:3], want.candidate_logprobs))) < VALUE
    for got, path, true in zip((dhidden, dweight), plain, wanted, strict=True):
        assert p.relative_norm(got, true) < 1.02 * p.relative_norm(path, true)


@pytest.mark.parametrize("options", threshold.OPTIONS, ids=str)
def test_a_threshold(implementation: str, options: dict[str, Any]) -> None:
    """With candidates and with a floor, in several batches."""
    if implementation != "mosaic_gpu":
        pytest.skip("leaves nothing out")
    V = 16000
    options = {**options, "vocab_size": V - 7}
    problem = threshold.peaked(3000, V, V - 7).to("cuda")
    twice(lambda: threshold.check(problem, implementation=implementation, **options))


def test_logits_at_ids() -> None:
    problem = draw(3000, 512, 16000)
    ids, seed = p.candidates_like(problem.labels, K=64, V=16000), p.seeds_like(problem.labels, K=64)[3]
    true = problem.hidden.double().requires_grad_(), problem.weight.double().requires_grad_()
    want = p.stored_logits(*true, ids)
    wanted = torch.autograd.grad((seed * want).sum(), true)

    def call() -> Any:
        leaves = problem.leaves()
        z = linear_logits(*leaves[:2], ids)
        return z, *torch.autograd.grad((seed * z).sum(), leaves[:2])

    z, *grads = twice(call)
    assert p.value_error(z, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < 2e-3  # of one rounding to bfloat16


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_divergences(direction: Any, cache_bytes: int) -> None:
    """Kernels that JAX runs: no further from float64 than one rounding of the gradient in the logits."""
    own, teachers = draw(3000, 512, 16000), p.draw(3000, 256, 16000, torch.bfloat16, seed=1).to("cuda")
    (seed, *_), told = p.seeds_like(own.labels), dict(direction=direction, vocab_size=15993)

    def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = (hidden, weight), (teachers.hidden.double(), teachers.weight.double())
        log_q, log_p = ((x @ w.T)[:, :15993].log_softmax(-1) for x, w in heads)
        if direction == "jsd":
            log_m = torch.logaddexp(log_q, log_p) - math.log(2)
            return ((log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2).sum(-1)
        d = log_p - log_q
        return (log_p.exp() * d if direction == "forward" else log_q.exp() * -d).sum(-1)

    true = [x.double().requires_grad_() for x in own[:2]]
    want = exact(*true)
    wanted = torch.autograd.grad((seed * want).sum(), true)

    def call() -> Any:
        leaves = own.leaves()[:2]
        kl = linear_kl(*leaves, *teachers[:2], cache_bytes=cache_bytes, implementation="mosaic_gpu", **told)
        return kl, *torch.autograd.grad((seed * kl).sum(), leaves)

    kl, *grads = twice(call)
    assert p.value_error(kl, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < (5e-3 if cache_bytes else 4e-3)  # as tests/gpu/test_kl.py


@pytest.mark.parametrize("rows", [128, 2048, None], ids=["forty chunks", "three chunks", "one chunk"])
def test_a_loss_in_the_forward(implementation: str, rows: int | None) -> None:
    """No further from float64 than two passes are, with the losses scaled inside."""
    problem = draw(5000, 512, 16000)
    advantages = torch.linspace(-1, 1, 5000, device=problem.hidden.device)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (-torch.exp(logprobs / 8) * x - 0.1 * entropy + 0.01 * lse**2) / 37

    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    true = loss_fn(*p.stored(*double)[:3], advantages).sum()
    wanted = torch.autograd.grad(true, double[:2])
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, implementation=implementation)
    two_passes = torch.autograd.grad(loss_fn(*out[:3], advantages).sum(), leaves[:2])

    def call() -> Any:
        chunk_bytes = None if rows is None else p.bytes_of(rows, problem.weight)
        told: Any = dict(implementation=implementation, chunk_bytes=chunk_bytes)
        total, _ = linear_loss(loss_fn, *leaves, advantages, **told)
        return total, *torch.autograd.grad(total, leaves[:2])

    total, *grads = twice(call)
    assert abs((total / true).item() - 1) < VALUE
    for got, path, want in zip(grads, two_passes, wanted, strict=True):
        assert p.relative_norm(got, want) < 1.02 * p.relative_norm(path, want)


def test_the_most_likely_tokens() -> None:
    """Their logits are the largest of the stored ones but for rounding, which may change places of neighbours."""
    problem = draw(1000, 512, 16000)
    top = linear_topk(*problem[:2], 64)
    z = problem.hidden.double() @ problem.weight.double().T
    want = z.topk(64)
    assert p.value_error(z.gather(1, top.ids), want.values) < VALUE
    assert p.value_error(top.logprobs, want.values - z.logsumexp(1, keepdim=True)) < VALUE
    assert (top.ids == want.indices).double().mean() > 0.999


def test_logits_are_float32_and_never_rounded(implementation: str) -> None:
    problem = draw(1000, 1024, 16000)
    problem = problem._replace(weight=2 * problem.weight)  # logits whose rounding is well above the bound
    z = torch.mm(problem.hidden, problem.weight.t(), out_dtype=torch.float32)
    out = linear_logprobs(*problem, implementation=implementation)

    def scores(z: torch.Tensor) -> list[torch.Tensor]:
        logp = z.log_softmax(-1)
        return [logp.gather(-1, problem.labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]

    for got, want, rounded in zip(out[:2], scores(z), scores(z.bfloat16().float()), strict=True):
        assert got is not None
        assert p.value_error(got, want) < VALUE
        assert p.value_error(rounded, want) > 100 * VALUE
