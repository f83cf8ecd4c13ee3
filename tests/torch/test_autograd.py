"""A drop-in for PyTorch's own layers must behave under autograd as they do."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen(frozen: str) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    leaves = problem.leaves()
    getattr(leaves, frozen).requires_grad_(False)
    p.objective(linear_logprobs(*leaves), seeds).backward()
    assert getattr(leaves, frozen).grad is None
    other = "weight" if frozen == "hidden" else "hidden"
    _, both = p.gradients(problem, seeds)
    assert torch.equal(getattr(leaves, other).grad, both[("hidden", "weight").index(other)])


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


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    hidden, weight = torch.zeros(*shape, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    labels, ids = torch.zeros(shape, dtype=torch.int64), torch.zeros((*shape, 3), dtype=torch.int64)
    out = linear_logprobs(hidden, weight, labels, stats=True, mean_logit=True, candidates=ids)
    assert [field.shape for field in out[:8]] == [torch.Size(shape)] * 6 + [torch.Size((*shape, 3)), torch.Size(shape)]
    (out.logprobs.sum() + out.candidate_logprobs.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_stride_zero_gradients() -> None:
    """``sum()`` expands one number to stride 0, which DLPack does not take."""
    leaves = p.draw().leaves()
    out = linear_logprobs(*leaves)
    out.logprobs.sum().backward()
    want = torch.autograd.grad((linear_logprobs(*leaves).logprobs * torch.ones(37)).sum(), leaves[:2])
    assert torch.equal(leaves.hidden.grad, want[0])
    assert torch.equal(leaves.weight.grad, want[1])


def test_retain_graph() -> None:
    problem = p.draw()
    leaves = problem.leaves()
    objective = p.objective(linear_logprobs(*leaves), p.seeds_like(problem.labels))
    first = torch.autograd.grad(objective, leaves[:2], retain_graph=True)
    second = torch.autograd.grad(objective, leaves[:2])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(objective, leaves[:2])


def test_a_second_derivative_raises() -> None:
    leaves = p.draw().leaves()
    (grad,) = torch.autograd.grad(linear_logprobs(*leaves).logprobs.sum(), leaves.hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "options", [{}, dict(where=torch.arange(0, 37, 3), temperature=torch.full((37,), 0.7))], ids=str
)
def test_first_derivatives_of_torch_func(options: dict[str, Any]) -> None:
    """`grad` and `vjp` have the bits of ``torch.autograd.grad``."""
    problem = p.draw()
    seeds, options = p.seeds_like(problem.labels, K=5), options | dict(candidates=p.candidates_like(problem.labels))
    _, want = p.gradients(problem, seeds, **options)

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(hidden, weight, problem.labels, **options), seeds)

    assert all(map(torch.equal, torch.func.grad(call, argnums=(0, 1))(*problem[:2]), want))
    _, pull_back = torch.func.vjp(call, *problem[:2])
    assert all(map(torch.equal, pull_back(torch.tensor(1.0)), want))


WHOLE_BATCH = (
    r"under torch\.func\.vmap, .* give it the whole batch, and loop where each part has a weight or a gradient"
)
REVERSE_MODE = r"no forward-mode derivatives .* torch\.func\.vjp or torch\.autograd\.grad"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f, x: torch.func.vmap(f)(x[:, None]), WHOLE_BATCH),
        (lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x[:, None]), WHOLE_BATCH),
        (lambda f, x: torch.func.jacrev(f)(x), WHOLE_BATCH),
        (lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True), WHOLE_BATCH),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), REVERSE_MODE),
        (lambda f, x: torch.func.jacfwd(f)(x), REVERSE_MODE),
        (lambda f, x: torch.func.linearize(f, x), REVERSE_MODE),
        (
            lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
            "first derivatives only",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of its jvp
def test_other_transforms_are_refused_with_what_to_do(transform: Any, message: str) -> None:
    hidden, weight, labels = p.draw(T=3, H=8, V=10)
    temperature = torch.full((1,), 0.7)  # its values cannot be read inside a transform

    def call(x: torch.Tensor) -> torch.Tensor:
        there = labels[: x.numel() // 8].view(x.shape[:-1])
        return linear_logprobs(x, weight, there, temperature=temperature).logprobs

    with pytest.raises(NotImplementedError, match=message):
        transform(call, hidden)


@pytest.mark.parametrize("changed", ["hidden", "weight"])
def test_a_change_in_place_before_the_backward_raises(changed: str) -> None:
    leaves = p.draw().leaves()
    hidden = leaves.hidden * 1
    out = linear_logprobs(hidden, *leaves[1:])
    with torch.no_grad():
        {"hidden": hidden, "weight": leaves.weight}[changed].mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_checkpointing(reentrant: bool, cache_bytes: int) -> None:
    problem = p.draw()
    seeds = p.seeds_like(problem.labels, K=5)
    options: Any = dict(cache_bytes=cache_bytes, candidates=p.candidates_like(problem.labels))

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return p.objective(linear_logprobs(*leaves, **options), seeds)

    leaves = problem.leaves()
    checkpoint(call, *leaves, use_reentrant=reentrant).backward()
    _, want = p.gradients(problem, seeds, **options)
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
