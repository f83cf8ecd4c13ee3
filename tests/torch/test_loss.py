"""The loss against ``torch.nn.functional.cross_entropy`` on stored logits, and the entropy of tokens without labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import lce_jax
from lce_torch_bridge import linear_cross_entropy, linear_entropy, linear_logprobs
from tests.pairs import pairs_of
from tests.torch import problem as p
from tests.torch.test_bias import draw_bias
from tests.torch.test_parity import single_rank_group

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity

OPTIONS: list[dict[str, Any]] = [
    {},
    dict(label_smoothing=0.1),
    dict(label_smoothing=0.1, z_loss=1e-2, temperature=0.7, logit_scale=1.3, logit_softcap=3.0),
    dict(label_smoothing=0.25, vocab_size=97, temperature=torch.linspace(0.5, 2, 37)),
    dict(z_loss=1e-2),
]


def draw() -> p.Problem:
    problem = p.draw(V=104)
    return problem._replace(labels=torch.where(torch.arange(37) % 5 == 0, -100, problem.labels % 90))


def stored(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    z = functional.linear(hidden, weight, bias) * logit_scale
    if logit_softcap is not None:
        z = logit_softcap * torch.tanh(z / logit_softcap)
    z = z[:, :vocab_size] / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    told: Any = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    loss = functional.cross_entropy(z, labels, reduction="none", **told)
    loss = loss + z_loss * torch.where(labels == ignore_index, 0.0, z.logsumexp(-1) ** 2)
    if reduction == "none":
        return loss
    if not z_loss:  # torch's own wording
        return functional.cross_entropy(z, labels, reduction=reduction, **told)
    return loss.sum() if reduction == "sum" else loss.sum() / (labels != ignore_index).sum()


def measured(call: Any, problem: p.Problem, bias: torch.Tensor, seed: torch.Tensor, **options: Any) -> Any:
    leaves, bias = problem.leaves(), bias.clone().requires_grad_()
    loss = call(*leaves, bias=bias, **options)
    return loss, torch.autograd.grad((loss * (seed if loss.ndim else 1.0)).sum(), (*leaves[:2], bias))


@pairs_of(1, options=OPTIONS, reduction=["mean", "sum", "none"])
def test_as_torchs_cross_entropy(options: dict[str, Any], reduction: str) -> None:
    problem, bias, seed = draw(), draw_bias(), p.seeds_like(draw().labels)[0]
    loss, grads = measured(linear_cross_entropy, problem, bias, seed, reduction=reduction, **options)
    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels)
    want, wanted = measured(stored, double, bias.double(), seed.double(), reduction=reduction, **options)
    assert loss.dtype == torch.float32
    assert p.value_error(loss, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


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


def test_as_the_loss_of_lce_jax() -> None:
    problem = draw()
    told: Any = dict(ignore_index=-100, label_smoothing=0.1, z_loss=1e-2)
    want = lce_jax.linear_cross_entropy(*(x.numpy() for x in problem), **told)
    assert linear_cross_entropy(*problem, **told).item() == pytest.approx(float(want), rel=1e-6)


def test_megatrons_smoothing_by_another_number() -> None:
    """On one rank, as the docstring has it."""
    cross_entropy = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")
    problem = p.draw()
    seed = p.seeds_like(problem.labels)[0]
    with single_rank_group() as group:
        leaves = problem.leaves()
        stock = cross_entropy.vocab_parallel_cross_entropy(
            leaves.hidden[:, None] @ leaves.weight.T, leaves.labels[:, None], 0.1, tp_group=group
        )[:, 0]
        wanted = torch.autograd.grad((stock * seed).sum(), leaves[:2])
    leaves = problem.leaves()
    loss = linear_cross_entropy(*leaves, label_smoothing=0.1 * 104 / 103, reduction="none")
    grads = torch.autograd.grad((loss * seed).sum(), leaves[:2])
    assert p.value_error(loss, stock) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT


def test_compiled_smoothings() -> None:
    torch._dynamo.reset()
    problem, bias, seed = draw(), draw_bias(), p.seeds_like(draw().labels)[0]
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for smoothing in (0.1, 0.2, 0.3):
        eager = measured(linear_cross_entropy, problem, bias, seed, label_smoothing=smoothing, z_loss=1e-3)
        got = measured(compiled, problem, bias, seed, label_smoothing=smoothing, z_loss=1e-3)
        assert p.value_error(got[0], eager[0]) < VALUE
        assert max(map(p.relative_norm, got[1], eager[1])) < GRADIENT


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(reduction="avg"), ValueError, r"""reduction must be "mean", "sum" or "none", got 'avg'"""),
        (dict(label_smoothing=1.0), ValueError, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        (dict(label_smoothing="0.1"), TypeError, r"label_smoothing must be a Python number, got str '0.1'"),
        (dict(z_loss=-1e-4), ValueError, r"z_loss must not be negative, got -0.0001"),
        (dict(ignore_index=-100.0), TypeError, r"ignore_index must be a Python integer, got -100.0"),
        (dict(entropy="metric"), TypeError, r"entropy='metric': a loss has no such output"),
        (dict(stats=True), TypeError, r"stats=True: a loss has no such output"),
        (dict(labels=[1, 2]), TypeError, r"labels must be a torch.Tensor, got list"),
        (dict(labels=torch.ones(6)), TypeError, r"labels must be integers .* got torch.float32"),
        (dict(where=torch.ones(5, dtype=bool)), ValueError, r"where \(5,\) must have the tokens' shape \(6,\)"),
        (dict(smoothing=0.1), TypeError, r"unknown option smoothing; known: reduction, .*label_smoothing"),
    ],
)  # fmt: skip
def test_refusals_of_the_loss(given: dict[str, Any], error: type[Exception], message: str) -> None:
    good = p.draw(T=6, H=8, V=10)._asdict()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**good, **given})


@pytest.mark.parametrize(
    "options",
    [{}, dict(temperature=torch.linspace(0.5, 2, 40).view(4, 10), logit_softcap=3.0), dict(vocab_size=97)],
    ids=str,
)
def test_entropy_without_labels(options: dict[str, Any]) -> None:
    problem = p.draw(T=40)
    seeds = p.seeds_like(problem.labels)
    leaves = problem.leaves()
    entropy, lse = linear_entropy(leaves.hidden.view(4, 10, -1), leaves.weight, **options)
    assert entropy.shape == lse.shape == (4, 10)
    told = {name: x.flatten() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want, wanted = p.exact(problem, [0 * seeds[0], *seeds[1:]], **told)
    assert p.value_error(entropy.flatten(), want.entropy) < VALUE
    assert p.value_error(lse.flatten(), want.lse) < VALUE
    objective = (seeds[1] * entropy.flatten()).sum() + (seeds[2] * lse.flatten()).sum()
    assert max(map(p.relative_norm, torch.autograd.grad(objective, leaves[:2]), wanted)) < GRADIENT


def test_entropy_has_the_bits_of_a_call_with_labels() -> None:
    problem = p.draw()
    out = linear_logprobs(*problem, where=torch.arange(0, 37, 3))
    for call in (linear_entropy, torch.compile(linear_entropy, fullgraph=True, backend="aot_eager")):
        entropy, lse = call(*problem[:2], where=torch.arange(0, 37, 3))
        assert torch.equal(entropy, out.entropy)
        assert torch.equal(lse, out.lse)
    entropy, _ = linear_entropy(torch.zeros(2, 0, 8), torch.ones(16, 8))
    assert entropy.shape == (2, 0)


@pytest.mark.parametrize(
    ("hidden", "given", "error", "message"),
    [
        (torch.ones(6, 8), dict(entropy=False), TypeError, r"entropy=False: linear_entropy returns entropy and lse"),
        (torch.ones(6, 8), dict(ignore_index=-100), TypeError, r"ignore_index=-100: linear_entropy returns"),
        (torch.ones(6, 8), dict(where=torch.ones(5, dtype=bool)), ValueError, r"the tokens' shape \(6,\)"),
        (torch.ones(6, 7), {}, ValueError, r"hidden \(6, 7\) must end in the H of weight .* \(10, 8\)"),
        ([1.0], {}, TypeError, r"hidden must be a torch.Tensor, got list"),
        (torch.tensor(1.0), {}, ValueError, r"hidden must be \[\.\.\., H\]"),
    ],
)  # fmt: skip
def test_refusals_of_the_entropy(hidden: Any, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_entropy(hidden, torch.ones(10, 8), **given)
