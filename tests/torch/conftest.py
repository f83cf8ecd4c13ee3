"""`megatron_worker` and its helpers are not collected: their imports belong to the ranks, not to pytest's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lce_jax
from lce_torch_bridge import launch_with, linear_logprobs
from tests.torch import executor
from tests.torch.gpu_problem import draw, skip_unless_direct

collect_ignore_glob = ["megatron_*.py"]


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Nothing is run by JAX."""
    with executor.in_float64():
        yield


@pytest.fixture
def direct() -> Iterator[None]:
    """Programs are launched directly, or refused."""
    skip_unless_direct()
    launch_with("direct")
    yield
    launch_with(None)


@pytest.fixture(params=["direct", "jax"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way to launch the kernels."""
    skip_unless_direct()
    launch_with(request.param)
    yield request.param
    launch_with(None)


@pytest.fixture(params=["xla", "mosaic_gpu", "mosaic_gpu direct"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation that serves a bfloat16 call on this GPU; the kernels run by JAX, and launched directly."""
    name, *direct = request.param.split()
    launch_with("direct" if direct else "jax")
    try:
        linear_logprobs(*draw(64, 256, 1024), implementation=name)
        yield name
    except lce_jax.UnsupportedError as error:
        pytest.skip(str(error))
    finally:
        launch_with(None)
