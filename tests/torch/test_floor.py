"""A floor of the logits in torch: a loss in the forward, kept tokens, graphs, refusals. Values: `test_parity`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_entropy, linear_logprobs, linear_loss
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from tests import cases
from tests.torch import problem as p
from tests.torch.as_gpu import emulated
from tests.torch.ranks import Ranks

TEST = cases.case("floor", leading=(4, 6), floor=5, stats=True, labels="foreign", temperature="token")


def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return -torch.exp(logprobs / 10) - 0.1 * entropy + 0.01 * lse**2


def test_a_loss_in_the_forward_is_that_of_the_results() -> None:
    problem, options, _ = p.from_case(TEST)
    options["where"] = torch.arange(24).view(4, 6) % 3 > 0
    leaves, others = problem.leaves(), problem.leaves()
    total, out = linear_loss(loss_fn, *leaves, chunk_bytes=0, **options)
    by_results = linear_logprobs(*others, **options)
    of_kept = loss_fn(*by_results[:3])[options["where"]].sum()
    assert torch.allclose(total, of_kept, rtol=1e-6)
    assert out.support is not None
    assert torch.equal(out.support, by_results.support)
    assert set(out.support.flatten().tolist()) == {0, 5, 6}
    for got, want in zip(
        *(torch.autograd.grad(x, y[:2]) for x, y in ((total, leaves), (of_kept, others))), strict=True
    ):
        assert p.relative_norm(got, want) < 1e-6


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


def of_kernels(problem: p.Problem, **options: Any) -> Any:
    """The results, and both gradients."""
    out, grads = p.gradients(problem, p.seeds_like(problem.labels), **options)
    return [x.detach() for x in out if x is not None], grads


def test_as_a_list_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with a NaN, without a token in the set, with all and with one, beside others."""
    problem, generator = p.draw(40, 128, 520, torch.bfloat16), torch.Generator().manual_seed(5)
    problem.labels[:8], problem.labels[0], problem.labels[9] = torch.arange(8) - 4, 7, 520
    temperature = torch.rand(40, generator=generator) + 0.5
    z = p.stored_logits(problem.hidden.double(), problem.weight.double(), torch.arange(520).expand(40, -1)).sort(-1)[0]
    floor = ((z[:, -30] + z[:, -31]) / 2 / temperature).float()
    floor[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    floor[5] = float("inf")
    monkeypatch.setattr("lce_torch_bridge.call._checks.may_look_at", lambda _: False)
    options: Any = dict(logit_floor=floor, temperature=temperature, stats=True, vocab_size=510)
    want, of_jax = of_kernels(problem, implementation="xla", **options)
    loaded = emulated(monkeypatch)
    programs = next(loaded)
    found, grads = of_kernels(problem, **options)
    assert len(programs) == 2
    next(loaded, None)
    assert found[-1][[1, 2, 5]].tolist() == [0, 510, 1]
    for got, true in zip(found, want, strict=True):
        assert got[0].isnan()
        assert true[0].isnan()
        assert p.value_error(got[1:], true[1:]) < 2e-5
    assert max(map(p.relative_norm, grads, of_jax)) < 5e-3  # bfloat16 rounds by 2⁻⁹


@pytest.mark.slow
def test_lists_of_a_split_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a whole one, the same bits on both ranks. Some rows have no token of their set on a rank."""
    problem = p.draw(40, 128, 1040, torch.bfloat16)
    z = p.stored_logits(problem.hidden.double(), problem.weight.double(), torch.arange(1040).expand(40, -1)).sort(-1)[0]
    floor = ((z[:, -2] + z[:, -3]) / 2).float()
    with torch.no_grad():
        want = linear_logprobs(*problem, logit_floor=floor, stats=True)
    loaded = emulated(monkeypatch)
    programs = next(loaded)
    ranks = Ranks(monkeypatch)
    call = p.told(1040, group="both", implementation="mosaic_gpu", has_floor=True, stats=True)
    parts = [Tensors(problem.hidden, each, None, problem.labels, None, None, floor) for each in problem.weight.chunk(2)]
    found = []
    for ranks.rank in (0, 1, 0, 1):  # what the first two send, the last two receive
        part = parts[ranks.rank]
        found.append(_execute.forward(part, call, False, way_of(part.hidden))[: len(call.fields)])
    assert len(programs) == 2  # one on each rank
    other = floor.clone()
    other[6] += 1
    parts[1] = parts[1]._replace(floor=other)
    ranks.gathered.clear()
    for ranks.rank in (0, 1, 0):
        part = parts[ranks.rank]
        differ = _execute.forward(part, call, False, way_of(part.hidden))[: len(call.fields)]
    next(loaded, None)
    assert all(x.isnan().nonzero().tolist() == [[6]] for x in differ)
    assert all(map(torch.equal, found[2], found[3]))
    fields = dict(zip(call.fields, found[3], strict=True))
    assert max(p.value_error(x, getattr(want, name)) for name, x in fields.items()) < 2e-5
