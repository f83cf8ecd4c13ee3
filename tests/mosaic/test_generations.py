"""How the implementation with GPU kernels finds the generation of a device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from lce_jax import mosaic
from lce_jax.call import _dispatch
from lce_jax.mosaic import _generations, mma, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.types._types import Call, Device, UnsupportedError
from tests.devices import A100, B200, H200

DESCRIBED = {
    **dict.fromkeys(("H100 80GB HBM3", "GH200 480GB", "H20"), sm90.HOPPER),
    **dict.fromkeys(("A100-SXM4-80GB", "A30", "A800 40GB Active"), mma.SM80),
    **dict.fromkeys(("A10", "A10G", "L4", "L40", "L40S", "RTX A6000", "GeForce RTX 3090 Ti"), mma.SM89),
    **dict.fromkeys(("RTX 6000 Ada Generation", "RTX 4000 SFF Ada Generation", "GeForce RTX 4090"), mma.SM89),
    **dict.fromkeys(("GeForce RTX 4080 SUPER", "GeForce RTX 3060", "RTX A3000", "A2", "A16", "L20"), mma.SM89),
    **dict.fromkeys(("GeForce RTX 5090", "RTX PRO 6000 Blackwell Workstation Edition", "RTX 5060 Ti"), mma.SM120),
    **dict.fromkeys(("A1000", "Quadro RTX 6000", "Quadro RTX 4000", "T4", "GB200", "Tesla V100-SXM2-32GB"), None),
}


def make_call(device: Device) -> Call:
    return Call(num_tokens=512, hidden_size=1024, columns=32000, dtype=jnp.dtype("bfloat16"), device=device)


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        (H200, sm90.HOPPER),
        (B200, None),
        (H200._replace(compute_capability=""), sm90.HOPPER),  # described, to compile ahead of time
        (B200._replace(compute_capability=""), None),
        (A100, mma.SM80),
        (Device("gpu", "NVIDIA A10", "8.6", 72), mma.SM89),
        (Device("gpu", "another Ada", "8.9", 72), mma.SM89),
        *[(Device("gpu", f"NVIDIA {kind}", "", 72), generation) for kind, generation in DESCRIBED.items()],
    ],
)
def test_the_device_picks_the_generation(device: Device, generation: Generation | None) -> None:
    assert _generations.serving(device) is generation
    assert (mosaic.supports(make_call(device)) is None) == (generation is not None)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu"), "this is cpu"),
        (B200, "NVIDIA B200 has 10.0"),
        (Device("gpu", "NVIDIA B200"), "NVIDIA B200 has another"),
        (H200._replace(core_count=0), "number of multiprocessors of NVIDIA H200"),
    ],
)
def test_a_refusal_names_the_device_and_every_generation(device: Device, reason: str) -> None:
    said = mosaic.supports(make_call(device)) or ""
    assert reason in said
    assert device.core_count == 0 < len(device.kind) or all(x in said for x in ("8.0", "8.6", "8.9", "9.0", "12.0"))


def test_the_kernel_language_is_imported_with_the_first_kernel() -> None:
    """The import takes half a second. Neither a program without kernels nor a plan pays it."""
    code = (
        "import sys, jax.numpy as jnp, lce_jax; from lce_jax import mosaic; from tests.mosaic import test_generations;"
        "mosaic.plan(test_generations.make_call(test_generations.H200));"
        "lce_jax.explain(jnp.ones((8, 64)), jnp.ones((256, 64)), jnp.zeros((8,), int));"
        "print([name for name in sys.modules if name.startswith('jax.experimental.pallas')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_kernels_refuse_a_jax_that_they_were_not_tested_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a JAX the other implementations serve, and the reason is told."""
    monkeypatch.setattr(_generations, "JAX_OF_THE_KERNELS", (99, 1, 0))
    assert mosaic.supports(make_call(H200)) == f"needs JAX 99.1.0 or newer, this is {jax.__version__}"
    assert _dispatch.explain(make_call(H200)).implementation == "xla"
    with pytest.raises(UnsupportedError, match=r'"mosaic_gpu": needs JAX 99\.1\.0'):
        _dispatch.choose(dataclasses.replace(make_call(H200), requested=("mosaic_gpu",)))
