"""What is traced on a machine with a Hopper GPU may be lowered for another platform. The GPU here is only claimed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import UnsupportedError, linear_logprobs, local
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


def kernels(step: Any, *platforms: str) -> int:
    text = step.trace(HIDDEN, WEIGHT).lower(lowering_platforms=platforms).as_text()
    return len(re.findall(r"@mosaic_gpu", text))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("options", [{"cache_bytes": 1 << 20}, {"implementation": ("mosaic_gpu", "xla")}], ids=str)
def test_a_program_for_the_cpu(options: dict[str, Any]) -> None:
    want, wanted = gradient(implementation="xla")(HIDDEN, WEIGHT)
    step = gradient(**options)
    value, grads = step(HIDDEN, WEIGHT)  # lowered for this machine's CPU
    assert oracle.value_error(value, want) < 1e-6
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 4e-3  # bfloat16
    assert kernels(step, "cpu") == 0
    assert kernels(step, "cpu", "cuda") == kernels(step, "cuda") > 0


@pytest.mark.usefixtures("hopper")
def test_kernels_asked_for_by_name_are_refused_elsewhere() -> None:
    step = gradient(implementation="mosaic_gpu")
    assert kernels(step, "cuda") > 0
    with pytest.raises(UnsupportedError, match="the program is lowered for cpu: leave implementation out"):
        step(HIDDEN, WEIGHT)


@pytest.mark.usefixtures("hopper")
def test_vmap_and_local() -> None:
    many = jax.vmap(lambda hidden, labels: linear_logprobs(hidden, WEIGHT, labels).logprobs)
    got = jax.jit(many)(HIDDEN.reshape(4, 16, 128), LABELS.reshape(4, 16)).reshape(-1)
    want = linear_logprobs(HIDDEN, WEIGHT, LABELS, implementation="xla").logprobs
    assert oracle.value_error(got, want) < 1e-6
    each = jax.jit(jax.vmap(lambda hidden, labels: local.statistics(hidden, WEIGHT, labels)[0].sumexp))
    got = each(HIDDEN.reshape(4, 16, 128), LABELS.reshape(4, 16)).reshape(-1)
    assert oracle.value_error(got, local.statistics(HIDDEN, WEIGHT, LABELS, implementation="xla")[0].sumexp) < 1e-6
