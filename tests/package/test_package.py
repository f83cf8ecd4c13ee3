"""The package as installed: light to import, honest about its version, clean at exit."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

import lce_jax
import lce_torch_bridge
from lce_jax import floors, losses, rows

OF_TORCH = (lce_torch_bridge, lce_torch_bridge.losses, lce_torch_bridge.rows)


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_version() -> None:
    assert importlib.metadata.version("lce-jax") == lce_jax.__version__


def test_every_public_name_is_documented() -> None:
    for module in (lce_jax, lce_torch_bridge):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


@pytest.mark.parametrize("module", [lce_jax, floors, losses, rows, *OF_TORCH])
def test_completion_offers_public_names(module: Any) -> None:
    """And nothing that would have to be imported for it, such as Megatron."""
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)


def test_import_brings_nothing_but_jax_and_numpy() -> None:
    heavy = ("flax", "optax", "torch", "rich", "matplotlib", "tokenizers")
    done = run(f"import sys, lce_jax; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_import_starts_no_device() -> None:
    """A program may still choose its platform and its device count after importing."""
    done = run(
        "import jax, lce_jax; jax.config.update('jax_platforms', 'cpu');"
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())",
        "-W", "error",
    )  # fmt: skip
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.fast("True")
@pytest.mark.parametrize("fails", [False, True])
def test_exit_codes(fails: bool) -> None:
    labels = "jnp.zeros((5,), int)" if fails else "jnp.zeros((4,), int)"
    done = run(
        "import jax, jax.numpy as jnp; from lce_jax import linear_cross_entropy as f;"
        f"print(jax.grad(f)(jnp.ones((4, 8)), jnp.ones((16, 8)), {labels}).shape)"
    )
    assert done.returncode == (1 if fails else 0)
    assert ("must have hidden's leading shape" in done.stderr) == fails
