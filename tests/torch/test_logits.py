"""Logits at chosen ids and the softmax over a set of them, against stored logits in float64."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lce_jax
from lce_jax import UnsupportedError
from lce_torch_bridge import linear_logits, masked_logprobs
from lce_torch_bridge._types import Operands
from lce_torch_bridge.operators import _operators
from tests.torch import problem as p

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity
IDS = p.candidates_like(p.draw().labels)
BIAS = torch.randn(104, generator=torch.Generator().manual_seed(5))

OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=torch.linspace(0.5, 2, 37), logit_scale=-1.3, logit_softcap=3.0, bias=BIAS, vocab_size=97),
    dict(temperature=0.7, logit_scale=0.0),
]


def evaluate(problem: p.Problem, call: Any = linear_logits, ids: torch.Tensor = IDS, **options: Any) -> Any:
    """The logits, and the gradients in hidden, weight and, if there is one, the bias."""
    leaves = list(problem.leaves()[:2])
    if "bias" in options:
        leaves.append(options["bias"].clone().requires_grad_())
        options["bias"] = leaves[2]
    z = call(*leaves[:2], ids, **options)
    return z, torch.autograd.grad((p.seeds_like(ids)[0].to(z.dtype) * z).sum(), leaves)


def exact(problem: p.Problem, **options: Any) -> Any:
    hidden = problem.hidden.to(problem.weight.dtype).double()
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return evaluate(p.Problem(hidden, problem.weight.double(), problem.labels), p.stored_logits, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_values_and_gradients(options: dict[str, Any]) -> None:
    z, grads = evaluate(p.draw(), **options)
    want, wanted = exact(p.draw(), **options)
    assert z.dtype == torch.float32
    assert z.shape == IDS.shape
    assert p.value_error(z, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT
    if "vocab_size" in options:
        assert not grads[2][97:].any()


@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float32])
def test_each_gradient_is_rounded_once(hidden: torch.dtype) -> None:
    problem = p.draw(dtype=torch.bfloat16)
    problem = problem._replace(hidden=problem.hidden.to(hidden))
    z, grads = evaluate(problem)
    want, wanted = exact(problem)
    assert p.value_error(z, want) < VALUE
    for got, true, rounding in zip(grads, wanted, (2e-3 if hidden == torch.bfloat16 else GRADIENT, 2e-3), strict=True):
        assert p.relative_norm(got, true) < rounding


@pytest.mark.parametrize("kind", ["mask", "index"])
def test_kept_tokens(kind: str) -> None:
    """The bits of the full call, 0 elsewhere, in any leading shape; the padding of the programs may hold anything."""
    problem, ids = p.draw(T=60), p.candidates_like(p.draw(T=60).labels, K=1).view(3, 20, 1)
    problem = problem._replace(hidden=problem.hidden.view(3, 20, -1), labels=problem.labels.view(3, 20))
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    keep = mask if kind == "mask" else mask.flatten().nonzero()[:, 0].int()
    full, _ = evaluate(problem, ids=ids, temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    _, wanted = evaluate(problem, ids=ids.where(mask[..., None], -1), temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    problem.hidden[~mask] = torch.nan
    torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
    try:
        z, grads = evaluate(problem, ids=ids, where=keep, temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(z, full.where(mask[..., None], 0.0))
    assert all(map(torch.equal, grads, wanted))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    hidden, weight = torch.zeros(*shape, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    z = linear_logits(hidden, weight, torch.zeros((*shape, 3), dtype=torch.int64))
    assert z.shape == (*shape, 3)
    z.sum().backward()
    assert not weight.grad.any()


def test_autograd_autocast_main_grad() -> None:
    problem, leaves = p.draw(), p.draw().leaves()
    _, want = evaluate(problem)

    def objective(hidden: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return (p.seeds_like(IDS)[0] * linear_logits(hidden, weight, IDS, **options)).sum()

    checkpoint(objective, *leaves[:2], use_reentrant=False).backward()
    assert all(map(torch.equal, (leaves.hidden.grad, leaves.weight.grad), want))
    (alone,) = torch.autograd.grad(objective(problem.hidden, leaves.weight), leaves.weight)
    assert torch.equal(alone, want[1])
    weight = torch.nn.Parameter(problem.weight.clone())
    weight.main_grad = torch.ones_like(weight)
    objective(problem.hidden, weight, wgrad="main_grad").backward()
    assert torch.equal(weight.main_grad, 1 + want[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_logits(problem.hidden, weight, IDS)
    assert torch.equal(cast, linear_logits(problem.hidden, weight.bfloat16(), IDS))
    assert all(map(torch.equal, torch.func.grad(objective, argnums=(0, 1))(*problem[:2]), want))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of its jvp
def test_derivatives_that_are_refused() -> None:
    leaves = p.draw().leaves()
    (grad,) = torch.autograd.grad(linear_logits(*leaves[:2], IDS).sum(), leaves.hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.sum().backward()
    hidden, weight = leaves.hidden.detach(), leaves.weight.detach()
    with pytest.raises(NotImplementedError, match="give it the whole batch"):
        torch.func.vmap(lambda x, i: linear_logits(x, weight, i))(hidden, IDS)
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        torch.func.jvp(lambda x: linear_logits(x, weight, IDS), (hidden,), (hidden,))


@pytest.mark.parametrize("options", OPTIONS[:2], ids=lambda options: ", ".join(options))
def test_compiled(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_logits, fullgraph=True, backend="aot_eager")
    want, wanted = evaluate(p.draw(), **options)
    got, grads = evaluate(p.draw(), compiled, **options)
    assert all(map(torch.equal, (got, *grads), (want, *wanted)))
    hidden, weight, labels = p.draw()
    assert torch.equal(compiled(hidden, weight, IDS, **options), want)
    told = p.told(function="logits", logit_scale=1.3, logit_softcap=4.0, num_candidates=IDS.shape[-1])
    x = list(Operands(hidden, weight, options.get("bias"), labels, options.get("temperature"), IDS))
    torch.library.opcheck(_operators.forward, (x, True, _operators.text_of(told)))
    seeds, wanted = [torch.randn(IDS.shape)], [True, True, "bias" in options]
    torch.library.opcheck(_operators.backward, (x, [], seeds, wanted, _operators.text_of(told)))


def sets(labels: torch.Tensor) -> torch.Tensor:
    """Sets of different sizes without repeats; the label is in most of them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(104, generator=generator)[:7] for _ in range(len(labels))])
    ids[:, 0] = labels.where((ids != labels[:, None]).all(-1), ids[:, 0])
    ids[::5, 0], ids[3::4, 3:] = -1, -1
    ids[11] = -1
    return ids


def test_a_softmax_over_a_set() -> None:
    """By its definition on stored logits: everything outside the set is masked."""
    problem = p.draw()
    ids = sets(problem.labels)
    in_set = torch.zeros(37, 105, dtype=torch.bool).scatter_(1, torch.where(ids < 0, 104, ids), True)[:, :104]
    found = in_set.gather(1, problem.labels[:, None])[:, 0]
    assert 5 < found.sum() < 37
    true = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    z = (true.hidden @ true.weight.T / 0.8).masked_fill(~in_set, -torch.inf)[found]
    want = z.log_softmax(-1).gather(1, problem.labels[found][:, None])[:, 0]
    wanted = torch.autograd.grad((want * torch.arange(len(want))).sum(), true[:2])
    leaves = problem.leaves()
    got = masked_logprobs(linear_logits(*leaves[:2], ids, temperature=0.8), ids, problem.labels)
    assert got[11] == 0  # it has no ids
    assert (got[~found].sort().values == torch.tensor([-torch.inf] * (int((~found).sum()) - 1) + [0.0])).all()
    assert p.value_error(got[found], want) < VALUE
    weights = torch.zeros(37).masked_scatter(found, torch.arange(len(want)).float())
    grads = torch.autograd.grad(got, leaves[:2], weights)  # nothing of a label that is not in its set
    assert max(map(p.relative_norm, grads, wanted)) < GRADIENT
    theirs = lce_jax.masked_logprobs(jnp.asarray(z_of(problem, ids)), jnp.asarray(ids.numpy()), problem.labels.numpy())
    assert torch.allclose(got, torch.tensor(theirs.tolist()), rtol=0, atol=VALUE)


def test_a_prompt_has_no_softmax_over_a_set() -> None:
    """The 0 of `linear_logprobs` for the same labels, so that a masked sum and its gradient are those of the rest."""
    ids, labels = torch.tensor([[-1, -1], [-1, -1], [3, 5], [3, 5]]), torch.tensor([-100, 3, -100, 5])
    logits = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0], [1.0, 2.0], [1.0, 1.0]], requires_grad=True)
    got = masked_logprobs(logits, ids, labels)
    (got * (labels >= 0)).sum().backward()
    assert got.tolist() == pytest.approx([0, 0, 0, -math.log(2)])
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0], [0, 0], [0, 0], [-0.5, 0.5]]
    theirs = lce_jax.masked_logprobs(jnp.asarray(logits.detach().numpy()), ids.numpy(), labels.numpy())
    assert theirs.tolist() == pytest.approx([0, 0, 0, -math.log(2)])


def z_of(problem: p.Problem, ids: torch.Tensor) -> Any:
    return linear_logits(problem.hidden, problem.weight, ids, temperature=0.8).numpy()


GOOD = p.draw(T=6, H=8, V=10)
ONES = torch.ones(6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(hidden=torch.ones(6, 8).double()), TypeError, r"hidden must be .* got torch.float64"),
        (dict(ids=[[1]] * 6), TypeError, r"ids must be a torch.Tensor, got list"),
        (dict(ids=torch.ones(6, 2)), TypeError, r"ids must be integers \(vocabulary ids\), got torch.float32"),
        (dict(ids=torch.ones(6, 513, dtype=int)), ValueError, r"ids \(6, 513\) must end in K, from 1 to 512"),
        (dict(ids=torch.ones(5, 2, dtype=int)), ValueError, r"ids \(5, 2\) .* shape of hidden before H \(6,\)"),
        (dict(ids=ONES.to("meta")), ValueError, r"ids is on meta, hidden on cpu"),
        (dict(weight=torch.ones(10, 7)), ValueError, r"hidden \(6, 8\) must end in the H of weight"),
        (dict(temperature=torch.ones(5)), ValueError, r"temperature \(5,\) must broadcast to the tokens' shape \(6,\)"),
        (dict(vocab_size=11), ValueError, r"vocab_size must lie in \[1, 10\].* got 11"),
        (dict(where=torch.ones(5, dtype=bool)), ValueError, r"where \(5,\) must have the tokens' shape \(6,\)"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_logits(**{"hidden": GOOD.hidden, "weight": GOOD.weight, "ids": ONES, **given})


def test_refusals_of_the_set() -> None:
    with pytest.raises(ValueError, match=r"logits \(6, 3\) of torch.float32 must be floating point in the .*\(6, 2\)"):
        masked_logprobs(torch.ones(6, 3), ONES, GOOD.labels)
    with pytest.raises(ValueError, match=r"ids \(6, 2\) must be .* the shape of labels \(5,\) before K"):
        masked_logprobs(torch.ones(6, 2), ONES, GOOD.labels[:5])
    with pytest.raises(TypeError, match=r"labels must be integers"):
        masked_logprobs(torch.ones(6, 2), ONES, torch.ones(6))


def test_an_implementation_that_cannot_serve_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="linear_logits runs no kernel"):
        linear_logits(*p.draw()[:2], IDS, implementation="mosaic_gpu")
