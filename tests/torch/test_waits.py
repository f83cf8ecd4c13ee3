"""What JAX runs for torch waits for torch: of each program, the input that waits is one that the program reads.

``jax.jit`` drops inputs that a program does not read, and with them what they would wait for. On a CPU nothing waits,
but the programs are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
import torch

from lce_torch_bridge import linear_entropy, linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _programs
from tests.pairs import pairs_of
from tests.torch import problem as p

T, H, V = 300, 16, 96
TEMPERATURE, SEED = torch.linspace(0.5, 2.0, T), torch.linspace(-1.0, 1.0, T)
PROBLEM = p.draw(T, H, V)
IDS = torch.randint(-1, V, (T, 3), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each program that has run: whether it reads what it waits by."""
    found: list[bool] = []

    def checked(function: Any, place: int) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            # The places of leaves: an input that is None has none.
            before = len(jax.tree.leaves(arrays[:place]))
            found.append(before in function.lower(*arrays)._lowering.compile_args["kept_var_idx"])
            return function(*arrays)

        return run

    run, after, zeros = _programs.run, _programs.DweightSum.after, _programs._zeros

    def run_checked(function: Any, *calls: Any, waits: int = _programs.WAITS, lend: bool = True) -> Any:
        return run(checked(function, waits), *calls, waits=waits, lend=lend)

    def after_checked(self: Any, function: Any, inputs: Any, operand: int, place: int) -> Any:
        assert operand > _programs.WAITS  # the sum stands after it
        return after(self, checked(function, _programs.WAITS), inputs, operand, place)

    def zeros_checked(shape: tuple[int, ...], array: Any) -> Any:
        found.append(zeros.lower(shape, array)._lowering.compile_args["kept_var_idx"] == {0})
        return zeros(shape, array)

    monkeypatch.setattr(_programs, "run", run_checked)
    monkeypatch.setattr(_programs.DweightSum, "after", after_checked)
    monkeypatch.setattr(_programs, "_zeros", zeros_checked)
    return found


def differentiated(of: Callable[..., Any], wanted: Sequence[int]) -> None:
    """``of`` and the gradients in some of hidden, weight and a bias."""
    operands = [PROBLEM.hidden.clone(), PROBLEM.weight.clone(), torch.zeros(V)]
    for i in wanted:
        operands[i].requires_grad_()
    torch.autograd.grad(of(*operands), [operands[i] for i in wanted])


def logprobs(read: Callable[[Any], torch.Tensor], **options: Any) -> Callable[..., Any]:
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (SEED * read(linear_logprobs(hidden, weight, PROBLEM.labels, bias=bias, **options))).sum()

    return of


def divergence(**options: Any) -> Callable[..., Any]:
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (SEED * linear_kl(hidden, weight, PROBLEM.hidden, PROBLEM.weight, bias=bias, **options)).sum()

    return of


def entropy(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear_entropy(hidden, weight, bias=bias)[0].sum()


def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear_logits(hidden, weight, IDS, bias=bias).sum()


def chunks(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    problem = [torch.cat([x] * 15) for x in (hidden, PROBLEM.labels)]  # of 4,500 tokens, in three chunks
    chunk_bytes = p.bytes_of(2048, weight)
    total, _ = linear_loss(
        lambda logprobs, *_: logprobs, problem[0], weight, problem[1], bias=bias, chunk_bytes=chunk_bytes
    )
    return total


CALLS: dict[str, Callable[..., Any]] = {
    "logprobs": logprobs(lambda out: out.logprobs),
    "lse": logprobs(lambda out: out.lse, entropy=False),
    "entropy, a cache": logprobs(lambda out: out.entropy, cache_bytes=1 << 30),
    "candidates": logprobs(lambda out: out.candidate_logprobs.sum(-1), candidates=IDS, temperature=TEMPERATURE),
    "linear_entropy": entropy,
    "linear_kl": divergence(),
    "linear_kl, jsd, a cache": divergence(direction="jsd", temperature=TEMPERATURE, cache_bytes=1 << 30),
    "linear_logits": logits,
    "linear_loss": chunks,
}


@pairs_of(1, wanted=[(0, 1, 2), (0,), (1,)], name=list(CALLS))
def test_the_input_that_waits_is_read(name: str, wanted: tuple[int, ...], reads: list[bool]) -> None:
    differentiated(CALLS[name], wanted)
    assert reads
    assert all(reads)


def test_of_the_most_likely_tokens(reads: list[bool]) -> None:
    linear_topk(PROBLEM.hidden, PROBLEM.weight, 3)
    linear_topk(PROBLEM.hidden, PROBLEM.weight, 3, temperature=TEMPERATURE)
    assert reads == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_program_runs_by_itself(dtype: torch.dtype) -> None:
    """One without an input of torch, such as ``jnp.zeros``, would write at once to what torch has yet to read."""
    names: set[str] = set()

    def listen(event: str, _: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.add(about["fun_name"])

    problem = p.draw(4500, H, V, dtype).leaves()
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        chunk_bytes = p.bytes_of(2048, problem.weight)
        total, _ = linear_loss(lambda logprobs, *_: logprobs * 1e-6, *problem, chunk_bytes=chunk_bytes)
        torch.autograd.grad(total, problem[:2])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert names == {"jit(whole)", "jit(pull_back)", "jit(_zeros)"} | (
        {"jit(_multiplied)"} if dtype == torch.float16 else set()
    )
