"""Which tokens a loss counts, verl's function, and results of one function that another takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_cross_entropy, linear_entropy, linear_logprobs, linear_topk, verl
from tests.torch import problem as p

pytestmark = pytest.mark.usefixtures("in_float64")
VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity


@pytest.mark.parametrize("ignore_index", [-100, 7, None])
def test_tokens_that_count(ignore_index: int | None) -> None:
    """Of a batch ``[b, s]``, without those of ``where`` and ``ignore_index``; if that is not -100, -100 counts."""
    problem = p.draw(T=40)
    problem.labels[::6] = 7
    problem.labels[1] = -100
    keep = torch.arange(40) % 3 != 0
    counts = keep & (problem.labels != ignore_index) if ignore_index is not None else keep
    hidden, labels = problem.hidden.view(4, 10, -1), problem.labels.view(4, 10)
    told: Any = dict(ignore_index=ignore_index, label_smoothing=0.1)
    out = p.stored(*problem)
    each = torch.where(counts, -0.9 * out.logprobs + 0.1 * (out.lse - out.mean_logit), 0.0)
    for given in (keep.view(4, 10), keep.nonzero().squeeze(1)):
        loss = linear_cross_entropy(hidden, problem.weight, labels, where=given, reduction="none", **told)
        assert loss.shape == (4, 10)
        assert p.value_error(loss.flatten(), each) < VALUE
        mean = linear_cross_entropy(hidden, problem.weight, labels, where=given, **told)
        assert p.value_error(mean, each.sum() / counts.sum()) < VALUE


@pytest.mark.parametrize("labels", [torch.full((6,), -100), torch.zeros(0, dtype=torch.int64)], ids=["none", "empty"])
def test_where_no_token_counts_the_loss_is_0(labels: torch.Tensor) -> None:
    hidden, weight = torch.randn(len(labels), 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, z_loss=0.1)
    assert loss == 0
    loss.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_entropy_has_the_bits_of_a_call_with_labels() -> None:
    problem = p.draw()
    out = linear_logprobs(*problem, where=torch.arange(0, 37, 3))
    entropy, lse = linear_entropy(*problem[:2], where=torch.arange(0, 37, 3))
    assert torch.equal(entropy, out.entropy)
    assert torch.equal(lse, out.lse)


def test_metric_entropy_has_no_gradient() -> None:
    problem = p.draw()
    seeds, leaves = p.seeds_like(problem.labels), problem.leaves()
    metric = linear_logprobs(*leaves, entropy="metric", stats=True, mean_logit=True)
    assert [field.requires_grad for field in metric[:6]] == [True, False, True, False, False, True]
    got = torch.autograd.grad(p.objective(metric._replace(entropy=None), seeds), leaves[:2])
    _, want = p.gradients(problem, [seeds[0], 0 * seeds[1], seeds[2]])
    assert max(map(p.relative_norm, got, want)) < GRADIENT
    out, without = p.gradients(problem, seeds, entropy=False)
    assert out.entropy is None
    assert max(map(p.relative_norm, without, want)) < GRADIENT


def test_a_teacher_for_candidates() -> None:
    """No gradient flows through the most likely tokens, and their ids are candidates as they are."""
    leaves = p.draw(dtype=torch.bfloat16).leaves()
    top = linear_topk(leaves.hidden, leaves.weight, 7)
    assert not top.logprobs.requires_grad
    assert not top.lse.requires_grad
    out = linear_logprobs(*leaves, candidates=top.ids)
    assert p.value_error(out.candidate_logprobs, top.logprobs) < VALUE


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "Mean", "SUM", "None", None])
def test_verls_signature(reduction: str | None) -> None:
    """Positional, flat, and a log-probability, not its negative; reductions in letters of either case."""
    problem = p.draw(T=24)
    problem = problem._replace(hidden=problem.hidden.view(4, 6, -1), labels=problem.labels.view(4, 6))
    leaves = problem.leaves()
    logprobs, entropy = verl.linear_cross_entropy(*leaves, 0.7, reduction, None)
    want = p.stored(*problem, temperature=0.7)
    reduce = {"none": torch.clone, "sum": torch.sum, "mean": torch.mean}[(reduction or "none").lower()]
    assert p.value_error(logprobs, reduce(want.logprobs.reshape(-1))) < 10 * VALUE  # a sum of 24
    assert p.value_error(entropy, want.entropy.reshape(-1)) < VALUE
    assert logprobs.max() < 0
    (logprobs.sum() - 0.1 * entropy.sum()).backward()
    stored = problem.leaves()
    true = p.stored(*stored, temperature=0.7)
    (reduce(true.logprobs).sum() - 0.1 * true.entropy.sum()).backward()
    assert p.relative_norm(leaves.weight.grad, stored.weight.grad) < GRADIENT
    with pytest.raises(ValueError, match=r"""reduction must be "none", "sum" or "mean", got 'avg'"""):
        verl.linear_cross_entropy(*problem, 1.0, "avg")


@pytest.mark.parametrize(
    ("leading", "labelled"),
    [((6, 1), (1, 6)), ((1, 6), (6,)), ((6,), (1, 6)), ((2, 3), (6,)), ((6,), (2, 3)), ((2, 1, 3), (2, 3))],
    ids=str,
)
def test_verls_shapes_that_hold_the_same_tokens(leading: tuple[int, ...], labelled: tuple[int, ...]) -> None:
    """``[T, 1, h]`` with ``[1, T]`` is its call in Megatron, on packed sequences."""
    problem, temperature = p.draw(T=6), torch.linspace(0.5, 2, 6)
    leaves, seeds = problem.leaves(), p.seeds_like(problem.labels)
    hidden, labels = leaves.hidden.reshape(*leading, -1), problem.labels.reshape(labelled)
    out = verl.linear_cross_entropy(hidden, leaves.weight, labels, temperature.reshape(labelled))
    want, wanted = p.exact(problem, [*seeds[:2], 0 * seeds[2]], temperature=temperature)
    assert max(map(p.value_error, out, want)) < VALUE
    assert all(x.shape == (6,) for x in out)
    grads = torch.autograd.grad(sum((seed * x).sum() for seed, x in zip(seeds, out, strict=False)), leaves[:2])
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def test_another_order_of_verls_tokens_is_refused_and_its_line_is_right() -> None:
    """Megatron's [s, b, h] beside labels [b, s]: flattened, each token would have another's label."""
    problem = p.draw(T=12)
    hidden, labels = problem.hidden.reshape(3, 4, -1).transpose(0, 1), problem.labels.reshape(3, 4)
    with pytest.raises(ValueError, match=r"\(4, 3, 32\) and labels \(3, 4\) .* pass hidden.transpose\(0, 1\)$"):
        verl.linear_cross_entropy(hidden, problem.weight, labels)
    got = verl.linear_cross_entropy(hidden.transpose(0, 1), problem.weight, labels)
    assert all(map(torch.equal, got, verl.linear_cross_entropy(*problem)))
    with pytest.raises(ValueError, match=r"labels \(3, 5\) must have hidden's leading shape \(4, 3\)"):
        verl.linear_cross_entropy(hidden, problem.weight, torch.zeros(3, 5, dtype=int))
