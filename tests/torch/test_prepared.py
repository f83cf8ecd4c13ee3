"""Direct launches of calls that are not packed, on the CPU: generated code by its compiler, kernels by NumPy."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lce_jax import launch
from lce_jax.launch import _source
from lce_torch_bridge import _direct, _rows, launch_with, linear_logprobs
from tests import launch_emulator
from tests.torch import problem as p

H200 = launch.Device("gpu", "NVIDIA H200", "9.0", 132)
T, H, V = 300, launch_emulator.HIDDEN_SIZE, 1008
ROWS = 512  # of a program
needs_compiler = pytest.mark.skipif(launch_emulator.COMPILER is None, reason="no C++ compiler")


def as_gpu(monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any]) -> None:
    """CPU tensors count as those of an H200, on which programs are what ``load`` makes of them."""
    monkeypatch.setattr(_direct, "_programs", {})
    monkeypatch.setattr(_direct, "device_of", lambda _: H200)
    monkeypatch.setattr(_direct, "why_not", lambda _: None)
    monkeypatch.setattr(_direct, "on_gpu", lambda _: True)
    monkeypatch.setattr(_direct, "current_device", lambda: -1)
    monkeypatch.setattr(_direct, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch.Program, "load", lambda program, _: load(program))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[launch.Program]:
    """Programs that run, each loaded once; all that were loaded."""
    loaded: list[launch.Program] = []

    def load(program: launch.Program) -> Any:
        loaded.append(program)
        folder = tmp_path / str(len(loaded))
        folder.mkdir()
        return launch_emulator.loaded(program, folder)

    monkeypatch.setattr(_source, "THREADS", launch_emulator.THREADS)
    monkeypatch.setattr(launch_emulator, "PADDED_TOKENS", ROWS)
    monkeypatch.setattr(_rows, "FORWARD_ROWS", ROWS)
    monkeypatch.setattr(_rows, "SMALLEST", ROWS)
    as_gpu(monkeypatch, load)
    return loaded


def strided_seeds(labels: torch.Tensor) -> list[torch.Tensor]:
    """Cotangents that lie in every way: one number for all, every second one, side by side."""
    one, two, three = p.seeds_like(torch.cat([labels, labels]))
    return [one[:1].expand(labels.shape), two[::2], three[: len(labels)]]


@needs_compiler
def test_results_and_gradients(programs: list[launch.Program]) -> None:
    """Those of the way through JAX, for counts of tokens that one program serves, whole and not."""
    drawn = p.draw(2 * T, H, V, torch.bfloat16)
    temperature = torch.rand(2 * T, generator=torch.Generator().manual_seed(5)) + 0.5
    for count in (T, 7):
        at = slice(1, 2 * count, 2)  # labels and temperatures that do not lie side by side
        problem = p.Problem(drawn.hidden[:count], drawn.weight, drawn.labels[at])
        options: Any = {"temperature": temperature[at], "implementation": "mosaic_gpu"}
        seeds = strided_seeds(problem.labels)
        found, grads = _with(seeds, problem, **options)
        assert len(programs) == 2
        launch_with("jax")
        wanted, of_jax = _with(seeds, problem, **options | {"implementation": "xla"})
        launch_with(None)
        assert max(map(p.value_error, found, wanted)) < 2e-5
        assert all(x.shape == y.shape for x, y in zip(grads, of_jax, strict=True))
        assert max(map(p.relative_norm, grads, of_jax)) < 5e-3  # bfloat16 rounds by 2⁻⁹


def _with(seeds: list[torch.Tensor], problem: p.Problem, **options: Any) -> Any:
    leaves = problem.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, problem.labels, **options)
    grads = torch.autograd.grad(out[:3], leaves[:2], seeds)
    return [x.detach() for x in out[:3]], grads
