"""`lce_torch_bridge.losses.distillation_loss` against its formulas in float64, and against `lce_jax`'s own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lce_jax.losses
from lce_torch_bridge import linear_logprobs, linear_topk
from lce_torch_bridge.losses import distillation_loss
from tests.ops.test_distillation_loss import BETA, DIVERGENCES, RESTS, draw, expected
from tests.oracle import relative_norm, value_error
from tests.style.test_docstrings import entries, sections

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
    "float ids": (dict(ids=X), TypeError, "ids must be integers .* got torch.float32"),
    "no candidates": (dict(ids=IDS[:, :0]), ValueError, r"ids \(4, 0\) must end in K, from 1 to 512"),
    "a list": (dict(candidate_logprobs=[[1.0]]), TypeError, r"candidate_logprobs must be a torch.Tensor, got list"),
    "divergence": (dict(divergence="kl"), ValueError, "or \"jsd\", got 'kl'"),
    "rest": (dict(rest="tail"), ValueError, "or \"renormalize\", got 'tail'"),
    "beta of a KL": (dict(beta=0.5), ValueError, 'beta=0.5 is a weight of divergence="jsd"'),
    "beta 0": (dict(divergence="jsd", beta=0), ValueError, 'got 0.0: divergence="forward_kl" is 0'),
    "a tensor of beta": (dict(divergence="jsd", beta=X[0, 0]), TypeError, "beta must be a Python number, got Tensor"),
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
