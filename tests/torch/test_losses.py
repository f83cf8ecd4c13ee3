"""Losses: the tokens that count, verl's function, `linear_loss` around float64's programs, candidates' divergences."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import lce_jax.losses
from lce_torch_bridge import (
    linear_cross_entropy,
    linear_entropy,
    linear_logprobs,
    linear_loss,
    linear_topk,
    losses,
    verl,
)
from lce_torch_bridge.losses import distillation_loss
from tests.ops.test_distillation_loss import BETA, DIVERGENCES, RESTS, draw, expected
from tests.oracle import relative_norm, value_error
from tests.style.test_docstrings import entries, sections
from tests.torch import problem as p
from tests.torch.test_linear_loss import MANY, ROUNDING, arguments, ppo, two_passes
from tests.torch.test_main_grad import WAYS, parameter, ways

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
    with pytest.raises(ValueError, match=r"labels \(3, 5\) .*\(4, 3\)"):
        verl.linear_cross_entropy(hidden, problem.weight, torch.zeros(3, 5, dtype=int))


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
    problem, chunks = p.draw(T=MANY), []
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


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("options", [{"chunk_bytes": 0}, {"entropy": "metric"}], ids=str)
def test_a_loss_fn_may_overwrite_what_it_gets(options: dict[str, Any], recorded: bool) -> None:
    """After its last use, and what it returned for the chunk before: results and gradients are the same."""
    problem, memory = p.draw(T=MANY), torch.empty(MANY)

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


to = torch.from_numpy


def evaluate(q: Any, p: Any, ids: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The losses, and the gradient of their sum in ln q."""
    if options.get("divergence") == "jsd":
        options.setdefault("beta", BETA)
    student = to(np.log(q)).float().requires_grad_()
    loss = distillation_loss(student, to(np.log(p)).float(), to(ids), **options)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    return loss.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_formulas(divergence: str, rest: str) -> None:
    """Rows that do not count hold NaN; one that counts has no candidates."""
    q, p, ids = draw()
    where = np.arange(50) % 2 == 0
    hole = np.where(where[:, None], 1.0, np.nan)
    ids[2] = -1
    loss, gradient = evaluate(q * hole, p * hole, ids, divergence=divergence, rest=rest, where=to(where))
    counts = where & (ids >= 0).any(-1)
    want, wanted = expected(divergence, rest, q[counts], p[counts], ids[counts] >= 0)
    assert value_error(loss[counts], want) < 2e-6
    assert relative_norm(gradient[counts], wanted) < 2e-6
    assert (loss[~counts] == 0).all()
    assert (gradient[~counts] == 0).all()
    assert (gradient[ids < 0] == 0).all()


@pytest.mark.parametrize("beta", [1e-30, 1e-8, 1 - 1e-4, 1 - 2**-50])
def test_a_jsd_is_exact_to_its_ends(beta: float) -> None:
    q, p, ids = draw()
    loss, gradient = evaluate(q, p, ids, divergence="jsd", beta=beta)
    want, wanted = expected("jsd", "bin", q, p, ids >= 0, beta)
    size = min(beta, 1 - beta)  # float32 holds the results, but not their squares
    assert relative_norm(loss.astype(float) / size, want / size) < 1e-5
    assert relative_norm(gradient.astype(float) / size, wanted / size) < 1e-5


def test_second_derivatives() -> None:
    q, p, ids = (to(x) for x in draw(rows=3))
    for divergence in DIVERGENCES:
        for rest in RESTS:
            assert torch.autograd.gradgradcheck(
                lambda x, d=divergence, r=rest: distillation_loss(x, p.log(), ids, divergence=d, rest=r),
                q.log().requires_grad_(),
            )


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("rest", RESTS)
def test_edges_are_those_of_jax(divergence: Any, rest: Any) -> None:
    """A rest near 0, candidates that hold all mass or too much, a teacher that is certain, equal models."""
    q = np.array([[1 - 2e-6, 1e-6], [0.3, 0.2], [0.75, 0.25], [0.75, 0.25], [0.5, 0.25], [0.9, 0.9]], np.float32)
    p = np.array([[1 - 5e-6, 2e-6], [0.75, 0.25], [0.3, 0.2], [0.75, 0.25], [1.0, 0.0], [0.6, 0.3]], np.float32)
    with np.errstate(divide="ignore"):
        logs = np.log(q), np.log(p)
    ids = np.arange(12).reshape(6, 2)
    got = distillation_loss(*map(to, logs), to(ids), divergence=divergence, rest=rest)
    want = np.asarray(lce_jax.losses.distillation_loss(*logs, ids, divergence=divergence, rest=rest))
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=2e-7)
    assert np.isnan(want[5]) == (rest != "renormalize")


def test_a_student_of_a_teachers_top_k() -> None:
    """Through both heads, in gradients of hidden and weight, in bfloat16 too."""
    generator = torch.Generator().manual_seed(0)
    teacher, heads = (torch.randn(12, 32, generator=generator), torch.randn(64, 32, generator=generator) / 4), []
    for H in (16, 16):
        heads.append(torch.randn(12 if not heads else 64, H, generator=generator).requires_grad_())
    top = linear_topk(*teacher, 64)  # all of the vocabulary: the divergence is that of whole distributions
    out = linear_logprobs(*heads, torch.zeros(12, dtype=torch.int64), candidates=top.ids, entropy=False)
    got = distillation_loss(out.candidate_logprobs, top.logprobs, top.ids, rest="drop").sum()
    log_q, log_p = (heads[0] @ heads[1].T).log_softmax(-1), (teacher[0] @ teacher[1].T).log_softmax(-1)
    want = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    for a, b in zip(torch.autograd.grad(got, heads), torch.autograd.grad(want, heads), strict=True):
        assert relative_norm(a.numpy(), b.numpy()) < 2e-6
    half = distillation_loss(out.candidate_logprobs.bfloat16(), top.logprobs.bfloat16(), top.ids)
    assert half.dtype == torch.float32


X, IDS = torch.full((4, 3), -2.0), torch.zeros((4, 3), dtype=torch.int64)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another shape": (dict(teacher_logprobs=X[:2]), ValueError, r"teacher_logprobs \(2, 3\) .* ids \(4, 3\)"),
    "ids as log-probabilities": (dict(candidate_logprobs=IDS), ValueError, r"\(4, 3\) of torch.int64 must be floating"),
    "float ids": (dict(ids=X), TypeError, "ids must be integers, got torch.float32"),
    "no candidates": (dict(ids=IDS[:, :0]), ValueError, r"ids \(4, 0\) .* 1 to 512"),
    "a list": (dict(candidate_logprobs=[[1.0]]), TypeError, r"candidate_logprobs .*Tensor, got list"),
    "divergence": (dict(divergence="kl"), ValueError, "or \"jsd\", got 'kl'"),
    "rest": (dict(rest="tail"), ValueError, "or \"renormalize\", got 'tail'"),
    "beta of a KL": (dict(beta=0.5), ValueError, 'beta=0.5 is a weight of divergence="jsd"'),
    "beta 0": (dict(divergence="jsd", beta=0), ValueError, 'got 0.0: divergence="forward_kl" is 0'),
    "a tensor of beta": (dict(divergence="jsd", beta=X[0, 0]), TypeError, "beta .*number, got Tensor"),
    "where of another shape": (dict(where=IDS == 0), ValueError, r"where \(4, 3\) must .* ids before K \(4,\)"),
    "where of numbers": (dict(where=X[:, 0]), TypeError, "where must be bool, got torch.float32"),
}


@pytest.mark.parametrize(("changed", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distillation_loss(**{"candidate_logprobs": X, "teacher_logprobs": X, "ids": IDS, **changed})


def test_the_words_are_those_of_lce_jax() -> None:
    ours, theirs = (entries(sections(f)["Args"]) for f in (distillation_loss, lce_jax.losses.distillation_loss))
    different = {name for name in ours if ours[name] != theirs[name]}
    assert ours.keys() == theirs.keys()
    assert different == {"beta"}  # a number here, perhaps an array there


NAMES = "old_logprob", "advantage", "reference_logprob"
PER_TOKEN: dict[str, tuple[int, dict[str, float]]] = {  # how many arguments, and parameters
    "cross_entropy": (0, {"z_loss": 0.1}),
    "ppo_clip": (2, {"clip": 0.1}),
    "dapo": (2, {}),
    "grpo": (3, {"kl": 0.5}),
    "cispo": (2, {"clip_low": 0.3, "clip_high": 0.5}),
}


@pytest.mark.parametrize("bonus", [0.0, 0.1])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_loss_of_each_token_is_that_of_lce_jax(name: str, bonus: float) -> None:
    """Values and gradients, inside and outside of the clip's range, and far off-policy; what names, in what order."""
    count, parameters = PER_TOKEN[name]
    ours, theirs = getattr(losses, name), getattr(lce_jax.losses, name)
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters]
    rng = np.random.default_rng(0)
    given = np.stack([-rng.exponential(3, 60), rng.exponential(2, 60), rng.normal(5, 2, 60)])
    own = np.stack([given[0] + rng.normal(0, 1, 60), rng.normal(size=60), given[0] + rng.normal(0, 1, 60)])
    own[0, :3], own[2, 3:6], own[1, 6:9] = -1e4, 1e4, 0.0
    x, own = given.astype(np.float32), own[:count].astype(np.float32)
    if bonus:
        ours, theirs = losses.with_entropy_bonus(ours, bonus), lce_jax.losses.with_entropy_bonus(theirs, bonus)

    leaf = torch.tensor(x, requires_grad=True)
    found = ours(*leaf, **dict(zip(NAMES, torch.tensor(own), strict=False)), **parameters)
    (slopes,) = torch.autograd.grad(found.sum(), leaf)

    def total(x: Any) -> Any:
        each = jax.vmap(functools.partial(theirs, **parameters))(*x, *own)
        return each.sum(), each

    wanted, want = jax.grad(total, has_aux=True)(jnp.asarray(x))
    np.testing.assert_allclose(found.detach().numpy(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slopes.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "count"), [("lk_alpha", 1), ("lk_lambda", 2)])
def test_losses_of_draft_models_are_those_of_lce_jax(name: str, count: int) -> None:
    """Values and gradients, of tokens that are all accepted or all rejected too."""
    variation = np.array([0.0, 1e-6, 0.4, 0.9, 1 - 2**-19, 1 - 2**-21, 1.0], np.float32)
    given = [np.linspace(0, 3, 7, dtype=np.float32), variation][-count:]
    leaves = [torch.tensor(x, requires_grad=True) for x in given]
    found, theirs = getattr(losses, name)(*leaves), getattr(lce_jax.losses, name)
    slopes = torch.autograd.grad(found.sum(), leaves)
    want = theirs(*given), *jax.grad(lambda *x: theirs(*x).sum(), range(count))(*given)
    for got, wanted in zip((found.detach(), *slopes), want, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5)


def test_arguments_by_name_and_numbers() -> None:
    """In any order, one number per sequence, and parameters; with the gradient of what needs one."""
    problem = p.draw(T=40)
    labels, advantage = problem.labels.view(4, 10), torch.randn(4, 1).requires_grad_()
    old = linear_logprobs(*problem).logprobs.view(4, 10) + 0.3 * torch.randn(4, 10)
    leaves = problem._replace(hidden=problem.hidden.view(4, 10, -1), labels=labels).leaves()
    told: Any = dict(chunk_bytes=0, wgrad="return")
    by_name, _ = linear_loss(
        losses.grpo, *leaves, reference_logprob=old, kl=0.5, advantage=advantage, old_logprob=old, **told
    )
    loss = functools.partial(losses.grpo, kl=0.5)
    by_place, _ = linear_loss(loss, *leaves, old, advantage.expand(4, 10), old, **told)
    inputs = *leaves[:2], advantage
    assert torch.equal(by_name, by_place)
    assert all(map(torch.equal, *(torch.autograd.grad(x, inputs) for x in (by_name, by_place))))
    constant, _ = linear_loss(lambda x, _, __, a: a * x, *leaves, 2.0)
    assert torch.equal(constant, linear_loss(lambda x, _, __, a: a * x, *leaves, a=torch.tensor(2.0))[0])
    with pytest.raises(ValueError, match=r"advantage \(4,\) .*labels \(4, 10\), or have 1"):
        linear_loss(losses.ppo_clip, *leaves, old_logprob=old, advantage=advantage[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *x: losses.cross_entropy(*x[:3], z_loss=-1.0), "z_loss .*negative, got -1"),
        (lambda *x: losses.ppo_clip(*x, clip=-0.5), "clip .*negative, got -0.5"),
        (lambda *x: losses.grpo(*x, x[0], kl=-0.5), "kl .*negative, got -0.5"),
        (lambda *x: losses.cispo(*x, clip_high=torch.ones(1)), "clip_high .*number, got Tensor"),
        (lambda *x: losses.lk_lambda(*x[:2], eta=-1.0), "eta .*negative, got -1"),
        (lambda *x: losses.lk_lambda(x[0], x[1][None]), r"variation \(1, 3\) must have the shape of kl \(3,\)"),
        (lambda *_: losses.with_entropy_bonus(losses.dapo, "1"), "coefficient must be .*'1'"),
        (lambda *x: losses.with_entropy_bonus(losses.dapo, 0.1)(x[0], None, *x[2:]), "0.1 needs the entropy"),
        (lambda *x: losses.cispo(x[0][None], *x[1:], clip_high=1), r"old_logprob \(3,\) must .*logprob \(1, 3\)"),
        (lambda *x: losses.grpo(*x, torch.zeros(3, 1)), r"reference_logprob \(3, 1\) must have the dim.*\[b, 1\] for"),
    ],
)
def test_mistakes_of_losses(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(*torch.zeros(5, 3))
