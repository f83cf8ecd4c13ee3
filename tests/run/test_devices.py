"""Which device a call is compiled for, on a machine that does not have it: meshes and shardings name an H200 here.

tests/compiled has what only a compiler for GPUs can show: devices that the lowering alone names, and machine code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import UnsupportedError, explain, linear_cross_entropy, linear_logprobs, linear_loss
from lce_jax.types._jax import abstract_device
from tests.pairs import values_of

T, H, V = 256, 64, 1024
H200, A100, B200 = ("NVIDIA H200", 132), ("NVIDIA A100-SXM4-80GB", 108), ("NVIDIA B200", 148)
GEFORCE = "NVIDIA GeForce RTX 5090", 170


def mesh_of(kind: tuple[str, int], types: AxisType = AxisType.Auto) -> AbstractMesh:
    described = abstract_device("gpu", *kind)
    return AbstractMesh((2, 4), ("data", "tensor"), axis_types=(types,) * 2, abstract_device=described)


def structs(mesh: AbstractMesh | None = None) -> tuple[Any, Any, Any]:
    """Shapes of operands, split over the mesh if there is one."""

    def struct(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, P(*axes)))

    tokens = struct((T,), jnp.int32, "data")
    return struct((T, H), jnp.bfloat16, "data"), struct((V, H), jnp.bfloat16, "tensor"), tokens


def logprobs(*operands: Any, **options: Any) -> Any:
    return linear_logprobs(*operands, **options).logprobs.sum()


def token_loss(*operands: Any, **options: Any) -> Any:
    return linear_loss(lambda logprob, *_: -logprob, *operands, **options)[0]


FUNCTIONS = {"logprobs": logprobs, "cross_entropy": linear_cross_entropy, "loss": token_loss}


def has_kernels(function: Callable[..., Any], *operands: Any) -> bool:
    return "lce_statistics" in str(jax.jit(jax.value_and_grad(function, argnums=(0, 1))).trace(*operands).jaxpr)


@values_of("kind", [H200, A100, B200], slow=[A100])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_name_the_device(name: str, kind: tuple[str, int]) -> None:
    for types in (AxisType.Auto, AxisType.Explicit):
        assert has_kernels(FUNCTIONS[name], *structs(mesh_of(kind, types))) == (kind != B200)


@values_of("kind", [H200, A100, GEFORCE], slow=[A100, GEFORCE])
def test_kernels_are_lowered_for_it(kind: tuple[str, int]) -> None:
    """Copies by cp.async are refused where Mosaic lowers for another GPU."""
    traced = jax.jit(jax.value_and_grad(logprobs, (0, 1))).trace(*structs(mesh_of(kind, AxisType.Explicit)))
    assert "lce_cached_dlogits" in str(traced.jaxpr)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [H200, B200], ids=lambda kind: kind[0])
def test_the_current_mesh_names_it(kind: tuple[str, int]) -> None:
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        for function in FUNCTIONS.values():
            assert has_kernels(function, *structs()) == (kind == H200)


@values_of("kind", [H200, B200], slow=[])
@values_of("name", ["linear_logprobs", "linear_cross_entropy", "linear_loss"], slow=["linear_cross_entropy"])
def test_a_mesh_that_the_caller_names(name: str, kind: tuple[str, int]) -> None:
    sharded = {
        "linear_logprobs": lambda *x, **named: lce_jax.sharded_linear_logprobs(*x, **named).lse.sum(),
        "linear_cross_entropy": lce_jax.sharded_linear_cross_entropy,
        "linear_loss": lambda *x, **named: lce_jax.sharded_linear_loss(lambda lp, *_: -lp, *x, **named)[0],
    }[name]
    named = {"mesh": mesh_of(kind), "batch_axes": "data"}
    assert has_kernels(lambda *x: sharded(*x, **named), *structs()) == (kind == H200)
    if kind == H200:
        assert has_kernels(lambda *x: sharded(*x, implementation="mosaic_gpu", **named), *structs())
    else:
        with pytest.raises(UnsupportedError, match="NVIDIA B200 has another"):
            jax.eval_shape(lambda *x: sharded(*x, implementation="mosaic_gpu", **named), *structs())


def test_shard_map_over_it() -> None:
    specs = P("data"), P("tensor"), P("data")

    def over(kind: tuple[str, int]) -> Callable[..., Any]:
        def own(*operands: Any) -> Any:
            return linear_logprobs(*operands, axis_name="tensor").lse

        mapped = jax.shard_map(own, mesh=mesh_of(kind), in_specs=specs, out_specs=P("data"))
        return lambda *operands: mapped(*operands).sum()

    assert has_kernels(over(H200), *structs())
    assert not has_kernels(over(B200), *structs())


def test_explain_answers_for_it() -> None:
    plan = explain(*structs(mesh_of(H200)))
    assert (plan.implementation, plan.call.device.kind, plan.call.device.core_count) == ("mosaic_gpu", *H200)
    plan = explain(*structs(mesh_of(B200)))
    assert plan.implementation == "xla"
    assert "NVIDIA B200 has another" in plan.refused["mosaic_gpu"]
    assert explain(*structs(), mesh=mesh_of(H200), vocab_axis="tensor").implementation == "mosaic_gpu"
    assert explain(*structs()).implementation == "xla"  # of the CPU of this machine


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_asked_for_by_name_are_refused_when_the_device_is_known(name: str) -> None:
    """When it is traced: the device is that of the mesh, the arrays or JAX's default."""

    def named(*operands: Any) -> Any:
        return FUNCTIONS[name](*operands, implementation="mosaic_gpu")

    operands = [jnp.zeros(x.shape, x.dtype) for x in structs()]
    refused: Any = pytest.raises(UnsupportedError, match="this is cpu")
    step = jax.jit(jax.value_and_grad(named, argnums=(0, 1)))
    for call in (lambda: step.trace(*structs()), lambda: jax.jit(named)(*operands), lambda: named(*operands)):
        with refused:
            call()
    with refused:
        jax.export.export(jax.jit(named), platforms=["cuda"])(*structs())
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh_of(B200)))
        stack.enter_context(pytest.raises(UnsupportedError, match="NVIDIA B200 has another"))
        jax.eval_shape(named, *structs())
