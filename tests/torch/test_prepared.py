"""Direct launches of calls that are not packed, on the CPU: generated code by its compiler, kernels by NumPy."""

from __future__ import annotations

import collections
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lce_jax import launch
from lce_torch_bridge import _direct, _prepared, launch_with, linear_logprobs
from tests import launch_emulator
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu, emulated

T, H, V = 100, launch_emulator.HIDDEN_SIZE, 1008
ROWS = 128  # of a program
needs_compiler = pytest.mark.skipif(launch_emulator.COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[launch.Program]:
    """Programs that run, each loaded once; all that were loaded."""
    return emulated(monkeypatch, tmp_path, ROWS)


def strided_seeds(labels: torch.Tensor) -> list[torch.Tensor]:
    """Cotangents that lie in every way: one number for all, every second one, side by side."""
    one, two, three = p.seeds_like(torch.cat([labels, labels]))
    return [one[:1].expand(labels.shape), two[::2], three[: len(labels)]]


@needs_compiler
def test_results_and_gradients(programs: list[launch.Program]) -> None:
    """Those of the way through JAX. Whole pieces are read where they lie, and the last one is copied."""
    drawn = p.draw(ROWS + T, H, V, torch.bfloat16)
    at = slice(1, None, 2)  # labels and temperatures that do not lie side by side
    problem = drawn._replace(labels=torch.cat([drawn.labels, drawn.labels])[at])
    temperature = (torch.rand(2 * (ROWS + T), generator=torch.Generator().manual_seed(5)) + 0.5)[at]
    seeds = strided_seeds(problem.labels)
    found, grads = _with(seeds, problem, temperature=temperature, implementation="mosaic_gpu")
    assert len(programs) == 3  # two of the forward
    last = [x[ROWS:] for x in (problem.hidden, problem.labels, temperature)]
    with torch.no_grad():
        alone = linear_logprobs(last[0], problem.weight, last[1], temperature=last[2], implementation="mosaic_gpu")
    assert len(programs) == 3
    assert all(torch.equal(x[ROWS:], y) for x, y in zip(found, alone[:3], strict=True) if y is not None)
    before, summed = _into_main_grad(seeds, problem, temperature=temperature, implementation="mosaic_gpu")
    assert p.relative_norm(summed - before, grads[1]) < 5e-3
    launch_with("jax")
    wanted, of_jax = _with(seeds, problem, temperature=temperature, implementation="xla")
    launch_with(None)
    assert max(map(p.value_error, found, wanted)) < 2e-5
    assert all(x.shape == y.shape for x, y in zip(grads, of_jax, strict=True))
    assert max(map(p.relative_norm, grads, of_jax)) < 5e-3  # bfloat16 rounds by 2⁻⁹


def _into_main_grad(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> list[torch.Tensor]:
    """``main_grad`` before and after a backward that adds to it in place."""
    leaves: Any = problem.leaves()
    leaves.weight.main_grad = torch.randn(leaves.weight.shape, generator=torch.Generator().manual_seed(8))
    before, leaves.weight.grad_added_to_main_grad = leaves.weight.main_grad.clone(), False
    out = linear_logprobs(*leaves, wgrad="main_grad", **options)
    torch.autograd.backward(out[:3], seeds)
    assert leaves.weight.grad_added_to_main_grad
    return [before, leaves.weight.main_grad]


def _with(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> Any:
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], seeds)
    return [x.detach() for x in out[:3]], grads


@needs_compiler
def test_saved_tensors_may_come_back_in_another_layout(programs: list[launch.Program]) -> None:
    """As from a hook that offloads or compresses tensors."""
    problem = p.draw(ROWS + T, H, V, torch.bfloat16)
    seeds = p.seeds_like(problem.labels)
    _, want = p.gradients(problem, seeds, implementation="mosaic_gpu")
    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.t().contiguous(), lambda x: x.t()):
        out = linear_logprobs(*leaves, implementation="mosaic_gpu")
    assert all(map(torch.equal, torch.autograd.grad(p.objective(out, seeds), leaves[:2]), want))
    assert len(programs) == 3  # two of the forward


CALLS = 115, 162  # functions that a forward and a backward call, those of torch's own Python and of C among them


def test_how_much_python_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does besides launches, which here do nothing. A tensor's own methods count as calls."""
    as_gpu(monkeypatch, lambda _: lambda *_: None)
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


@pytest.mark.parametrize(("cache_bytes", "most"), [(0, 10), (1 << 30, 12)])
def test_a_dozen_programs_serve_a_thousand_counts_of_tokens(
    cache_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16,384 tokens, forward and backward, nothing compiled or run. How many rows count is an operand."""
    as_gpu(monkeypatch, lambda _: lambda *_: None)
    outputs = [((1,), torch.float32)] * 3 + [((5, 1), torch.int32)] + [((1,), torch.bfloat16)] * (cache_bytes > 0)
    monkeypatch.setattr(_direct, "_load", lambda *_: _direct.Loaded(lambda *_: None, outputs, 0))
    before = len(_direct._programs)
    for n in {1, 2048, 4096, 8192, 16384, *random.Random(0).sample(range(1, 16384), 1000)}:
        leaves, seed = p.draw(n, 16, 32, torch.bfloat16).leaves(), torch.ones(n)
        out = linear_logprobs(*leaves, implementation="mosaic_gpu", cache_bytes=cache_bytes)
        torch.autograd.grad(out[:3], leaves[:2], [seed] * 3)
    assert len(_direct._programs) - before == most


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
    assert watch.seen == ["lce_torch_bridge::forward", "lce_torch_bridge::gradients"]
    assert all(map(torch.equal, [*found, *grads], [*watched, *of_watched]))
    out = linear_logprobs(*problem.leaves())
    assert out.logprobs.grad_fn is not None
    assert out.logprobs.grad_fn.name() == "EagerBackward"
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
    """JAX runs calls in float32, and nothing is planned for the second one. Plans of many shapes do not pile up."""
    as_gpu(monkeypatch, lambda _: lambda *_: None)
    monkeypatch.setattr(_prepared, "MOST_PLANS", 2)
    made = []
    for _ in range(2):
        assert _prepared.found("loop", torch.zeros(1), lambda: made.append(1) or "only XLA runs a loop") is None
    assert made == [1]
    assert _prepared.found("kernels", torch.zeros(1), lambda: (7,)) == (7,)
    assert _prepared.found("kernels", torch.zeros(1), list) == (7,)
    launch_with("jax")
    assert _prepared.found("kernels", torch.zeros(1), list) is None
    launch_with(None)
    assert _prepared.found("others", torch.zeros(1), lambda: (8,)) == (8,)
    assert list(_prepared._plans) == ["others"]
