"""How the implementation with GPU kernels finds the generation of a device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from lce_jax import _dispatch, mosaic
from lce_jax._types import Call, Device, UnsupportedError
from lce_jax.mosaic import _generations, sm90
from lce_jax.mosaic._call import Generation
from tests.devices import B200, H200

A100 = Device("gpu", "NVIDIA A100", "8.0", 108)


def case(device: Device) -> Call:
    return Call(num_tokens=512, hidden_size=1024, columns=32000, dtype=jnp.dtype("bfloat16"), device=device)


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        (H200, sm90.HOPPER),
        (B200, None),
        (H200._replace(compute_capability=""), sm90.HOPPER),  # described, to compile ahead of time
        (A100, None),
        (A100._replace(compute_capability=""), None),
    ],
)
def test_the_device_picks_the_generation(device: Device, generation: Generation | None) -> None:
    assert _generations.serving(device) is generation
    assert (mosaic.supports(case(device)) is None) == (generation is not None)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu"), "9.0 (H100, H200, GH200), this is cpu"),
        (A100, "9.0 (H100, H200, GH200), NVIDIA A100 has 8.0"),
        (Device("gpu", "NVIDIA A100"), r"NVIDIA A100 has another"),
        (H200._replace(core_count=0), r"number of multiprocessors of NVIDIA H200"),
    ],
)
def test_a_refusal_names_every_generation(device: Device, reason: str) -> None:
    assert reason in (mosaic.supports(case(device)) or "")


def test_what_no_generation_serves_has_no_plan() -> None:
    with pytest.raises(UnsupportedError, match=r'"mosaic_gpu": .* NVIDIA A100 has 8\.0'):
        mosaic.plan(case(A100))


def test_another_generation_serves_for_a_while() -> None:
    other = dataclasses.replace(sm90.HOPPER, devices=("H200",))
    with _generations.using(other):
        assert _generations.serving(H200) is other
    assert _generations.serving(H200) is sm90.HOPPER
    with pytest.raises(KeyError), _generations.using(other):
        raise KeyError
    assert _generations.serving(H200) is sm90.HOPPER


def test_the_kernel_language_is_imported_with_the_first_kernel() -> None:
    """The import takes half a second. Neither a program without kernels nor a plan pays it."""
    code = (
        "import sys, jax.numpy as jnp, lce_jax; from lce_jax import mosaic; from tests.mosaic import test_generations;"
        "mosaic.plan(test_generations.case(test_generations.H200));"
        "lce_jax.explain(jnp.ones((8, 64)), jnp.ones((256, 64)), jnp.zeros((8,), int));"
        "print([name for name in sys.modules if name.startswith('jax.experimental.pallas')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_kernels_refuse_a_jax_that_they_were_not_tested_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a JAX the other implementations serve, and the reason is told."""
    monkeypatch.setattr(_generations, "JAX_OF_THE_KERNELS", (99, 1, 0))
    assert mosaic.supports(case(H200)) == f"needs JAX 99.1.0 or newer, this is {jax.__version__}"
    assert _dispatch.explain(case(H200)).implementation == "xla"
    with pytest.raises(UnsupportedError, match=r'"mosaic_gpu": needs JAX 99\.1\.0'):
        _dispatch.choose(dataclasses.replace(case(H200), requested=("mosaic_gpu",)))
