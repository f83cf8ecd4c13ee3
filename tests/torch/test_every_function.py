"""What every function does as PyTorch's own layers do, or refuses: autograd, transforms, casts, graphs, kept tokens.

The programs are float64's (`executor`); `test_parity` judges those of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge import (
    linear_cross_entropy,
    linear_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
)
from tests.torch import problem as p

pytestmark = pytest.mark.usefixtures("in_float64")
T, V = 60, 104
PROBLEM = p.draw(T)
BIAS = torch.linspace(-1, 1, V)
IDS = p.candidates_like(PROBLEM.labels)
TEACHER = p.draw(T, H=16, seed=1)
TEMPERATURE = torch.linspace(0.5, 2, T)
type Function = Callable[..., list[torch.Tensor]]


def at(hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is per token, in the leading shape of ``hidden`` and where it is."""
    return x[: hidden.shape[:-1].numel()].view(*hidden.shape[:-1], *x.shape[1:]).to(hidden.device)


def logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    labels, ids = at(hidden, PROBLEM.labels), at(hidden, IDS)
    told: Any = dict(bias=bias, candidates=ids, stats=True, mean_logit=True)
    return [x for x in linear_logprobs(hidden, weight, labels, **told, **options) if x is not None]


def cached(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    labels, floor = at(hidden, PROBLEM.labels), at(hidden, TEMPERATURE) - 1.5
    told: Any = dict(bias=bias, logit_floor=floor, cache_bytes=1 << 20, entropy="metric", out_of_vocab="megatron")
    return [x for x in linear_logprobs(hidden, weight, labels, **told, **options) if x is not None]


def entropy(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(linear_entropy(hidden, weight, bias=bias, **options))


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    told: Any = dict(bias=bias, reduction="none", ignore_index=None, label_smoothing=0.1, z_loss=1e-2)
    return [linear_cross_entropy(hidden, weight, at(hidden, PROBLEM.labels), **told, **options)]


def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [linear_logits(hidden, weight, at(hidden, IDS), bias=bias, **options)]


def kl(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    teacher = at(hidden, TEACHER.hidden), TEACHER.weight.to(hidden.device)
    return [linear_kl(hidden, weight, *teacher, direction="jsd", beta=0.3, bias=bias, **options)]


def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    labels, own = at(hidden, PROBLEM.labels), at(hidden, TEMPERATURE)
    total, out = linear_loss(lambda x, _, y, own: own * x + y, hidden, weight, labels, own, bias=bias, **options)
    return [total, *out[:3]]


def mean(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    told: Any = dict(bias=bias, ignore_index=None, label_smoothing=0.1, z_loss=1e-2)
    return [linear_cross_entropy(hidden, weight, at(hidden, PROBLEM.labels), **told, **options)]


def topk(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(linear_topk(hidden, weight, 5, bias=bias, **options))


GRAPHED = (logprobs, cached, entropy, cross_entropy, logits, kl)  # in graphs, and under torch.func
DIFFERENTIABLE = (*GRAPHED, loss, mean)
each = pytest.mark.parametrize("function", [*DIFFERENTIABLE, topk])
of_differentiable = pytest.mark.parametrize("function", DIFFERENTIABLE)
of_graphed = pytest.mark.parametrize("function", GRAPHED)


def leaves() -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in (PROBLEM.hidden, PROBLEM.weight, BIAS)]


def objective(found: list[torch.Tensor]) -> torch.Tensor:
    """Each element of each result has a cotangent of its own."""
    floats = [x for x in found if x.is_floating_point()]
    return torch.stack([(torch.linspace(-1, 2, x.numel()).view(x.shape).to(x) * x).sum() for x in floats]).sum()


def measured(function: Function, operands: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The results, and the gradients of all operands that require them."""
    found, wanted = function(*operands, **options), [x for x in operands if x.requires_grad]
    has_gradients = bool(wanted) and any(x.requires_grad for x in found)
    return [*found, *(torch.autograd.grad(objective(found), wanted, allow_unused=True) if has_gradients else [])]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, got, want)) and len(got) == len(want)


@each
def test_without_gradients(function: Function) -> None:
    want = function(*leaves())
    with torch.no_grad():
        found = function(*leaves())
    assert not any(x.requires_grad for x in found)
    with torch.inference_mode():
        again = function(PROBLEM.hidden, PROBLEM.weight, BIAS)
    assert same(found, want)
    assert same(again, want)


@of_differentiable
@pytest.mark.parametrize("alone", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_one_operand_is_trained(alone: int, function: Function) -> None:
    operands = [PROBLEM.hidden.clone(), PROBLEM.weight.clone(), BIAS.clone()]
    operands[alone].requires_grad_()
    *_, found = measured(function, operands)
    assert torch.equal(found, measured(function, leaves())[alone - 3])


@of_differentiable
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, function: Function) -> None:
    operands, want = leaves(), measured(function, leaves())[-3:]
    checkpoint(lambda *given: objective(function(*given)), *operands, use_reentrant=reentrant).backward()
    assert same([x.grad for x in operands], want)


@of_differentiable
def test_a_graph_is_kept_as_long_as_is_asked_for(function: Function) -> None:
    operands = leaves()
    total = objective(function(*operands))
    first = torch.autograd.grad(total, operands, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(total, operands), first))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, operands)


@of_graphed
@pytest.mark.parametrize("changed", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_a_change_in_place_before_the_backward_raises(changed: int, function: Function) -> None:
    operands = [1 * x for x in leaves()]
    total = objective(function(*operands))
    with torch.no_grad():
        operands[changed].mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@each
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape: tuple[int, ...], function: Function) -> None:
    hidden, *others = leaves()
    hidden = torch.zeros(*shape, 32, requires_grad=True)
    found = function(hidden, *others)
    assert all(x.shape[: len(shape)] == shape for x in found if x.ndim)
    if function is not topk:
        objective(found).backward()
        assert hidden.grad.shape == hidden.shape
        assert not any(x.grad.any() for x in others)


@each
@pytest.mark.parametrize("kind", ["mask", "index"])
def test_kept_tokens(kind: str, function: Function) -> None:
    """The others are 0 (an id is -1), whatever they hold, and have no gradient; these have the bits of all tokens."""
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    hidden, *others = leaves()
    told: Any = dict(temperature=torch.linspace(0.5, 1.5, 3)[:, None])
    full = function(hidden.view(3, 20, -1), *others, **told)
    keep = mask if kind == "mask" else mask.flatten().nonzero()[:, 0].int()
    damaged = hidden.detach().view(3, 20, -1).clone().masked_fill_(~mask[..., None], torch.nan).requires_grad_()
    found = function(damaged, *others, where=keep, **told)
    for got, want in zip(found, full, strict=True):
        if got.ndim:  # a sum of losses has no tokens
            assert torch.equal(got[mask], want[mask])
            assert (got[~mask] == (-1 if got.dtype == torch.int64 else 0)).all()
    if function in (topk, loss, mean):
        return
    kept = [x * mask.view(3, 20, *[1] * (x.ndim - 2)) if x.requires_grad else x for x in full]
    wanted = torch.autograd.grad(objective(kept), (hidden, *others))
    grads = torch.autograd.grad(objective(found), (damaged, *others))
    assert torch.equal(grads[0].view(T, -1), wanted[0] * mask.view(T, 1))
    assert max(map(p.relative_norm, grads[1:], wanted[1:])) < 1e-6


@each
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_weight(hidden_dtype: torch.dtype, function: Function) -> None:
    """As ``torch.nn.functional.linear`` does; the bias stays, and gradients come in each operand's own dtype."""
    if function is kl:
        pytest.skip("its teacher's weight is cast as well: below")
    operands = leaves()
    operands[0] = operands[0].detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = measured(function, operands)
    low = [operands[0], operands[1].detach().bfloat16().requires_grad_(), operands[2]]
    want = measured(function, low)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(got, want, strict=True))
    if function is not topk:
        assert [x.dtype for x in got[-3:]] == [hidden_dtype, torch.float32, torch.float32]
    with torch.autocast("cpu", enabled=False):
        assert not torch.equal(function(*operands)[-1], got[len(want) - 4 if function is not topk else -1])


def test_autocast_casts_both_weights_of_a_divergence() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_kl(*PROBLEM[:2], *TEACHER[:2])
    low = linear_kl(PROBLEM.hidden, PROBLEM.weight.bfloat16(), TEACHER.hidden, TEACHER.weight.bfloat16())
    assert torch.equal(got, low)


@of_differentiable
def test_main_grad_is_added_to(function: Function) -> None:
    """The weight's alone: other gradients come as ever."""
    want = measured(function, leaves())[-3:]
    hidden, weight, bias = leaves()
    weight.main_grad = torch.ones_like(weight)
    objective(function(hidden, weight, bias, wgrad="main_grad")).backward()
    assert weight.grad is None
    assert p.relative_norm(weight.main_grad, 1 + want[1]) < 1e-6
    assert same([hidden.grad, bias.grad], [want[0], want[2]])


@of_graphed
def test_first_derivatives_of_torch_func(function: Function) -> None:
    want = measured(function, leaves())[-3:]
    given = [x.detach() for x in leaves()]

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return objective(function(*operands))

    assert same(list(torch.func.grad(call, (0, 1, 2))(*given)), want)
    _, pull_back = torch.func.vjp(call, *given)
    assert same(list(pull_back(torch.tensor(1.0))), want)


WHOLE_BATCH = r"under torch\.func\.vmap, .* give it the whole batch, and loop where each part has a weight or a grad"
REVERSE_MODE = r"no forward-mode derivatives .* torch\.func\.vjp or torch\.autograd\.grad"
TRANSFORMS: dict[str, tuple[Any, str]] = {
    "vmap": (lambda f, x: torch.func.vmap(f)(x[:, None]), WHOLE_BATCH),
    "vmap of grad": (lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x[:, None]), WHOLE_BATCH),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), WHOLE_BATCH),
    "jacobian": (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), WHOLE_BATCH),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), REVERSE_MODE),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), REVERSE_MODE),
    "linearize": (lambda f, x: torch.func.linearize(f, x), REVERSE_MODE),
    "second": (
        lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
        "first derivatives only",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of its jvp
@of_graphed
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_transforms_are_refused_with_what_to_do(transform: str, function: Function) -> None:
    apply, message = TRANSFORMS[transform]
    with pytest.raises(NotImplementedError, match=message):
        apply(lambda x: function(x, PROBLEM.weight, BIAS)[0], PROBLEM.hidden[:3])


def test_vmap_of_the_most_likely_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=WHOLE_BATCH):
        torch.func.vmap(lambda x: topk(x, PROBLEM.weight, BIAS)[0])(PROBLEM.hidden.view(2, 30, -1))


@of_differentiable
def test_a_second_derivative_raises(function: Function) -> None:
    operands = leaves()

    def twice() -> None:
        (grad,) = torch.autograd.grad(objective(function(*operands)), operands[0], create_graph=True)
        grad.sum().backward()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        twice()


@pytest.mark.fast("logprobs", "cached", "kl")
@pytest.mark.parametrize("function", [*GRAPHED, topk])
def test_compiled_in_one_graph(function: Function) -> None:
    """`test_compile` has the options."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    told: Any = dict(where=torch.arange(0, T, 3), temperature=TEMPERATURE) if function in (kl, topk) else {}
    assert same(measured(compiled, leaves(), **told), measured(function, leaves(), **told))


@pytest.mark.parametrize("keep", [None, torch.arange(0, T, 3), torch.arange(T) % 3 == 0], ids=["", "index", "mask"])
@pytest.mark.parametrize("function", [*GRAPHED, topk])
def test_tensors_that_hold_nothing(function: Function, keep: torch.Tensor | None) -> None:
    """Shapes and dtypes of the real call, forward and backward, from meta tensors."""

    given = [x.detach() for x in leaves()]

    def described(convert: Any) -> list[Any]:
        told: Any = {} if keep is None else dict(where=convert(keep))
        operands = [convert(x).requires_grad_() for x in given]
        return [(tuple(x.shape), x.dtype) for x in measured(function, operands, **told)]

    assert described(lambda x: x.to("meta")) == described(lambda x: x.clone())


def test_what_a_call_was_given_may_change_or_go() -> None:
    """A temperature belongs to its call; one made under inference_mode serves."""
    temperature, operands = TEMPERATURE.clone(), leaves()
    want = measured(kl, leaves(), temperature=TEMPERATURE)[-3:]
    total = objective(kl(*operands, temperature=temperature))
    temperature.fill_(2.0)
    assert same(list(torch.autograd.grad(total, operands)), want)
    with torch.inference_mode():
        made_there = TEMPERATURE.clone()
    assert same(measured(kl, leaves(), temperature=made_there)[-3:], want)


def test_a_teacher_that_requires_gradients_gets_none() -> None:
    watched = [x.clone().requires_grad_() for x in (*PROBLEM[:2], *TEACHER[:2])]
    linear_kl(*watched).sum().backward()
    assert watched[0].grad is not None
    assert watched[2].grad is watched[3].grad is None
    assert not linear_kl(*PROBLEM[:2], *watched[2:]).requires_grad


def test_a_mask_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, count = [], torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda x: counted.append(x) or count(x))
    for function in (logprobs, kl):
        counted.clear()
        function(*leaves(), where=torch.arange(T) % 3 == 0)
        assert len(counted) == 1
