"""`linear_cross_entropy` as verl calls it, against stored logits."""

from __future__ import annotations

import pytest
import torch

from lce_torch_bridge.verl import linear_cross_entropy
from tests.torch import problem as p

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity


@pytest.mark.parametrize(
    ("leading", "labelled"),
    [((6, 1), (1, 6)), ((1, 6), (6,)), ((6,), (1, 6)), ((2, 3), (6,)), ((6,), (2, 3)), ((2, 1, 3), (2, 3))],
    ids=str,
)
def test_shapes_that_hold_the_same_tokens(leading: tuple[int, ...], labelled: tuple[int, ...]) -> None:
    """``[T, 1, h]`` with ``[1, T]`` is its call in Megatron, on packed sequences."""
    problem = p.draw(T=6)
    leaves, seeds = problem.leaves(), p.seeds_like(problem.labels)
    temperature = torch.linspace(0.5, 2, 6)
    hidden, labels = leaves.hidden.reshape(*leading, -1), problem.labels.reshape(labelled)
    out = linear_cross_entropy(hidden, leaves.weight, labels, temperature.reshape(labelled))
    want, wanted = p.exact(problem, [*seeds[:2], 0 * seeds[2]], temperature=temperature)
    assert max(map(p.value_error, out, want)) < VALUE
    assert all(x.shape == (6,) for x in out)
    grads = torch.autograd.grad(sum((seed * x).sum() for seed, x in zip(seeds, out, strict=False)), leaves[:2])
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


@pytest.mark.parametrize("name", ["Mean", "SUM", "None"])
def test_reductions_in_letters_of_either_case(name: str) -> None:
    problem = p.draw(T=6)
    logprobs, entropy = linear_cross_entropy(*problem, 1.0, name)
    lower, _ = linear_cross_entropy(*problem, 1.0, name.lower())
    assert torch.equal(logprobs, lower)
    assert entropy.shape == (6,)


def test_another_order_of_the_tokens_is_refused_and_its_line_is_right() -> None:
    """Megatron's [s, b, h] beside labels [b, s]: flattened, each token would have another's label."""
    problem = p.draw(T=12)
    hidden, labels = problem.hidden.reshape(3, 4, -1).transpose(0, 1), problem.labels.reshape(3, 4)
    with pytest.raises(ValueError, match=r"\(4, 3, 32\) and labels \(3, 4\) .* pass hidden.transpose\(0, 1\)$"):
        linear_cross_entropy(hidden, problem.weight, labels)
    got = linear_cross_entropy(hidden.transpose(0, 1), problem.weight, labels)
    assert all(map(torch.equal, got, linear_cross_entropy(*problem)))
    with pytest.raises(ValueError, match=r"labels \(3, 5\) must have hidden's leading shape \(4, 3\)"):
        linear_cross_entropy(hidden, problem.weight, torch.zeros(3, 5, dtype=int))
