"""``gradient_threshold`` through the bridge, where no kernel runs: exact, and what is kept goes through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_torch_bridge import linear_cross_entropy, linear_logprobs, linear_loss

T, H, V = 130, 128, 768


def gradients(**options: Any) -> tuple[Any, tuple[torch.Tensor, ...], list[tuple[int, ...]]]:
    """The outputs, dhidden and dweight, and the shapes of what autograd keeps."""
    torch.manual_seed(0)
    hidden = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.bfloat16, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
        out = linear_logprobs(hidden, weight, torch.arange(T), **options)
    loss = out.logprobs.sum() - 0.1 * out.entropy.sum()
    return out, torch.autograd.grad(loss, (hidden, weight)), kept


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("stats", [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="stats")])
def test_exact_without_kernels(stats: bool) -> None:
    exact = gradients(stats=stats)
    assert_same(gradients(stats=stats, gradient_threshold=2.0**-12), exact)
    assert_same(gradients(stats=stats, gradient_threshold=0.0), exact)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stats", [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="stats")])
def test_what_the_kernels_would_need_is_kept(stats: bool) -> None:
    """Through JAX as on an H200, each kernel by Pallas's interpreter."""
    with interpreting(plgpu.InterpretGPUParams()):
        exact = gradients(stats=stats, cache_bytes=0)
        got = gradients(stats=stats, gradient_threshold=2.0**-11)
        with torch.no_grad():
            few = torch.randn(3, H, dtype=torch.bfloat16), torch.randn(V, H, dtype=torch.bfloat16), torch.arange(3)
            assert linear_logprobs(*few, stats=stats, gradient_threshold=2.0**-10).logprobs.shape == (3,)
    torch.testing.assert_close([x for x in got[0] if x is not None], [x for x in exact[0] if x is not None])
    for dense, sparse in zip(exact[1], got[1], strict=True):
        torch.testing.assert_close(sparse, dense, rtol=0.01, atol=2.0**-10 * float(dense.abs().max()))
    tiles = [shape for shape in got[2] if shape not in exact[2]]
    assert len(tiles) == 4  # the maxima, the labels' columns, the scales, and a tile that is always live
    assert tiles[0][:2] == (16, 1 + stats)


def test_losses_take_it_and_a_wrong_one_is_refused() -> None:
    operands = torch.randn(8, H), torch.randn(V, H), torch.arange(8)
    exact = linear_cross_entropy(*operands)
    assert torch.equal(linear_cross_entropy(*operands, gradient_threshold=0.01), exact)

    def loss_of_token(logprob: torch.Tensor, *_: Any) -> torch.Tensor:
        return -logprob

    operands[1].requires_grad_()
    total, _ = linear_loss(loss_of_token, *operands, gradient_threshold=0.01)
    torch.testing.assert_close(total / 8, exact)
    with pytest.raises(ValueError, match=r"gradient_threshold must lie in \[0, 1\), got 1"):
        linear_logprobs(*operands, gradient_threshold=1.0)
