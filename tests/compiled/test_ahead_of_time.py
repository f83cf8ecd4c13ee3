"""Programs for devices that this machine does not have get the kernels, however the devices are named."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import UnsupportedError, explain, linear_cross_entropy, linear_logprobs, linear_loss
from lce_jax.explain._compile_targets import TARGETS
from tests.compiled import needs_wheels
from tests.doc_blocks import ROOT, parts

pytestmark = needs_wheels
T, H, V = 1024, 256, 4096


def logprobs(*operands: Any, **options: Any) -> Any:
    out = linear_logprobs(*operands, **options)
    return out.logprobs.sum() + out.entropy.sum()


def token_loss(*operands: Any, **options: Any) -> Any:
    return linear_loss(lambda logprob, *_: -logprob, *operands, **options)[0]


FUNCTIONS = {"logprobs": logprobs, "cross_entropy": linear_cross_entropy, "loss": token_loss}
SPECS = P("data"), P("tensor"), P("data")


def structs(shardings: Any = (None, None, None)) -> list[Any]:
    shapes = ((T, H), jnp.bfloat16), ((V, H), jnp.bfloat16), ((T,), jnp.int32)
    return [jax.ShapeDtypeStruct(*x, sharding=how) for x, how in zip(shapes, shardings, strict=True)]


def split(mesh: Mesh) -> list[NamedSharding]:
    return [NamedSharding(mesh, spec) for spec in SPECS]


def compiled(function: Callable[..., Any], operands: list[Any], **options: Any) -> str:
    step = jax.jit(jax.value_and_grad(function, argnums=(0, 1)), **options)
    return step.lower(*operands).compile().as_text()


def explicit(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)


def one_device(mesh: Mesh) -> list[Any]:
    return structs([SingleDeviceSharding(mesh.devices.flat[0])] * 3)


def in_context(function: Any, mesh: Mesh) -> str:
    with jax.set_mesh(mesh):
        return compiled(function, structs(), in_shardings=split(mesh))


def in_shard_map(function: Any, mesh: Mesh) -> str:
    def own(*operands: Any) -> Any:
        return jax.lax.psum(function(*operands, axis_name="tensor"), "data")

    mapped = jax.shard_map(own, mesh=mesh, in_specs=SPECS, out_specs=P())
    return compiled(mapped, structs(), in_shardings=split(mesh))


WAYS: dict[str, Callable[[Any, Mesh], str]] = {
    "types of Auto axes": lambda f, mesh: compiled(f, structs(split(mesh))),
    "types of Explicit axes": lambda f, mesh: compiled(f, structs(split(explicit(mesh)))),
    "set_mesh": in_context,
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_h200_gets_kernels(name: str, way: str) -> None:
    mesh = TARGETS["h200"].mesh(2, 4)
    for options in ({}, {"implementation": "mosaic_gpu"}):
        text = WAYS[way](functools.partial(FUNCTIONS[name], **options), mesh)
        assert "mosaic_gpu" in text


@pytest.mark.parametrize("name", ["linear_logprobs", "linear_cross_entropy", "linear_loss"])
def test_sharded(name: str) -> None:
    mesh = TARGETS["h200"].mesh(2, 4)
    named = {"mesh": mesh, "batch_axes": "data"}
    step = {
        "linear_logprobs": lambda *x: lce_jax.sharded_linear_logprobs(*x, **named).lse.sum(),
        "linear_cross_entropy": lambda *x: lce_jax.sharded_linear_cross_entropy(*x, **named),
        "linear_loss": lambda *x: lce_jax.sharded_linear_loss(lambda lp, *_: -lp, *x, **named)[0],
    }[name]
    assert "mosaic_gpu" in compiled(step, structs(), in_shardings=split(mesh))


OTHERS = pytest.mark.parametrize("way", ["set_mesh", "types of Auto axes"])


@pytest.mark.parametrize("target", ["a100", "b200"])
@OTHERS
def test_other_devices(way: str, target: str) -> None:
    mesh = TARGETS[target].mesh(2, 4)
    has_kernels = target != "b200"
    assert ("mosaic_gpu" in WAYS[way](logprobs, mesh)) == has_kernels
    plan = explain(*structs(split(mesh)))
    assert plan.implementation == ("mosaic_gpu" if has_kernels else "xla")
    assert has_kernels or "NVIDIA B200" in plan.refused["mosaic_gpu"]


@OTHERS
def test_a_device_without_kernels_is_refused_by_name(way: str) -> None:
    target = TARGETS["b200"]
    with pytest.raises(UnsupportedError, match=f"{target.kind} has"):
        WAYS[way](lambda *x: logprobs(*x, implementation="mosaic_gpu"), target.mesh(2, 4))


def test_a_device_that_only_the_lowering_names_is_refused() -> None:
    """Tracing chose for this machine's CPU. Under the mesh that the message names, the device has its kernels."""
    mesh = TARGETS["h200"].mesh(1, 1)
    step = jax.jit(jax.value_and_grad(functools.partial(logprobs, cache_bytes=1 << 40), argnums=(0, 1)))
    with pytest.raises(
        UnsupportedError, match=r'traced for cpu, .* lowered for NVIDIA H200, where "mosaic_gpu" serves'
    ):
        step.lower(*one_device(mesh))
    with jax.set_mesh(Mesh([mesh.devices.flat[0]], ("device",))):  # as the message advises
        assert "mosaic_gpu" in step.lower(*one_device(mesh)).compile().as_text()
    plain = jax.jit(functools.partial(logprobs, implementation="xla"))
    assert "mosaic_gpu" not in plain.lower(*one_device(mesh)).as_text()


def test_no_program_copies_the_cache() -> None:
    """Recomputed dlogits overwrite it after the products have read it."""
    mesh = TARGETS["h200"].mesh(1, 1)
    with jax.set_mesh(Mesh([mesh.devices.flat[0]], ("device",))):
        step = jax.jit(jax.value_and_grad(functools.partial(logprobs, cache_bytes=6 << 20), argnums=(0, 1)))
        text = step.lower(*one_device(mesh)).compile().as_text()
    assert text.count("mosaic_gpu") > 8
    assert not re.search(r" = bf16\S* copy\(", text)


def test_the_page_compiles_for_a_pod(capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, Any] = {}
    for block in parts(ROOT / "docs" / "ahead-of-time.md"):
        if block.language == "python":
            exec(block.code, page)
    text = page["compile_for_a_pod"](TARGETS["h200"].config).as_text()
    assert "mosaic_gpu" in text
    assert "mosaic_gpu: 4,096 tokens, hidden size 4,096, 18,992 vocabulary columns" in capsys.readouterr().out


def test_explain_reads_shardings() -> None:
    mesh = TARGETS["h200"].mesh(2, 4)
    for operands in (one_device(mesh), structs(split(mesh)), structs(split(explicit(mesh)))):
        plan = explain(*operands)
        assert (plan.implementation, plan.call.device.kind) == ("mosaic_gpu", "NVIDIA H200")
    assert np.prod(plan.call.num_tokens) == T // 2
