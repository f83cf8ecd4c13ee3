"""Calls of one shape that differ in an option alone: none gets another's program, plan or key."""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge import linear_logprobs
from tests.torch import problem as p

OPTIONS: dict[str, dict[str, Any]] = {
    "logit_scale": {"logit_scale": 0.5},
    "another logit_scale": {"logit_scale": 2.0},
    "logit_softcap": {"logit_softcap": 3.0},
    "vocab_size": {"vocab_size": 101},
    "none": {},
}


def stored(problem: p.Problem, logit_scale: float = 1.0, logit_softcap: float | None = None, vocab_size: int = 104):
    """The log-probabilities of float64 logits. Outside of the vocabulary a label has 0, and the gradient of -lse."""
    logits = problem.hidden @ problem.weight.double().T * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits = logits[:, :vocab_size]
    inside, lse = problem.labels < vocab_size, logits.logsumexp(-1)
    chosen = logits.gather(1, problem.labels.where(inside, 0)[:, None])[:, 0]
    return chosen.where(inside, lse.detach()) - lse


def test_each_option_has_its_own_results() -> None:
    """Values and gradients, in turns, and once more when all programs are there."""
    problem = p.draw()
    problem = problem._replace(labels=problem.labels.where(torch.arange(37) % 5 > 0, 103))
    for name, options in [*OPTIONS.items()] * 2:
        leaves, exact = problem.leaves(), problem._replace(hidden=problem.hidden.double().requires_grad_())
        got, want = linear_logprobs(*leaves, **options).logprobs, stored(exact, **options)
        (dhidden,), (wanted,) = (torch.autograd.grad(x.sum(), one.hidden) for x, one in ((got, leaves), (want, exact)))
        assert p.value_error(got, want) < 2e-6, name  # as in test_parity
        assert p.value_error(dhidden, wanted) < 2e-6, name
