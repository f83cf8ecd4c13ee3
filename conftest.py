"""Before JAX is imported: eight CPU devices for meshes, unless the run is for GPUs (``make test-gpu``)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying why."""
    import jax

    count = sum(device.platform == "gpu" for device in jax.devices())
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and count < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), JAX sees {count}: make test-gpu"))
