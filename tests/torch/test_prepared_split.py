"""Direct launches over a split vocabulary, on the CPU: two ranks, one after the other."""

from __future__ import annotations

import pathlib

import pytest
import torch

from lce_jax import launch
from lce_torch_bridge import _execute, launch_with, linear_logprobs, tensor_parallel
from lce_torch_bridge._types import Call, Operands
from tests import launch_emulator
from tests.torch import problem as p
from tests.torch.as_gpu import emulated

ROWS, T, H, V = 128, 228, launch_emulator.HIDDEN_SIZE, 2016


class TwoRanks:
    """What each rank sent in the last round is what all receive in the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.gathered: dict[int, torch.Tensor] = {}
        self.summed: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(tensor_parallel, "size_and_rank", lambda name: (2, self.rank) if name else (1, 0))
        monkeypatch.setattr(tensor_parallel, "check_equal_parts", lambda *_: None)
        monkeypatch.setattr(tensor_parallel, "gather", self._gather)
        monkeypatch.setattr(tensor_parallel, "all_reduce", self._all_reduce)

    def _gather(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.gathered.setdefault(self.rank, x)
        return torch.stack([self.gathered.get(rank, x) for rank in range(2)])

    def _all_reduce(self, x: torch.Tensor, _: str) -> torch.Tensor:
        assert x.dtype == torch.float32
        self.summed[self.rank] = x.clone()
        return sum(self.summed.values(), torch.zeros_like(x))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[launch.Program]:
    """All programs that were loaded."""
    return emulated(monkeypatch, tmp_path, ROWS)


@pytest.mark.skipif(launch_emulator.COMPILER is None, reason="no C++ compiler")
def test_a_split_vocabulary(loaded: list[launch.Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a whole one, the same bits on both ranks, from programs to which nothing is packed."""
    problem, ranks = p.draw(T, H, V, torch.bfloat16), TwoRanks(monkeypatch)
    temperature = torch.rand(T, generator=torch.Generator().manual_seed(5)) + 0.5
    seeds = dict(zip(("logprobs", "entropy", "lse"), p.seeds_like(problem.labels), strict=True))
    call = p.told(V, group="both", reduce_grad_hidden=True, implementation="mosaic_gpu")
    operands = [
        Operands(problem.hidden, part, None, problem.labels, temperature, None) for part in problem.weight.chunk(2)
    ]

    def on_both(call: Call = call) -> list[list[torch.Tensor]]:
        found = []
        for ranks.rank, x in enumerate(operands):
            *out, saved = _execute.forward(x, call, keep_cache=False)
            grads = _execute.gradients(x.hidden, x.weight, None, saved, [], seeds, (True, True, False), call)
            found.append([*out, *grads])
        return found

    on_both()
    one, two = on_both()
    assert all(map(torch.equal, one[:3], two[:3]))
    assert torch.equal(two[3], on_both()[0][3])  # dhidden: the first rank had an older part before
    assert one[3].dtype == torch.bfloat16
    assert len(loaded) == 8  # of each rank: a whole piece and the last one, their union, gradients
    sent = ranks.gathered[0]
    assert sent.shape == (5, 2 * ROWS)

    launch_with("jax")
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, temperature=temperature, implementation="xla")
    dhidden, dweight = torch.autograd.grad(out[:3], leaves[:2], list(seeds.values()))
    assert max(map(p.value_error, one, out[:3])) < 2e-5
    assert p.relative_norm(two[3], dhidden) < 5e-3  # bfloat16 rounds by 2⁻⁹
    assert p.relative_norm(torch.cat([one[4], two[4]]), dweight) < 5e-3
    ranks.gathered.clear()
    on_both(call._replace(implementation="xla"))
    launch_with(None)
    assert ranks.gathered[0].shape == sent.shape  # a rank may take the other way

    ranks.gathered[1][-1] = torch.tensor(V // 2 - 16, dtype=torch.int32).view(torch.float32)
    assert all(x.isnan().all() for found in on_both() for x in found[:3])
