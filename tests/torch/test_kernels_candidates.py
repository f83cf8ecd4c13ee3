"""Candidates in calls that are launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_jax import _types, mosaic
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_torch_bridge import launch_with, linear_logprobs
from lce_torch_bridge._types import Tensors
from lce_torch_bridge.call import _checks
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _execute
from tests.torch import problem as p
from tests.torch import test_kernels as lists
from tests.torch.as_gpu import SMALL
from tests.torch.ranks import Ranks

programs, H = lists.programs, lists.H


def check(programs: list[Any], problem: p.Problem, K: int, **options: Any) -> None:
    """Results and gradients are those of XLA's implementation."""
    options["candidates"] = p.candidates_like(problem.labels, K, options.get("vocab_size", len(problem.weight)))
    seeds = p.seeds_like(problem.labels, K=K)
    out, grads = p.gradients(problem, seeds, **options)
    assert len(programs) == 2  # a forward and a backward
    launch_with("jax")
    wanted, of_xla = p.gradients(problem, seeds, **{**options, "cache_bytes": 0}, implementation="xla")
    assert max(map(p.value_error, out, wanted)) < 2e-5
    assert max(map(p.relative_norm, grads, of_xla)) < 5e-3  # bfloat16 rounds by 2⁻⁹


@pytest.mark.parametrize(
    ("T", "V", "K", "options"),
    [
        (130, 784, 9, {"stats": True, "temperature": "each", "logit_softcap": 3.0, "logit_scale": 0.5}),
        (5, 1032, 1, {"vocab_size": 700, "cache_bytes": 1 << 18}),
        pytest.param(12, 784, 64, {"where": "some"}, marks=pytest.mark.slow),
        pytest.param(128, 784, 17, {"entropy": False, "cache_bytes": 1 << 40}, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients(programs: list[Any], T: int, V: int, K: int, options: dict[str, Any]) -> None:
    drawn = p.draw(T, H, V, torch.bfloat16)
    labels = drawn.labels % options.get("vocab_size", V)
    generator = torch.Generator().manual_seed(5)
    if options.get("temperature") == "each":
        labels[::7], labels[3] = -100, 2**32 + 3
        options = {**options, "temperature": torch.rand(T, generator=generator) + 0.5}
    if options.get("where") == "some":
        options = {**options, "where": torch.rand(T, generator=generator) < 0.6}
    check(programs, drawn._replace(labels=labels), K, **options)


def test_no_gradient_through_them(programs: list[Any]) -> None:
    """The launches of a backward without candidates, and its gradients."""
    problem = p.draw(9, H, 784, torch.bfloat16)
    ids, seeds = p.candidates_like(problem.labels, 3, 784), p.seeds_like(problem.labels)

    def gradients(**options: Any) -> Any:
        leaves = problem.leaves()
        out = linear_logprobs(*leaves, **options)
        return torch.autograd.grad(out[:3], leaves[:2], seeds)

    found, wanted = gradients(candidates=ids), gradients()
    launches = [[kernel.name for kernel in program] for program in (programs[1], programs[3])]
    assert launches[0] == launches[1]
    assert all(map(torch.equal, found, wanted))


def test_a_wrong_temperature(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in its row, and no gradient from it. On a GPU nobody looks at the values."""
    monkeypatch.setattr(_checks, "may_look_at", lambda _: False)
    problem = p.draw(6, H, 784, torch.bfloat16)
    temperature = torch.tensor([1.0, 0.5, -1.0, 2.0, 1.0, 1.0])
    ids, seeds = p.candidates_like(problem.labels, 3, 784), p.seeds_like(problem.labels, K=3)
    out, grads = p.gradients(problem, seeds, temperature=temperature, candidates=ids)
    assert programs
    launch_with("jax")
    options = {"temperature": temperature, "candidates": ids, "implementation": "xla"}
    wanted, of_xla = p.gradients(problem, seeds, **options)
    assert out.candidate_logprobs[2].isnan().all()
    assert torch.equal(out.candidate_logprobs.isnan(), wanted.candidate_logprobs.isnan())
    assert not grads[0][2].any()
    assert max(map(p.relative_norm, grads, of_xla)) < 5e-3


def test_a_split_vocabulary(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results and gradients of a whole one, the same bits on both ranks; NaN in the rows that differ."""
    T, V, K = 20, 1040, 5
    problem, ranks = p.draw(T, H, V, torch.bfloat16), Ranks(monkeypatch)
    ids, seeds = p.candidates_like(problem.labels, K, V - 8), p.seeds_like(problem.labels, K=K)
    call = p.told(V - 8, group="both", num_candidates=K, reduce_grad_hidden=True, implementation="mosaic_gpu")
    named = dict(zip(call.differentiable, seeds, strict=True))
    operands = [Tensors(problem.hidden, part, None, problem.labels, None, ids) for part in problem.weight.chunk(2)]

    def on_both() -> list[list[torch.Tensor]]:
        found = []
        for ranks.rank in (0, 1, 0, 1):  # what the first two send, the last two receive
            x = operands[ranks.rank]
            *out, saved = _execute.forward(x, call, False, way_of(x.hidden))
            way = way_of(saved)
            grads = _execute.gradients(x, [saved], named, (True, True, False), call, way)
            found.append([*out, *grads])
        return found[2:]

    first, second = on_both()
    assert len(programs) == 4  # a forward and a backward on each rank
    assert all(map(torch.equal, first[:4], second[:4]))
    launch_with("jax")
    options = {"vocab_size": V - 8, "candidates": ids, "implementation": "xla"}
    wanted, of_xla = p.gradients(problem, seeds, **options)
    assert max(map(p.value_error, first[:4], (*wanted[:3], wanted.candidate_logprobs))) < 2e-5
    dweight = torch.cat([first[5], second[5]])
    assert max(map(p.relative_norm, (second[4], dweight), of_xla)) < 5e-3
    launch_with("direct")
    labels, other = problem.labels.clone(), ids.clone()
    labels[2], other[4, 1] = -100, (other[4, 1] + 1).clamp(min=0)
    operands[1] = operands[1]._replace(labels=labels, candidates=other)
    ranks.gathered.clear()
    ranks.summed.clear()
    for *by_row, dweight in on_both():
        assert all(set(x.isnan().reshape(T, -1).any(1).nonzero()[:, 0].tolist()) == {2, 4} for x in by_row)
        assert dweight.isnan().any()


def test_both_ways_keep_the_same_x(programs: list[Any]) -> None:
    """The x of the candidates as JAX's programs compute it, and as PyTorch's operations do, up to rounding."""
    T, V, K = 9, 784, 5
    problem = p.draw(T, H, V, torch.bfloat16)
    ids = p.candidates_like(problem.labels, K, V)
    x = Tensors(problem.hidden, problem.weight, None, problem.labels, None, ids)
    call = p.told(V, num_candidates=K, implementation="mosaic_gpu")
    *_, saved = _execute.forward(x, call, False, way_of(x.hidden))
    assert len(programs) == 1
    found = saved[-K:].view(torch.float32).T.numpy()
    case = _types.Call(
        num_tokens=T, hidden_size=H, columns=V, dtype=jnp.dtype("bfloat16"), device=SMALL, num_candidates=K,
    )  # fmt: skip
    hidden, weight = (jnp.asarray(y.float().numpy(), case.dtype) for y in problem[:2])
    columns = torch.where((ids >= 0) & (ids < V), ids, -1).int().numpy()
    labels = jnp.asarray(problem.labels.int().numpy())
    operands = _types.Operands(hidden, weight, labels, None, None, None, candidates=jnp.asarray(columns))
    with interpreting(plgpu.InterpretGPUParams()):
        wanted, _ = jax.jit(lambda operands: mosaic.statistics(operands, case))(operands)
    np.testing.assert_allclose(found, wanted.candidates, rtol=1e-5, atol=1e-6)
