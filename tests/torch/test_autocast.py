"""Products have the dtype and the precision that torch is set to: autocast, and float32 products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_torch_bridge import linear_logprobs
from tests.torch import problem as p
from tests.torch.processes import succeed

pytestmark = pytest.mark.usefixtures("in_float64")


class Weights:
    """The addresses of the copies of the weight that autograd keeps."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shapes, self.places = (weight.shape, weight.shape[::-1]), list[int]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape in self.shapes:
            self.places.append(x.untyped_storage().data_ptr())
        return x

    def noted(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self, lambda x: x)


@pytest.mark.parametrize("wgrad", ["return", "main_grad"])
def test_calls_of_an_autocast_context_share_one_copy_of_the_weight(wgrad: str) -> None:
    """It is the copy of torch's own products; the calls' gradients are summed in float32."""
    problem = p.draw()
    hidden, weight, labels = problem.leaves()
    weight.main_grad = torch.zeros_like(weight)
    weights, alone = Weights(weight), torch.zeros_like(weight)
    with torch.autocast("cpu", torch.bfloat16), weights.noted():
        logits = torch.nn.functional.linear(hidden, weight)
        calls = [linear_logprobs(hidden, weight, labels, temperature=t, wgrad=wgrad) for t in (0.7, 0.8, 0.9, 1.0)]
    assert len(weights.places) == 5
    assert len(set(weights.places)) == 1
    torch.stack([out.lse.sum() for out in calls]).sum().backward()
    for t in (0.7, 0.8, 0.9, 1.0):
        with torch.autocast("cpu", torch.bfloat16):
            leaf = problem.weight.clone().requires_grad_()
            linear_logprobs(hidden, leaf, labels, temperature=t).lse.sum().backward()
        assert leaf.grad.bfloat16().float().equal(leaf.grad)
        alone += leaf.grad
    summed = weight.grad if wgrad == "return" else weight.main_grad
    assert p.relative_norm(summed, alone) < 1e-6
    logits.sum().backward()
    assert weight.grad is not None  # torch's product, which shares the copy, has its gradient


def test_the_copy_of_the_weight_lasts_as_long_as_torch_keeps_it() -> None:
    hidden, weight, labels = p.draw().leaves()

    def places(*calls: Any, **options: Any) -> int:
        weights = Weights(weight)
        with torch.autocast("cpu", torch.bfloat16, **options), weights.noted():
            results = [linear_logprobs(hidden, weight, labels) for call in calls if call is None or call() is None]
        assert len(weights.places) == len(results)
        return len(set(weights.places))

    assert places(None, None) == 1
    assert places(None, torch.clear_autocast_cache) == 2
    assert places(None, None, cache_enabled=False) == 2
    weight.requires_grad_(False)  # torch keeps no copy of a frozen one
    assert places(None, None) == 2


def test_each_autocast_context_sees_the_weight_as_it_is() -> None:
    """Also if a change left no trace (``.data``), and if the first call recorded no gradients."""
    hidden, weight, labels = p.draw().leaves()
    for step in range(3):
        weight.data.mul_(1.0 + step)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                without = linear_logprobs(hidden, weight, labels)
            out = linear_logprobs(hidden, weight, labels)
        low = weight.detach().bfloat16().requires_grad_()
        want = linear_logprobs(hidden, low, labels)
        assert torch.equal(out.logprobs, want.logprobs)
        assert torch.equal(without.logprobs, want.logprobs)
        dweight = torch.autograd.grad(out.logprobs.sum(), weight)[0]
        assert torch.equal(dweight, torch.autograd.grad(want.logprobs.sum(), low)[0].float())


def test_float32_products_are_as_exact_as_torch_is_set() -> None:
    """Also by the newer settings, after which the older one's getter raises."""
    names = ("ieee", "tf32", "ieee")
    newer = [
        [f"{where}.fp32_precision = {name!r}" for name in names]
        for where in ("torch.backends", "torch.backends.mkldnn.matmul")
    ]
    older = [f"torch.set_float32_matmul_precision({name!r})" for name in ("highest", "high", "medium")]
    exact = "highest None highest"
    assert asked_precision(*newer, ["pass", *older]) == [exact, exact, "highest highest None None"]


def asked_precision(*ways: list[str]) -> list[str]:
    """The precision of the programs after each setting of a way. A process for each way: torch keeps its settings."""
    code = """
        import os, torch
        from lce_torch_bridge.through_jax._programs import key_of
        from tests.torch import problem as p
        weight, call = torch.zeros(3, 2), p.told(3)
        for way in WAYS:
            if os.fork():
                assert os.wait()[1] == 0
                continue
            asked = []
            for setting in way:
                exec(setting)
                asked.append(key_of(call, weight).precision)
            print(*asked, flush=True)
            break
    """
    return succeed(code.replace("WAYS", repr(list(ways)))).splitlines()
