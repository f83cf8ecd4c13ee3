"""Candidates beside the Hopper kernels, lowered for CUDA at real shapes: no GPU is needed."""

from __future__ import annotations

import re

import pytest

from lce_jax import _chosen
from tests.pairs import pairs_of
from tests.test_mosaic_lowering import EVERYTHING, lower

pytestmark = pytest.mark.usefixtures("hopper")


CALLS = {
    "whole": (151936, 64, {}),
    "no whole atom": (50257, 8, {}),
    "everything": (151936, 512, {**EVERYTHING, "vocab_size": 151669}),
}


@pairs_of(1, name=[*CALLS], cache_bytes=[0, 1 << 40, 1 << 29])
def test_candidates(name: str, cache_bytes: int) -> None:
    """One kernel less, that of the coefficients.

    XLA is given the tokens' rows of the weight, whose gather it fuses, a chunk at a time.
    """
    T, H = 4096, 4096
    V, K, options = CALLS[name]
    text, without = (lower(T, H, V, cache_bytes=cache_bytes, **options, **more) for more in ({"K": K}, {}))
    assert text.count("@mosaic_gpu_v2") == without.count("@mosaic_gpu_v2") - 1
    assert f"x{K}x{H}x" in text
    assert (f"{T}x{K}x{H}x" in text) == (T * K * H * 2 <= _chosen.FUSED_BYTES)
    assert num_scatters(text, unique=True) > num_scatters(without, unique=True)
    assert num_scatters(text, unique=False) == num_scatters(without, unique=False)


def num_scatters(text: str, unique: bool) -> int:
    """Those whose places are said to be unique: only these are deterministic where they add."""
    return len(re.findall(rf'"stablehlo.scatter".*unique_indices = {str(unique).lower()}', text))
