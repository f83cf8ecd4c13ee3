"""A program is lowered for the devices that it was traced for, or refused. The GPU here is only claimed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import UnsupportedError, linear_logprobs, linear_topk
from tests import oracle
from tests.draws import Draws

DRAWS = Draws()
HIDDEN = DRAWS.normal(64, 128).astype(jnp.bfloat16)
WEIGHT = DRAWS.normal(1000, 128).astype(jnp.bfloat16)
LABELS = jnp.arange(64)


def gradient(**options: Any) -> Any:
    def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        out = linear_logprobs(hidden, weight, LABELS, **options)
        return jnp.sum(out.logprobs + out.entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def kernels(traced: Any, *platforms: str) -> int:
    text = traced.lower(lowering_platforms=platforms).as_text()
    return len(re.findall(r"@mosaic_gpu", text))


@pytest.mark.fast("implementation")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("options", [{}, {"cache_bytes": 1 << 20, "implementation": "mosaic_gpu"}], ids=str)
def test_a_program_for_another_platform_is_refused(options: dict[str, Any]) -> None:
    traced = gradient(**options).trace(HIDDEN, WEIGHT)
    assert kernels(traced, "cuda") > 0
    refused: Any = pytest.raises(
        UnsupportedError,
        match=r"linear_logprobs was traced for NVIDIA H200, .* lowered for cpu.* jax\.set_mesh\(mesh\)",
    )
    for platforms in (("cpu",), ("cpu", "cuda")):
        with refused:
            kernels(traced, *platforms)
    with refused:
        gradient(**options)(HIDDEN, WEIGHT)  # lowered for this machine's CPU


@pytest.mark.usefixtures("hopper")
def test_as_the_message_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    want, wanted = gradient(implementation="xla")(HIDDEN, WEIGHT)
    assert kernels(gradient(implementation="xla").trace(HIDDEN, WEIGHT), "cpu", "cuda") == 0
    monkeypatch.undo()  # the mesh below is of this machine's CPU
    with jax.set_mesh(jax.sharding.Mesh([jax.devices()[0]], ("device",))):
        value, grads = gradient()(HIDDEN, WEIGHT)
    assert oracle.value_error(value, want) < 1e-6
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 4e-3  # bfloat16


def test_a_program_of_a_cpu_is_refused_on_a_gpu_that_has_kernels() -> None:
    """A GPU that is not here may have them. What has no kernels anywhere may be lowered for any."""
    with pytest.raises(UnsupportedError, match=r"traced for cpu, .* lowered for cuda, a device that is unknown here"):
        kernels(gradient().trace(HIDDEN, WEIGHT), "cuda")
    assert kernels(gradient(implementation="xla").trace(HIDDEN, WEIGHT), "cuda") == 0
    top = jax.jit(lambda hidden, weight: linear_topk(hidden, weight, 3))
    assert kernels(top.trace(HIDDEN, WEIGHT), "cuda") == 0


def test_a_cache_on_several_devices_needs_a_mesh() -> None:
    """What a device keeps is no global array, so a call that keeps tiles knows its mesh when it is traced."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))

    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(linear_logprobs(hidden, weight, labels, cache_bytes=1 << 20).logprobs)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (HIDDEN, WEIGHT, LABELS)]
    step = jax.jit(jax.grad(loss), in_shardings=(split, None, split))
    with pytest.raises(
        UnsupportedError, match=r"lowered for 2 devices, but tracing saw no mesh.* jax\.set_mesh\(mesh\)"
    ):
        step.lower(*shapes)
    with jax.set_mesh(devices):
        step.lower(*shapes)
