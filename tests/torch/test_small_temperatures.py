"""Gradients at small temperatures in PyTorch: as exact as those of stored logits, launched directly too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lce_jax.mosaic import _generations, sm90
from lce_jax.mosaic.sm90._tuning import Tuning, Tunings
from lce_torch_bridge import linear_logprobs, linear_loss
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from tests.torch import problem as p
from tests.torch.as_gpu import emulated
from tests.torch.ranks import Ranks

TEMPERATURES = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8])  # the last has no cotangent
EACH, H, V = 28, 128, 1008


# The interpreter rounds the sum of a step over H, a GPU that of 16 columns: with steps of one size in the forward and
# in the backward, both compute the same logits here too.
STEPS = Tunings(tuned={("NVIDIA H200", name): ((64, Tuning(tile_k=64, stages=4)),) for name in ("forward", "dlogits")})


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with _generations.using(dataclasses.replace(sm90.HOPPER, tunings=STEPS)):
        yield from emulated(monkeypatch)


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("loss", [False, True], ids=["linear_logprobs", "linear_loss"])
def test_greedy_labels(loss: bool, temperature: float) -> None:
    """Their gradient is what float32 leaves of 1 - p, not the noise of large numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 64, generator=generator), torch.randn(1000, 64, generator=generator) / 4
    problem = p.Problem(hidden, weight, (hidden @ weight.T).argmax(-1))

    def error(call: object) -> float:
        leaves = problem.leaves()
        (dweight,) = torch.autograd.grad(call(*leaves), leaves.weight)  # type: ignore[operator]
        leaves = p.Problem(*(x.double() for x in problem[:2]), problem.labels).leaves()
        (true,) = torch.autograd.grad(stored(*leaves), leaves.weight)
        return p.relative_norm(dweight, true)

    def stored(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, labels[:, None]).sum()

    def ours(*operands: torch.Tensor) -> torch.Tensor:
        if loss:
            return linear_loss(lambda logprob, *_: logprob, *operands, temperature=temperature)[0]
        return linear_logprobs(*operands, temperature=temperature).logprobs.sum()

    assert error(ours) <= 2 * error(stored)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("greedy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_direct_launches(ranks: int, greedy: bool, programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a whole and over a split vocabulary, with a temperature for each token."""
    del programs
    temperature = TEMPERATURES.repeat_interleave(EACH)
    problem = p.draw(len(temperature), H, V * ranks, torch.bfloat16)
    exact = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels)
    if greedy:
        problem, exact = (x._replace(labels=(exact.hidden @ exact.weight.T).argmax(-1)) for x in (problem, exact))
    weights = temperature * (temperature > TEMPERATURES[-1])
    seeds = [weights * seed for seed in p.seeds_like(problem.labels)]
    found = _of_ranks(problem, temperature, seeds, ranks, monkeypatch)
    assert all(x.isfinite().all() for x in found)
    assert not found[0][-EACH:].any()
    true = p.gradients(exact, seeds, call=p.stored, temperature=temperature.double())[1]

    # Stored float32 logits, whose gradient is rounded once, as the kernels' is.
    raw = (problem.hidden.float() @ problem.weight.float().T).requires_grad_()
    log_p = (raw / temperature[:, None]).log_softmax(-1)
    at_label, entropy = log_p.gather(-1, problem.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    total = seeds[0] * at_label + seeds[1] * entropy + seeds[2] * (raw / temperature[:, None]).logsumexp(-1)
    d = torch.autograd.grad(total.sum(), raw)[0].bfloat16().double()
    stored = (d @ exact.weight).bfloat16(), (d.T @ exact.hidden).bfloat16()
    for ours, theirs, want in zip(*map(_groups, (found, stored, true)), strict=True):
        assert p.relative_norm(ours, want) <= 2 * p.relative_norm(theirs, want)


def _groups(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """dhidden by temperature, and dweight."""
    return [*gradients[0].split(EACH)[:-1], gradients[1]]


def _of_ranks(
    problem: p.Problem, temperature: torch.Tensor, seeds: list[torch.Tensor], ranks: int, patch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, ...]:
    """The gradients in hidden and in the whole weight."""
    if ranks == 1:
        options = {"temperature": temperature, "implementation": "mosaic_gpu"}
        return p.gradients(problem, seeds, **options)[1]
    both, named = Ranks(patch), dict(zip(("logprobs", "entropy", "lse"), seeds, strict=True))
    call = p.told(2 * V, group="both", reduce_grad_hidden=True, implementation="mosaic_gpu")
    for _ in range(2):  # what a rank gathers is what the other one sent the time before
        found = []
        for both.rank, part in enumerate(problem.weight.chunk(2)):
            x = Tensors(problem.hidden, part, None, problem.labels, temperature, None)
            *_, saved = _execute.forward(x, call, False, way_of(x.hidden))
            way = way_of(saved)
            found.append(_execute.gradients(x, [saved], named, (True, True, False), call, way))
    return found[1][0], torch.cat([dweight for _, dweight in found])
