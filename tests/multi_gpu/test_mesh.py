"""Meshes of real GPUs equal one GPU, for results and all gradients; shards agree to the last bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle

pytestmark = pytest.mark.multi_gpu

B, S, H, V = 4, 256, 512, 8192
CALLS = [
    cases.case("float32", leading=(B, S), H=H, V=V, vocab_size=V - 100, labels="foreign", precision="highest"),
    cases.case("bfloat16", leading=(B, S), H=H, V=V, dtype="bfloat16", labels="foreign"),
    cases.case(
        "everything", leading=(B, S), H=H, V=V, dtype="bfloat16", vocab_size=V // 2 - 5, labels="foreign",
        where="nan", temperature="token", logit_softcap=4.0, logit_scale=1.3, stats=True,
    ),
]  # fmt: skip


def meshes() -> dict[str, tuple[tuple[int, ...], dict[str, str]]]:
    count = len(jax.devices())
    layouts = {
        "tensor": ((1, count), {}),
        "tensor, sequence over it": ((1, count), {"sequence_axis": "tensor"}),
        "data": ((count, 1), {"batch_axes": "data"}),
    }
    if count % 2 == 0 and count > 2:
        layouts["data and tensor"] = ((count // 2, 2), {"batch_axes": "data", "sequence_axis": "tensor"})
    return layouts


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("layout", ["tensor", "tensor, sequence over it", "data", "data and tensor"])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("test", CALLS, ids=str)
def test_mesh_equals_one_gpu(test: cases.TestCase, implementation: str, layout: str, axis_type: AxisType) -> None:
    if layout not in meshes():
        pytest.skip(f"needs four GPUs or more, there are {len(jax.devices())}")
    if implementation == "mosaic_gpu" and test.dtype == "float32":
        pytest.skip("the kernels take bfloat16 and float16")
    shape, axes = meshes()[layout]
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(axis_type,) * 2)
    hidden, weight, labels, options, seeds = cases.draw(test)
    options["implementation"] = implementation

    def objective(hidden, weight):
        out = linear_logprobs(hidden, weight, labels, **options)
        return cases.objective(out, seeds), out

    def sharded(hidden, weight, labels):
        out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, **axes, **options)
        return cases.objective(out, seeds), out

    (_, want), wanted = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(hidden, weight)
    with jax.set_mesh(mesh):
        weight = jax.device_put(weight, NamedSharding(mesh, P("tensor")))
        value_and_grad = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1), has_aux=True))
        (_, out), grads = value_and_grad(hidden, weight, labels)
    for got, true in zip(out, want, strict=True):
        assert got is None or oracle.value_error(got, true) < 1e-5
    bound = 1e-5 if test.dtype == "float32" else 4e-3  # bfloat16: partial sums round anew
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < bound


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_shards_agree_bitwise(implementation: str, check_vma: bool) -> None:
    hidden, weight, labels, *_ = cases.draw(CALLS[1])
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))

    def body(hidden, weight, labels):
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor", implementation=implementation)
        if check_vma:
            out = jax.tree.map(lambda x: lax.pcast(x, ("tensor",), to="varying"), out)
        return jax.tree.map(lambda x: x[None], out)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P("tensor"), check_vma=check_vma
    )
    for field in jax.tree.leaves(jax.jit(mapped)(hidden, weight, labels)):
        copies = np.asarray(field)
        assert all(np.array_equal(copies[0], copy) for copy in copies)
        assert jnp.all(jnp.isfinite(field))
