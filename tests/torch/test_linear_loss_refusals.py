"""What `linear_loss` does not serve, and that the remedies in its messages give right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_logprobs, linear_loss
from tests.torch import problem as p

GRADIENT = 1e-6  # as in test_parity
GOOD = p.draw(T=6, H=8, V=10)


def plain(logprobs: torch.Tensor, _entropy: Any, lse: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
    return lse - sum(own, logprobs)


@pytest.mark.parametrize(
    ("given", "own", "error", "message"),
    [
        (dict(loss_fn=lambda *_: 1.0), (), TypeError, r"loss_fn must return a tensor .* per token, got float"),
        (dict(loss_fn=lambda x, *_: x.sum()), (), ValueError, r"one floating-point number per token, .* got \(\)"),
        (dict(loss_fn=lambda x, *_: x > 0), (), ValueError, r"got \(6,\) of torch.bool"),
        ({}, (torch.ones(5),), ValueError, r"per_token\[0\] \(5,\) must begin with the shape of labels \(6,\)"),
        ({}, (torch.ones(6), [1.0]), TypeError, r"per_token\[1\] must be a torch.Tensor, got list"),
        ({}, (torch.ones(6, device="meta"),), ValueError, r"per_token\[0\] is on meta, hidden on cpu"),
        (dict(cache_bytes=1), (), TypeError, r"cache_bytes=1: .* chunk_bytes says"),
        (dict(vocab_part_size=8), (), TypeError, r"vocab_part_size=8: .* no backward can use"),
        (dict(mean_logit=True), (), TypeError, r"mean_logit=True: loss_fn gets .*; linear_logprobs has this option"),
        (dict(candidates=GOOD.labels[:, None]), (), TypeError, r"linear_logprobs has this option"),
        (dict(temprature=1.0), (), TypeError, r"^linear_loss: unknown option temprature; known: where, .*chunk_bytes"),
        (dict(chunk_bytes=-1), (), ValueError, r"chunk_bytes must be a whole number of bytes, at least 0, got -1"),
        (dict(wgrad="add"), (), ValueError, r"""wgrad must be "return" or "main_grad", got 'add'"""),
        (dict(entropy="none"), (), TypeError, r'entropy must be True, False or "metric", got .none.'),
        (dict(implementation="cutlass"), (), ValueError, r"unknown implementation 'cutlass'"),
    ],
)  # fmt: skip
def test_refusal(given: dict[str, Any], own: tuple[Any, ...], error: type[Exception], message: str) -> None:
    loss_fn, options = given.get("loss_fn", plain), {name: x for name, x in given.items() if name != "loss_fn"}
    for problem in (GOOD, GOOD.leaves()):
        with pytest.raises(error, match=message):
            linear_loss(loss_fn, *problem, *own, **options)


def test_a_tensor_that_loss_fn_closes_over() -> None:
    """Its gradient would be lost. Each of the remedies in the message."""
    leaves, scale = GOOD.leaves(), torch.nn.Parameter(torch.tensor(2.0))
    per_token = torch.randn(6, requires_grad=True)
    for closed in (scale, scale * 3, per_token):
        with pytest.raises(ValueError, match=r"loss_fn uses a tensor \((6,)?\) that requires a gradient and is none"):
            linear_loss(lambda logprobs, *_, x=closed: x * logprobs, *leaves)

    want = torch.autograd.grad((per_token * linear_logprobs(*leaves).logprobs).sum(), (leaves.hidden, per_token))
    total, _ = linear_loss(lambda logprobs, _entropy, _lse, x: x * logprobs, *leaves, per_token)  # as an argument
    grads = torch.autograd.grad(total, (leaves.hidden, per_token))
    total, _ = linear_loss(lambda logprobs, *_: per_token.detach() * logprobs, *leaves)  # detached
    detached = torch.autograd.grad(total, leaves.hidden)
    assert max(map(p.relative_norm, (*grads, *detached), (*want, want[0]))) < GRADIENT
    logprobs = linear_logprobs(*leaves).logprobs  # applied to the results, and summed
    (dscale,) = torch.autograd.grad((scale * logprobs).sum(), scale)
    assert p.relative_norm(dscale, logprobs.sum()) < GRADIENT


def test_derivatives_and_transforms() -> None:
    leaves = GOOD.leaves()
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(linear_loss(plain, *leaves)[0], leaves.hidden, create_graph=True)
    remedy = r"linear_loss differentiates loss_fn as it runs, .* apply loss_fn to the results of linear_logprobs, and"
    with pytest.raises(NotImplementedError, match=remedy):
        torch.func.grad(lambda w: linear_loss(plain, GOOD.hidden, w, GOOD.labels)[0])(GOOD.weight)
    with pytest.raises(NotImplementedError, match=remedy):
        linear_loss(plain, *(x.to("meta") for x in GOOD))

    def summed(weight: torch.Tensor) -> torch.Tensor:
        return plain(*linear_logprobs(GOOD.hidden, weight, GOOD.labels)[:3]).sum()

    (want,) = torch.autograd.grad(linear_loss(plain, *leaves)[0], leaves.weight)
    assert p.relative_norm(torch.func.grad(summed)(GOOD.weight), want) < GRADIENT


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, after a break
def test_compile_leaves_it_out_of_its_graphs() -> None:
    torch._dynamo.reset()
    leaves = GOOD.leaves()

    def call(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * linear_loss(plain, hidden * 1, weight, labels)[0]

    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_loss differentiates loss_fn as it runs"):
        torch.compile(call, fullgraph=True, backend="eager")(*leaves)
    got = torch.autograd.grad(torch.compile(call, backend="aot_eager")(*leaves), leaves[:2])
    assert all(map(torch.equal, got, torch.autograd.grad(call(*leaves), leaves[:2])))
