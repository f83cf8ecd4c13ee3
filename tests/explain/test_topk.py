"""What `explain` says of `linear_topk`."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import UnsupportedError, explain, linear_topk


@pytest.mark.usefixtures("hopper")
def test_on_a_hopper_gpu_xla_serves_it() -> None:
    """Lowered for CUDA at a real shape: chunks of 256 tokens, whose logits are the largest float32 array."""
    T, H, V = 4096, 4096, 151936
    call = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((T, H), (V, H))]
    plan = explain(*call, jax.ShapeDtypeStruct((T,), "int32"), k=64)
    assert (plan.implementation, plan.tiles) == ("xla", {"tokens": 256})
    assert plan.forward_bytes == 256 * V * 4
    text = jax.jit(lambda h, w: linear_topk(h, w, 64)).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    sizes = [math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+f32)>", text)]
    assert max(sizes) == 256 * V
    assert "mosaic" not in text
    with pytest.raises(UnsupportedError, match="linear_topk runs no kernel"):
        explain(*call, jax.ShapeDtypeStruct((T,), "int32"), k=64, implementation="mosaic_gpu")


def test_of_a_mesh() -> None:
    call = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 512), (65536, 512))]
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
    labels = jax.ShapeDtypeStruct((4096,), "int32")
    plan = explain(*call, labels, k=9, mesh=mesh, vocab_axis="tensor", batch_axes="data")
    assert (plan.call.num_tokens, plan.call.columns) == (1024, 32768)
    assert "no kernel" in plan.refused["mosaic_gpu"]
    assert "linear_topk is not differentiable: there is no backward" in str(plan)


@pytest.mark.parametrize(("changed", "error", "message"), [
    (dict(k=0), ValueError, r"k must lie in \[1, 512\], got 0"),
    (dict(k=33), ValueError, "k .*vocabulary, 32, got 33"),
    (dict(stats=True), TypeError, "linear_topk has no option stats"),
    (dict(z_loss=1e-4), ValueError, "linear_topk, which is not a loss"),
    (dict(gradients_in_forward=True), ValueError, "linear_topk, which is not a loss"),
])  # fmt: skip
def test_mistakes(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain(jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros(4, int), **{"k": 3, **changed})
