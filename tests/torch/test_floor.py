"""A floor of the logits in torch: a loss in the forward, kept tokens, graphs, refusals. Values: `test_parity`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import explain, linear_entropy, linear_logprobs, linear_loss
from tests import cases
from tests.torch import problem as p

TEST = cases.case("floor", leading=(4, 6), floor=5, stats=True, labels="foreign", temperature="token")


def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return -torch.exp(logprobs / 10) - 0.1 * entropy + 0.01 * lse**2


def test_a_loss_in_the_forward_is_that_of_the_results() -> None:
    problem, options, _ = p.from_case(TEST)
    options["keep"] = torch.arange(24).view(4, 6) % 3 > 0
    leaves, others = problem.leaves(), problem.leaves()
    total, out = linear_loss(loss_fn, *leaves, chunk_bytes=0, **options)
    by_results = linear_logprobs(*others, **options)
    of_kept = loss_fn(*by_results[:3])[options["keep"]].sum()
    assert torch.allclose(total, of_kept, rtol=1e-6)
    assert out.support is not None
    assert torch.equal(out.support, by_results.support)
    assert set(out.support.flatten().tolist()) == {0, 5, 6}
    for got, want in zip(
        *(torch.autograd.grad(x, y[:2]) for x, y in ((total, leaves), (of_kept, others))), strict=True
    ):
        assert p.relative_norm(got, want) < 1e-6


def test_in_a_graph() -> None:
    problem, options, seeds = p.from_case(TEST)
    compiled = torch.compile(linear_logprobs, fullgraph=True, backend="aot_eager")
    got, want = (p.gradients(problem, seeds, call=call, **options) for call in (compiled, linear_logprobs))
    for one, other in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_number_and_all_tokens() -> None:
    problem = p.draw()
    want = linear_logprobs(*problem, stats=True)
    got = linear_logprobs(*problem, stats=True, logit_floor=-float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True))
    assert got.support is not None
    assert torch.all(got.support == 104)
    entropy, _ = linear_entropy(*problem[:2], logit_floor=1e30)  # without labels, no token is left
    assert torch.all(entropy == 0)
    foreign = problem._replace(labels=torch.full_like(problem.labels, -100))
    assert torch.all(linear_logprobs(*foreign, logit_floor=1e30, out_of_vocab="megatron").logprobs == 0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (dict(logit_floor=float("nan")), ValueError, "logit_floor must be finite in float32, got nan"),
        (dict(logit_floor=torch.full((37,), torch.nan)), ValueError, "logit_floor must be .* is nan in 37 places"),
        (dict(logit_floor=torch.ones(3)), ValueError, r"logit_floor \(3,\) must broadcast to .* \(37,\)"),
        (dict(logit_floor=torch.ones(37).int()), TypeError, r"logit_floor must be floating point, got torch\.int32"),
        (dict(logit_floor=torch.ones(37).requires_grad_()), ValueError, r"pass logit_floor\.detach\(\)"),
        (dict(logit_floor=0.0, mean_logit=True), ValueError, r"logit_floor with label_smoothing \(or mean_logit\)"),
        (dict(logit_floor=0.0, gradient_threshold=0.1), ValueError, "logit_floor with gradient_threshold=0.1"),
        (dict(logit_floor=0.0, candidates=torch.zeros(37, 2).int()), ValueError, "logit_floor with candidates, 2 per"),
    ],
)
def test_refusals(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    for call in (linear_logprobs, explain):
        with pytest.raises(kind, match=message):
            call(*p.draw(), **options)
