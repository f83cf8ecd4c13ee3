"""Compilers of direct launches: NVRTC, Mosaic's as far as a CPU goes, and the private names of JAX that they need."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys

import jax
import pytest

from lce_jax import launch
from lce_jax.launch import _cuda, _jax
from tests.devices import H200
from tests.test_launch import operands, whole_call


@pytest.fixture
def nvrtc() -> None:
    """It needs no GPU; PyTorch's packages bring it."""
    try:
        _cuda.compiler()
    except launch.UnservedError as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("nvrtc")
def test_compiled_code_is_kept_where_jax_keeps_its_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, source = jax.config.jax_compilation_cache_dir, 'extern "C" __global__ void f() {}'
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "kept"))
    try:
        code = _cuda.compiled(source, "sm_90")
        (path,) = (tmp_path / "kept").iterdir()
        assert path.read_bytes() == code
        with monkeypatch.context() as patch:
            patch.setattr(_cuda, "_compiled", lambda _, architecture: architecture.encode())
            assert _cuda.compiled(source, "sm_90") == code
            assert _cuda.compiled(source, "sm_90a") == b"sm_90a"
            assert _cuda.compiled(source + " ", "sm_90") == b"sm_90"
            jax.config.update("jax_compilation_cache_dir", None)
            assert _cuda.compiled(source, "sm_90") == b"sm_90"
        jax.config.update("jax_compilation_cache_dir", "gs://bucket")
        assert _cuda.compiled(source, "sm_90") == code
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("nvrtc")
def test_generated_code_compiles_for_the_gpu() -> None:
    program = launch.program(functools.partial(whole_call, "mosaic_gpu", 990), operands(), H200)
    assert _cuda.compiled(program.source, "sm_90").startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"identifier .nonsense. is undefined"):
        _cuda.compiled("DEVICE int f() { return nonsense; }", "sm_90")


def test_the_launch_convention_is_that_of_this_jax() -> None:
    """From 0.12 on a kernel is launched with itself first and the device last."""
    assert _jax._takes_device() == (jax.__version_info__ >= (0, 12))


def test_a_private_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`why_not` names it, and nothing raises: the bridge lets JAX run the programs."""
    monkeypatch.delattr(_jax.mosaic().dialect, "register_inliner_extensions")
    assert "register_inliner_extensions" in (_jax.why_not.__wrapped__() or "")
    code = """
import sys, jax, torch, lce_jax
del sys.modules["jax._src.lib"].mlir
sys.modules["jax._src.lib.mlir"] = None
import lce_torch_bridge
from lce_jax import launch
from lce_torch_bridge import _direct
_direct.device_of = lambda _: launch.Device("gpu", "NVIDIA H200", "9.0", 132)
print(_direct.why_not(torch.device("cuda")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "UnservedError: jax._src.lib.mlir, MLIR for Python, is not where it was", done.stderr


def test_no_client_of_jax_is_made() -> None:
    code = """
import jax, jax.numpy as jnp
from jax._src import xla_bridge
from lce_jax import launch, local
S = jax.ShapeDtypeStruct
shapes = S((256, 128), jnp.bfloat16), S((512, 128), jnp.bfloat16), S((256,), jnp.int32)
run = lambda *x: local.statistics(*x)[0].max
program = launch.program(run, shapes, launch.Device("gpu", "NVIDIA H200", "9.0", 132))
print(program.num_kernels, xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["3", "False"], done.stderr
