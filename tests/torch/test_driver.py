"""What the host does around direct launches: how much of it, how many programs, and what sees the operators."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lce_torch_bridge import launch_with, linear_logprobs
from lce_torch_bridge.launched_directly import _host
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu

T, H, V = 300, 128, 1008


def _with(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> Any:
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], seeds)
    return [x.detach() for x in out[:3]], grads


CALLS = 119, 194  # functions that a forward and a backward call, those of torch's own Python and of C among them


def test_how_much_python_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does besides launches, which here do nothing. A tensor's own methods count as calls."""
    as_gpu(monkeypatch)
    leaves, seed = p.draw(T, H, V, torch.bfloat16).leaves(), torch.ones(T)

    def backward(out: Any) -> Any:
        return torch.autograd.grad([out.logprobs, out.entropy], leaves[:2], [seed, seed])

    backward(linear_logprobs(*leaves, implementation="mosaic_gpu"))
    forward_calls, out = _calls(lambda: linear_logprobs(*leaves, implementation="mosaic_gpu"))
    backward_calls, _ = _calls(lambda: backward(out))
    assert forward_calls <= CALLS[0]
    assert backward_calls <= CALLS[1]


def _calls(function: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions it calls, and what it returns."""
    seen: collections.Counter[str] = collections.Counter()
    sys.setprofile(lambda *at: seen.update([at[1]]))
    try:
        found = function()
    finally:
        sys.setprofile(None)
    return seen["call"] + seen["c_call"], found


@pytest.mark.parametrize(("cache_bytes", "most"), [pytest.param(0, 72, marks=pytest.mark.slow), (1 << 30, 72)])
def test_few_kernels_serve_all_counts_of_tokens(cache_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16,384 tokens, forward and backward, nothing compiled or run. How many rows count is an operand."""
    programs = as_gpu(monkeypatch)
    for n in {1, 128, 512, 2048, 4096, 8192, 16384, *random.Random(0).sample(range(1, 16384), 200)}:
        leaves, seed = p.draw(n, 128, 1024, torch.bfloat16).leaves(), torch.ones(n)
        out = linear_logprobs(*leaves, implementation="mosaic_gpu", cache_bytes=cache_bytes)
        torch.autograd.grad(out[:3], leaves[:2], [seed] * 3)
    assert len({kernel for program in programs for kernel in program}) == most


class Names(TorchDispatchMode):
    """Notes the bridge's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen += [func.name()] * (func.namespace == "lce_torch_bridge")
        return func(*args, **(kwargs or {}))


def test_what_watches_operators_sees_them() -> None:
    """Otherwise there are none, and the results are the same."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    found, grads = _with(seeds, problem)
    with Names() as watch:
        watched, of_watched = _with(seeds, problem)
    assert watch.seen == ["lce_torch_bridge::forward", "lce_torch_bridge::backward"]
    assert "EagerBackward" in str(linear_logprobs(*problem.leaves()).logprobs.grad_fn)
    assert all(map(torch.equal, [*found, *grads], [*watched, *of_watched]))
    with torch.autograd.profiler.profile() as profile:
        linear_logprobs(*problem)
    assert "lce_torch_bridge::forward" in {event.name for event in profile.function_events}


def test_options_that_were_right_once_are_still_checked() -> None:
    """1 equals True, and is no flag."""
    problem = p.draw()
    linear_logprobs(*problem, stats=True, logit_scale=1)
    with pytest.raises(TypeError, match="stats must be True or False, got 1"):
        linear_logprobs(*problem, stats=1, logit_scale=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="logit_scale must be a Python number, got bool True"):
        linear_logprobs(*problem, stats=True, logit_scale=True)
    with pytest.raises(TypeError, match="implementation must be None, a name or a tuple of names"):
        linear_logprobs(*problem, implementation=["xla"])  # type: ignore[arg-type]


def test_a_reason_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX runs such calls, and nothing is planned for the second one. Plans of many shapes do not pile up."""
    as_gpu(monkeypatch)
    monkeypatch.setattr(_host, "MOST", 2)
    made = []
    for _ in range(2):
        assert _host.plan_of("float32", lambda: made.append(1) or "no kernel") == "no kernel"
    assert made == [1]
    assert _host.plan_of("plain", lambda: (7,)) == (7,)
    assert _host.plan_of("plain", list) == (7,)
    assert _host.plan_of("others", lambda: (8,)) == (8,)
    assert list(_host._plans) == ["others"]


def test_jax_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the same call has been launched directly."""
    launched: list[Any] = []
    as_gpu(monkeypatch, lambda program: [lambda *_: lambda: launched.append(1) for _ in program])
    monkeypatch.setattr("lce_torch_bridge.through_jax._programs.run", lambda *_, **__: pytest.fail("JAX runs it"))
    leaves = p.draw(T, H, V, torch.bfloat16)
    linear_logprobs(*leaves)
    assert len(launched) == 6
    launch_with("jax")
    with pytest.raises(pytest.fail.Exception, match="JAX runs it"):
        linear_logprobs(*leaves)
    launch_with(None)
    linear_logprobs(*leaves)
    assert len(launched) == 12
