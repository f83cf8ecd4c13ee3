"""Candidates beside the Hopper kernels, lowered for CUDA at real shapes: no GPU is needed."""

from __future__ import annotations

import re

import pytest

from lce_jax.xla import _logits
from tests.mosaic.test_lowering import EVERYTHING, lower

pytestmark = pytest.mark.usefixtures("hopper")


CALLS = {
    "whole": (4096, 151936, 64, {}),
    "no whole atom": (4096, 50257, 8, {}),
    "everything": (4096, 151936, 512, {**EVERYTHING, "vocab_size": 151669}),
    "no whole piece of H": (2880, 201088, 1, {"vocab_size": 200019}),
}
SOME = {"no whole atom", "everything"}


@pytest.mark.parametrize("cache_bytes", [0, pytest.param(1 << 28, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOME else pytest.mark.slow) for x in CALLS])
def test_candidates(name: str, cache_bytes: int) -> None:
    """Kernels alone: XLA gathers no row of the weight, sorts nothing and scatters nothing.

    One kernel less, that of the coefficients.
    """
    H, V, K, options = CALLS[name]
    text, without = (lower(4096, H, V, cache_bytes=cache_bytes, **options, **more) for more in ({"K": K}, {}))
    parts = 2 if cache_bytes else 1  # what is cached, and what is not
    parts += V % 8 == 0 and "vocab_size" in options  # and the tile in which the padding begins
    assert text.count("@mosaic_gpu_v2") == without.count("@mosaic_gpu_v2") + 1 + parts
    assert f"x{K}x{H}x" not in text
    assert text.count("stablehlo.sort") == without.count("stablehlo.sort")
    assert num_scatters(text) == num_scatters(without)


def test_a_transposed_weight() -> None:
    """XLA is given the tokens' columns of the weight, whose gather it fuses, a chunk at a time."""
    T, H, V, K = 4096, 4096, 151936, 64
    text, without = (lower(T, H, V, weight_layout="hv", **more) for more in ({"K": K}, {}))
    assert text.count("@mosaic_gpu_v2") == without.count("@mosaic_gpu_v2") + 1  # without that of the coefficients
    assert f"{H}x{_logits.FUSED_BYTES // (K * H * 2)}x{K}x" in text
    assert num_scatters(text) == num_scatters(without)


def num_scatters(text: str) -> int:
    return len(re.findall('"stablehlo.scatter"', text))
