"""`linear_loss` in float16, whose dlogits are rounded before the loss scale is known."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from lce_jax.xla import _walk
from lce_torch_bridge import linear_loss
from lce_torch_bridge.operators import _loss
from tests.pairs import pairs_of
from tests.torch import problem as p
from tests.torch.launched import launched_directly

T = 5000  # of three chunks
ROUNDING = 2.0**-11  # of float16, relative, at most


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take dlogits in the weight's dtype, as on a GPU."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)


def loss(logprobs: Any, entropy: Any, lse: Any, factors: Any) -> Any:
    return factors * (0.01 * lse**2 - logprobs - 0.1 * entropy)


def gradients(call: Any, problem: p.Problem, loss_scale: float, **options: Any) -> Any:
    leaves = problem.leaves()
    return torch.autograd.grad(loss_scale * call(*leaves, **options), leaves[:2])


@pytest.mark.usefixtures("rounded")
@pairs_of(
    1,
    magnitudes=[(1e-6, 1e-6, 1e-6), (1e-12, 1e-6, 1e-9), (0.0, 1e-9, 1e3)],
    chunk_bytes=[p.THREE_CHUNKS, None],
    way=[contextlib.nullcontext, launched_directly],
)
def test_losses_of_any_magnitude(magnitudes: tuple[float, ...], chunk_bytes: int | None, way: Any) -> None:
    """Each chunk's gradients are as exact as float16's rounding of the largest ones lets them be."""
    drawn = p.draw(T=T)
    problem = drawn._replace(weight=drawn.weight.half(), labels=drawn.labels % 50)  # half of the columns have none
    factors = torch.tensor(magnitudes).repeat_interleave(2048)[:T]
    options: Any = dict(
        loss_scale=0.1 / max(magnitudes), logit_scale=1.0625, temperature=torch.linspace(0.05, 2, T)
    )  # no other test's programs
    with way():
        found = gradients(
            lambda *x, **told: linear_loss(loss, *x, factors, chunk_bytes=chunk_bytes, **told)[0], problem, **options
        )
    double = p.Problem(problem.hidden.half().double(), problem.weight.double(), problem.labels)
    want = gradients(lambda *x, **told: loss(*p.stored(*x, **told)[:3], factors).sum(), double, **options)
    for columns in (slice(50), slice(50, None)):
        assert p.relative_norm(found[1][columns], want[1][columns]) < ROUNDING
    for first, magnitude in zip(range(0, T, 2048), magnitudes, strict=True):
        rows = slice(first, first + 2048)
        if magnitude > 1e-6 * max(magnitudes) or chunk_bytes is not None:
            assert p.relative_norm(found[0][rows], want[0][rows]) < ROUNDING


def test_a_unit_keeps_dlogits_within_float16() -> None:
    x = _loss.Operands(*[torch.zeros(3)] * 6)
    call = p.told(V=150_000, logit_scale=-2.0)
    given = {"logprobs": torch.tensor([3.0, -5e-7, 0.0]), "entropy": torch.tensor([-1.0, 1e-7, 0.0])}
    temperature = torch.tensor([0.5, 1e-8, 1e-8])
    for rows, largest in ((slice(0, 1), 4 * (3 + 12.92)), (slice(0, 2), 2e8 * (5e-7 + 12.92e-7)), (slice(2, 3), 0.0)):
        part = {name: seed[rows] for name, seed in given.items()}
        unit = _loss.unit_of(part, x._replace(labels=torch.zeros(3)[rows], temperature=temperature[rows]), call)
        assert unit.log2().frac() == 0
        assert 2**14 <= unit * largest < 2**15 if largest else unit == 2.0**100
    damaged = {"logprobs": torch.tensor([torch.nan, 1.0, torch.inf])}
    assert _loss.unit_of(damaged, x._replace(temperature=None), call) == 2.0**13
