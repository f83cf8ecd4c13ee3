"""`megatron_worker` and its helpers are not collected: their imports belong to the ranks, not to pytest's process."""

from __future__ import annotations

import pytest

import lce_jax
from lce_torch_bridge import linear_logprobs
from tests.torch.gpu_problem import draw

collect_ignore_glob = ["megatron_*.py"]


@pytest.fixture(params=["xla", "mosaic_gpu"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation that serves a bfloat16 call on this GPU."""
    try:
        linear_logprobs(*draw(64, 256, 1024), implementation=request.param)
    except lce_jax.UnsupportedError as error:
        pytest.skip(str(error))
    return request.param
