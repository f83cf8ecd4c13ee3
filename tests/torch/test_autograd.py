"""What autograd asks of JAX's programs: any of the results, any gradients, results that are the caller's."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from lce_torch_bridge import linear_logprobs
from lce_torch_bridge.through_jax._logprobs import pull_back
from lce_torch_bridge.through_jax._programs import ProgramKey, program
from tests.torch import problem as p

GRADIENT = 1e-6  # as in test_parity


@pytest.mark.parametrize("used", ["logprobs", "entropy", "lse", "candidate_logprobs"])
def test_only_one_output_used(used: str) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels, K=5)
    seed = seeds[-1] if used == "candidate_logprobs" else seeds[0]
    grads = []
    for call in (linear_logprobs, p.stored):
        leaves = problem.leaves()
        (getattr(call(*leaves, candidates=p.candidates_like(problem.labels)), used) * seed).sum().backward()
        grads.append((leaves.hidden.grad, leaves.weight.grad))
    assert max(map(p.relative_norm, *grads)) < GRADIENT


def test_nothing_used_is_no_error() -> None:
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves, stats=True)
    (leaves.hidden.sum() + 0 * out.max_logit.sum()).backward()
    assert leaves.weight.grad is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_costs_no_product_and_no_buffer(dtype: str) -> None:
    """What XLA compiled: one product recomputes the logits and one makes dhidden; nothing else is as large as V x H."""
    struct, (T, H, V) = jax.ShapeDtypeStruct, (1024, 64, 16384)
    key = ProgramKey(p.told(V, implementation="xla"), 0, 1, precision=None)
    shapes = (struct((T, H), dtype), struct((V, H), dtype), None, struct((1 + T * (1 + 4 + 2),), "int32"), None)

    def compiled(wanted: tuple[bool, bool, bool]) -> jax.stages.Compiled:
        run = program(pull_back, key, ("logprobs", "entropy"), wanted, True, None)
        return run.lower(*shapes).compile()

    frozen, both = compiled((True, False, False)), compiled((True, True, False))
    assert frozen.as_text().count(" dot(") == 2
    assert both.as_text().count(" dot(") == 3
    assert frozen.memory_analysis().output_size_in_bytes < V * H
    assert frozen.memory_analysis().temp_size_in_bytes <= both.memory_analysis().temp_size_in_bytes
    assert both.memory_analysis().output_size_in_bytes >= V * H * 2


def test_stride_zero_gradients() -> None:
    """``sum()`` expands one number to stride 0, which DLPack does not take."""
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves)
    out.logprobs.sum().backward()
    want = torch.autograd.grad((linear_logprobs(*leaves).logprobs * torch.ones(37)).sum(), leaves[:2])
    assert torch.equal(leaves.hidden.grad, want[0])
    assert torch.equal(leaves.weight.grad, want[1])


@pytest.mark.parametrize("options", [{}, {"where": torch.tensor([3, 5, 8])}], ids=str)
def test_results_can_be_written_in_place(options: dict[str, Any]) -> None:
    problem = p.draw()
    mask = torch.arange(problem.labels.numel()) % 2 == 0
    inside, outside = problem.leaves(), problem.leaves()
    written = linear_logprobs(*inside, **options).logprobs
    written[~mask] = 0.0
    written.mul_(2.0).sum().backward()
    (linear_logprobs(*outside, **options).logprobs * mask * 2.0).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inside[:2], outside[:2], strict=True))
