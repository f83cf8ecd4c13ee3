"""What lists of kernels need of JAX: the private names, and no client on the GPU."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from lce_jax import launch_lists
from lce_jax.launch_lists import _compiler


def test_the_launch_convention_is_that_of_this_jax() -> None:
    """From 0.12 on a kernel is launched with itself first and the device last."""
    assert _compiler._takes_device() == (jax.__version_info__ >= (0, 12))


def test_a_private_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`why_not` names it, and nothing raises: the bridge lets JAX run the calls."""
    from jax.experimental.mosaic.gpu import core

    monkeypatch.setattr(_compiler, "_compiler", object)
    assert _compiler.why_not.__wrapped__() is None
    monkeypatch.delattr(core, "_compile_as_torch_gpu_kernel")
    told = "UnservedError: JAX launches Mosaic kernels in another way than it did"
    assert _compiler.why_not.__wrapped__() in (None, told)  # found before it was gone
    _compiler._takes_device.cache_clear()
    assert _compiler.why_not.__wrapped__() == told
    _compiler._takes_device.cache_clear()


def test_a_plugin_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiler, "PLUGINS", ("jax_plugins.none",))
    monkeypatch.setattr(_compiler, "_compiler", _compiler._compiler.__wrapped__)
    told = "UnservedError: none of jax_plugins.none is installed, which hold the compiler of the kernels"
    assert _compiler.why_not.__wrapped__() == told


def test_no_client_of_jax_is_made() -> None:
    code = """
from jax._src import xla_bridge
from lce_jax import launch_lists
from lce_jax.launch_lists import _compiler
device = launch_lists.Device("gpu", "NVIDIA H200", "9.0", 132)
sizes = dict(num_tokens=128, hidden_size=128, num_columns=512, vocab_size=512, start=0)
program = launch_lists.forward(launch_lists.CallKind(**sizes, dtype="bfloat16", device=device), keep_cache=False)
modules = [_compiler.module(launch.kernel, device) for launch in program.launches]
print(len(modules), all(modules), xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["5", "True", "False"], done.stderr


def test_kernels_are_lowered_whatever_the_caller_has_set() -> None:
    device = launch_lists.Device("gpu", "NVIDIA H200", "9.0", 132)
    sizes = dict(num_tokens=128, hidden_size=128, num_columns=512, vocab_size=512, start=0)
    program = launch_lists.forward(launch_lists.CallKind(**sizes, dtype="bfloat16", device=device), keep_cache=False)
    kernels, lower = [launch.kernel for launch in program.launches], _compiler.module.__wrapped__
    want = [len(lower(kernel, device)) for kernel in kernels]  # JAX 0.11.2 names things anew each time
    with jax.disable_jit(), jax.set_mesh(jax.make_mesh((2,), ("x",))):
        assert [len(lower(kernel, device)) for kernel in kernels] == want
