"""The k most likely tokens, against a sort of stored logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_jax import UnsupportedError
from lce_torch_bridge import TopK, linear_logprobs, linear_topk
from lce_torch_bridge._types import Operands
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p

VALUE = 2e-6  # as in test_parity
BIAS = torch.randn(104, generator=torch.Generator().manual_seed(5))


def stored(problem: p.Problem, k: int, **options: Any) -> TopK:
    """In float64, equal logits by the smaller id."""
    ids = torch.arange(options.get("vocab_size", len(problem.weight))).expand(*problem.labels.shape, -1)
    given = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    z = p.stored_logits(problem.hidden.double(), problem.weight.double(), ids, **given)
    found = z.sort(dim=-1, descending=True, stable=True)
    lse = z.logsumexp(-1)
    return TopK(found.indices[..., :k], found.values[..., :k] - lse[..., None], lse)


def integers(problem: p.Problem) -> p.Problem:
    """With weights and hidden states whose logits are exact, and often equal."""
    return problem._replace(hidden=problem.hidden.round(), weight=(4 * problem.weight).round() / 4)


OPTIONS: list[dict[str, Any]] = [
    {},
    dict(logit_scale=-0.5, bias=BIAS.round(), vocab_size=97),
    dict(temperature=torch.tensor([0.5, 1.0, 2.0] * 12 + [4.0])),
]


@pytest.mark.parametrize("k", [1, 3, 97])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_ids_in_order_and_their_logprobs(options: dict[str, Any], k: int) -> None:
    problem = integers(p.draw())
    got = linear_topk(problem.hidden, problem.weight, k, **options)
    want = stored(problem, k, **options)
    assert got.ids.dtype == torch.int64
    assert torch.equal(got.ids, want.ids)
    assert max(map(p.value_error, got[1:], want[1:])) < VALUE
    _, counts = want.logprobs.unique(return_counts=True)
    assert k == 1 or counts.max() > 1  # there are ties


@pytest.mark.parametrize("kind", ["mask", "index"])
def test_kept_tokens(kind: str) -> None:
    problem = p.draw(T=60)
    hidden = problem.hidden.view(3, 20, -1).clone()
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    full = linear_topk(hidden, problem.weight, 5, temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    hidden[~mask] = torch.nan
    keep = mask if kind == "mask" else mask.flatten().nonzero()[:, 0]
    out = linear_topk(hidden, problem.weight, 5, where=keep, temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    assert all(torch.equal(got[mask], want[mask]) for got, want in zip(out, full, strict=True))
    assert (out.ids[~mask] == -1).all()
    assert not out.logprobs[~mask].any()
    assert not out.lse[~mask].any()


def test_a_teacher_for_candidates() -> None:
    """No gradient flows through it, and its ids are candidates as they are, also in bfloat16 and without tokens."""
    problem = p.draw(dtype=torch.bfloat16)
    leaves = problem.leaves()
    top = linear_topk(leaves.hidden, leaves.weight, 7)
    assert not top.logprobs.requires_grad
    assert not top.lse.requires_grad
    out = linear_logprobs(*leaves, candidates=top.ids)
    assert p.value_error(out.candidate_logprobs, top.logprobs) < VALUE
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_topk(problem.hidden, problem.weight.float(), 7)
    assert all(map(torch.equal, cast, top))
    empty = linear_topk(problem.hidden[:0], problem.weight, 7)
    assert [x.shape for x in empty] == [(0, 7), (0, 7), (0,)]


def test_compiled_and_without_values() -> None:
    torch._dynamo.reset()
    hidden, weight, labels = p.draw()
    options: Any = dict(temperature=torch.linspace(0.5, 2, 37), where=torch.arange(0, 37, 3))
    compiled = torch.compile(linear_topk, fullgraph=True, backend="aot_eager")
    want = linear_topk(hidden, weight, 4, **options)
    assert all(map(torch.equal, compiled(hidden, weight, 4, **options), want))
    told = p.told(function="topk", num_candidates=4, logit_softcap=3.0)
    x = Operands(hidden, weight, BIAS, labels, options["temperature"])
    torch.library.opcheck(_operators.forward, (list(x), False, _operators.text_of(told)))
    mask = torch.zeros(37, dtype=torch.bool, device="meta")
    for keep in (None, mask):
        meta = linear_topk(hidden.to("meta"), weight.to("meta"), 4, where=keep)
        assert [x.shape for x in meta] == [(37, 4), (37, 4), (37,)]
        assert [x.dtype for x in meta] == [torch.int64, torch.float32, torch.float32]


GOOD = p.draw(T=6, H=8, V=10)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(k=0), ValueError, r"k must lie in \[1, 512\], got 0"),
        (dict(k=513), ValueError, r"k must lie in \[1, 512\], got 513"),
        (dict(k=11), ValueError, r"k must be at most the vocabulary, 10, got 11"),
        (dict(k=9, vocab_size=8), ValueError, r"k must be at most the vocabulary, 8, got 9"),
        (dict(k=2.0), TypeError, r"k must be a Python integer, got 2.0"),
        (dict(hidden=torch.ones(6, 8).double()), TypeError, r"hidden must be .* got torch.float64"),
        (dict(weight=torch.ones(10, 7)), ValueError, r"hidden \(6, 8\) must end in the H of weight"),
        (dict(where=torch.ones(5, dtype=bool)), ValueError, r"where \(5,\) must have the tokens' shape \(6,\)"),
        (dict(implementation="mosaic_gpu"), UnsupportedError, r"mosaic_gpu"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_topk(**{"hidden": GOOD.hidden, "weight": GOOD.weight, "k": 2, **given})


def test_vmap_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"under torch\.func\.vmap, .* give it the whole batch"):
        torch.func.vmap(lambda x: linear_topk(x, GOOD.weight, 2).ids)(GOOD.hidden.view(2, 3, 8))
