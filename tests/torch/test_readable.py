"""Tensors that kernels cannot read where they lie: freed, negated lazily, sparse, nested. Every entry point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lce_torch_bridge as bridge
from lce_torch_bridge import verl
from tests.torch import problem as p
from tests.torch.launched import launched_directly

pytestmark = pytest.mark.usefixtures("in_float64")

GOOD = p.draw(T=6, H=8, V=10)
IDS, KEEP, BIAS = p.candidates_like(GOOD.labels, K=2, V=10), torch.tensor([True, False] * 3), torch.linspace(0, 1, 10)
WAYS: dict[str, Callable[[], Any]] = {"jax": contextlib.nullcontext, "direct": launched_directly}
SHARED: dict[str, torch.Tensor] = dict(
    hidden=GOOD.hidden, weight=GOOD.weight, bias=BIAS, temperature=torch.linspace(0.5, 2, 6), where=KEEP
)
LABELS = {"labels": GOOD.labels}


def sum_of(*results: Any) -> torch.Tensor:
    floats = [x for x in results if x is not None and x.is_floating_point()]
    return torch.stack([(x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in floats]).sum()


def own_loss(logprobs: Any, entropy: Any, lse: Any, own: Any) -> Any:
    return own * logprobs - entropy + lse


CALLS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "linear_logprobs": (lambda **x: sum_of(*bridge.linear_logprobs(**x)), SHARED | LABELS | {"candidates": IDS}),
    "linear_loss": (
        lambda own, hidden, weight, labels, **x: bridge.linear_loss(own_loss, hidden, weight, labels, own, **x)[0],
        SHARED | LABELS | {"own": torch.linspace(1, 2, 6)},
    ),
    "linear_cross_entropy": (lambda **x: bridge.linear_cross_entropy(**x), SHARED | LABELS),
    "linear_entropy": (lambda **x: sum_of(*bridge.linear_entropy(**x)), SHARED),
    "verl.linear_cross_entropy": (
        lambda **x: sum_of(*verl.linear_cross_entropy(**x)),
        {name: SHARED[name] for name in ("hidden", "weight")} | LABELS,
    ),
    "linear_logits": (lambda **x: sum_of(bridge.linear_logits(**x)), SHARED | {"ids": IDS}),
    "linear_topk": (lambda **x: sum_of(*bridge.linear_topk(k=2, **x)), SHARED),
    "masked_logprobs": (
        lambda **x: sum_of(bridge.masked_logprobs(**x)),
        {"logits": torch.ones(6, 2), "ids": IDS.abs() + torch.tensor([0, 200]), "labels": GOOD.labels},
    ),
}
EACH = [(call, name) for call, (_, given) in CALLS.items() for name in given]
NUMBERS = [(call, name) for call, name in EACH if name != "where"]


def freed(x: torch.Tensor) -> torch.Tensor:
    """As a view in the middle of a flat parameter, which is how FSDP has it."""
    part = torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape)
    part.untyped_storage().resize_(0)
    return part


def negated(x: torch.Tensor) -> torch.Tensor:
    """``x`` as it is, with the negative bit, as the imaginary part of a conjugate has it."""
    return torch._neg_view(x.neg())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("call", "name"), EACH)
def test_freed(call: str, name: str) -> None:
    function, given = CALLS[call]
    with pytest.raises(RuntimeError, match=rf"{name.replace('own', 'per_token.0.')} \(.*\) has no memory"):
        function(**given | {name: freed(given[name])})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("call", "name"), NUMBERS)
def test_negated(call: str, name: str, way: str) -> None:
    function, given = CALLS[call]

    def with_gradients(**given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [given.get(each, torch.ones(1)).requires_grad_() for each in ("hidden", "weight", "logits")]
        total = function(**given)
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
        return [total, *(grad for grad in grads if grad is not None)]

    copies = {each: x.clone() for each, x in given.items()}
    with WAYS[way]():
        want = with_gradients(**copies)
        found = with_gradients(**{each: x.detach() for each, x in copies.items()} | {name: negated(given[name])})
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("function", [bridge.linear_logprobs, bridge.linear_logits, bridge.linear_loss])
def test_freed_main_grad(function: Any) -> None:
    weight = torch.nn.Parameter(GOOD.weight.clone())
    weight.main_grad = freed(GOOD.weight)  # type: ignore[attr-defined]
    given = {bridge.linear_loss: (own_loss,)}.get(function, ())
    last = {bridge.linear_logits: IDS}.get(function, GOOD.labels)
    with pytest.raises(RuntimeError, match=r"weight.main_grad \(10, 8\) has no memory"):
        function(*given, GOOD.hidden, weight, last, wgrad="main_grad")


BACKWARD: dict[str, Callable[..., torch.Tensor]] = {
    "linear_logprobs": lambda *x, **options: bridge.linear_logprobs(*x, GOOD.labels, **options).logprobs,
    "linear_logits": lambda *x, **options: bridge.linear_logits(*x, IDS.abs() % 10, **options),
    "compiled": lambda *x, **options: torch.compile(BACKWARD["linear_logprobs"], backend="eager")(*x, **options),
}


@pytest.mark.parametrize("call", BACKWARD)
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_freed_between_forward_and_backward(call: str, name: str) -> None:
    given = {each: SHARED[each].clone().requires_grad_() for each in ("hidden", "weight", "bias")}
    leaves = list(given.values())
    out = BACKWARD[call](*leaves[:2], bias=given["bias"])
    memory = given[name].detach().clone()
    given[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"{name} \(.*\) has no memory, .* until the backward is over"):
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    given[name].untyped_storage().resize_(memory.nbytes)  # gathered again
    given[name].data.copy_(memory)
    want = torch.autograd.grad(BACKWARD[call](*leaves[:2], bias=given["bias"]).sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), want))


def test_freed_while_compiled() -> None:
    """Its memory is looked at in each call, not where the call is traced."""
    call = torch.compile(lambda *x: bridge.linear_logprobs(*x).lse, fullgraph=True, backend="eager")
    leaves = GOOD.leaves()
    call(*leaves)
    with pytest.raises(RuntimeError, match=r"weight \(10, 8\) has no memory"):
        call(leaves.hidden, freed(leaves.weight.detach()), leaves.labels)


def test_what_zero_leaves_in_place_of_a_weight() -> None:
    weight = GOOD.weight.clone().requires_grad_()
    out = bridge.linear_logprobs(GOOD.hidden, weight, GOOD.labels)
    weight.data = torch.empty(0)
    for call in (lambda: bridge.linear_logprobs(GOOD.hidden, weight, GOOD.labels), out.logprobs.sum().backward):
        with pytest.raises(RuntimeError, match=r"weight \(0,\) has no memory, .* deepspeed.zero.GatheredParameters"):
            call()


def test_what_zero_says_of_a_partitioned_weight() -> None:
    """deepspeed.zero.Init and the engine put these attributes on each parameter."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape, weight.ds_status = torch.Size((10, 8)), "ZeroParamStatus.NOT_AVAILABLE"  # type: ignore[attr-defined]
    said = (
        r"weight \(0,\) has no memory, because it was partitioned by ZeRO-3 \(ds_shape \(10, 8\), "
        r"ds_status ZeroParamStatus.NOT_AVAILABLE\)\. .* `with deepspeed.zero.GatheredParameters\(\[weight\]\):` around"
    )
    for function, given in CALLS.values():
        if "weight" in given:
            with pytest.raises(RuntimeError, match=said):
                function(**given | {"weight": weight})
    weight.data = GOOD.weight  # gathered, as the message says
    assert torch.equal(bridge.linear_logprobs(GOOD.hidden, weight, GOOD.labels).lse, bridge.linear_logprobs(*GOOD).lse)


@pytest.mark.parametrize("shape", [(0, 8), (24,)])  # what FSDP2 and FSDP1 may leave a rank
def test_a_ranks_part_of_a_weight(shape: tuple[int, ...]) -> None:
    for function in (bridge.linear_logprobs, bridge.linear_cross_entropy):
        with pytest.raises(
            ValueError, match=r"got shape \(.*,.*\)\. .* the FSDP module that holds it, .* not its to_local"
        ):
            function(GOOD.hidden, torch.ones(shape), GOOD.labels)


@pytest.mark.parametrize("call", list(BACKWARD)[:2])
def test_negated_cotangents(call: str) -> None:
    leaves = GOOD.leaves()
    out = BACKWARD[call](*leaves[:2])
    seed = torch.linspace(0, 1, out.numel()).view(out.shape)
    found, want = (torch.autograd.grad(out, leaves[:2], x, retain_graph=True) for x in (negated(seed), seed))
    assert all(map(torch.equal, found, want))


def test_a_loss_with_negated_derivatives() -> None:
    def negating(logprobs: Any, *_: Any) -> Any:
        return torch.view_as_complex(torch.stack([logprobs, -2 * logprobs], -1)).conj().imag

    leaves, plain = GOOD.leaves(), GOOD.leaves()
    found = torch.autograd.grad(bridge.linear_loss(negating, *leaves)[0], leaves[:2])
    want = torch.autograd.grad(2 * bridge.linear_logprobs(*plain).logprobs.sum(), plain[:2])
    assert max(map(p.relative_norm, found, want)) < 1e-6


@pytest.mark.parametrize(("call", "name"), EACH)
def test_sparse(call: str, name: str) -> None:
    """``.to_dense()`` serves, as the message says."""
    function, given = CALLS[call]
    sparse = given[name].to_sparse()
    with pytest.raises(TypeError, match=r" must be dense, got torch.sparse_coo: pass .*\.to_dense\(\)"):
        function(**given | {name: sparse})
    assert torch.equal(function(**given | {name: sparse.to_dense()}), function(**given))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("call", list(CALLS)[:-1])
def test_nested(call: str, layout: torch.layout) -> None:
    function, given = CALLS[call]
    hidden = torch.nested.nested_tensor([given["hidden"][:2], given["hidden"][2:]], layout=layout)
    with pytest.raises(TypeError, match=r"hidden is nested: pass torch.cat\(hidden.unbind\(\)\), and the same"):
        function(**given | {"hidden": hidden})
    assert torch.equal(function(**given | {"hidden": torch.cat(hidden.unbind())}), function(**given))
