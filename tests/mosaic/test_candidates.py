"""Candidates beside the Hopper kernels, lowered for CUDA at real shapes: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.mosaic.test_lowering import EVERYTHING, lower

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hopper")]


CALLS = {
    "whole": (4096, 151936, 64, {}),
    "no whole atom": (4096, 50257, 32, {}),
    "everything": (4096, 151936, 512, {**EVERYTHING, "vocab_size": 151669}),
    "no whole piece of H": (2880, 201088, 1, {"vocab_size": 200019}),
    "transposed": (4096, 151936, 64, {"weight_layout": "hv"}),
}


@pytest.mark.parametrize("cache_bytes", [0, 1 << 28])
@pytest.mark.parametrize("name", CALLS)
def test_candidates(name: str, cache_bytes: int) -> None:
    """Rows of the weight are gathered for some tokens at a time: those of all are in no array."""
    H, V, K, options = CALLS[name]
    text = lower(4096, H, V, cache_bytes=cache_bytes, K=K, **options)
    of_all = f"{H}x4096x{K}x" if "weight_layout" in options else f"4096x{K}x{H}x"
    assert K == 1 or of_all not in text
