"""A call of the Hopper kernels under vmap, lowered for CUDA: no GPU is needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import _dispatch
from tests.test_mosaic_lowering import H200


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "current_device", lambda _=None: H200)


def test_vmap() -> None:
    def objective(hidden, weight, labels):
        out = lce_jax.linear_logprobs(hidden, weight, labels, cache_bytes=1 << 18, implementation="mosaic_gpu")
        return jnp.sum(out.logprobs + out.entropy)

    step = jax.vmap(jax.grad(objective, argnums=(0, 1)), in_axes=(0, None, 0))
    shapes = ((3, 256, 128), "bfloat16"), ((1024, 128), "bfloat16"), ((3, 256), "int32")
    jax.jit(step).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
