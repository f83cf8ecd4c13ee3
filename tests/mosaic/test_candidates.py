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
    "transposed": (4096, 151936, 64, {"weight_layout": "hv"}),
}
SOME = {"everything"}


@pytest.mark.slow
@pytest.mark.parametrize("cache_bytes", [0, pytest.param(1 << 28, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOME else pytest.mark.slow) for x in CALLS])
def test_candidates(name: str, cache_bytes: int) -> None:
    """XLA gathers rows of the weight for some tokens at a time, sorts once, and scatters once into each chunk.

    One kernel less, that of the coefficients.
    """
    H, V, K, options = CALLS[name]
    text, without = (lower(4096, H, V, cache_bytes=cache_bytes, **options, **more) for more in ({"K": K}, {}))
    parts = 2 if cache_bytes else 1  # what is cached, and what is not
    parts += V % 8 == 0 and "vocab_size" in options  # and the tile in which the padding begins
    assert text.count("@mosaic_gpu_v2") == without.count("@mosaic_gpu_v2") - 1
    size = min(_logits.FUSED_BYTES // (K * H * 2), 4096)
    assert (f"{H}x{size}x{K}x" if "weight_layout" in options else f"{size}x{K}x{H}x") in text
    assert text.count("stablehlo.sort") == without.count("stablehlo.sort") + 1
    assert num_scatters(text) == num_scatters(without) + parts


def num_scatters(text: str) -> int:
    return len(re.findall('"stablehlo.scatter"', text))
