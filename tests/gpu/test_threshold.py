"""``gradient_threshold`` on a Hopper GPU: the interpreted cases and a larger one, and how a backward's memory stays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from benchmarks.programs import KERNELS, use_kernels
from lce_jax import mosaic
from lce_jax.call import _dispatch
from lce_jax.mosaic import _generations
from lce_jax.types import _types
from tests.mosaic.test_mma import LIVE
from tests.mosaic.test_threshold import CASES, check_active_tiles, kernels_of, with_threshold
from tests.mosaic_cases import Case, budget_of, case, make_call

pytestmark = pytest.mark.gpu

LARGER = case("many batches", T=3000, V=5000, H=512, chunk=1, num_rows=2900, stats=True, temperature=True)


WITH_CANDIDATES = dataclasses.replace(
    LARGER,
    name="many batches, candidates, padding",
    num_columns=4900,
    options=_types.Call(stats=True, num_candidates=64),
)  # fmt: skip
OF_WHOLE_ATOMS = dataclasses.replace(WITH_CANDIDATES, V=4992)


@pytest.mark.parametrize("test", [*CASES, LARGER, WITH_CANDIDATES], ids=str)
def test_active_tiles_alone(test: Case) -> None:
    with _generations.using(kernels_of(with_threshold(test))):  # small batches
        check_case(test)


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "wgmma"])
@pytest.mark.parametrize("test", [*LIVE, dataclasses.replace(LARGER, V=4992), OF_WHOLE_ATOMS], ids=str)
def test_kernels_of_other_generations(test: Case, kernels: str) -> None:
    """A Hopper GPU runs mma.sync and cp.async too."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("Hopper alone runs the instructions of all generations")
    generation = KERNELS[kernels]
    few = dataclasses.replace(generation, budget=budget_of(test, generation.budget, generation.tiling))
    with use_kernels(few):
        check_case(test)


def check_case(test: Case) -> None:
    call = dataclasses.replace(make_call(with_threshold(test)), device=_dispatch.current_device())
    if (reason := mosaic.supports(call)) is not None:
        pytest.skip(reason)
    check_active_tiles(with_threshold(test), call)


def test_memory_is_that_of_the_exact_gradients() -> None:
    shapes = (((8192, 4096), "bfloat16"), ((151936, 4096), "bfloat16"), ((8192,), "int32"))
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    plan = lce_jax.explain(*operands)
    if plan.implementation != "mosaic_gpu":
        pytest.skip(str(plan.refused))

    def temporary(threshold: float) -> int:
        def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            out = lce_jax.linear_logprobs(hidden, weight, labels, gradient_threshold=threshold)
            return jnp.sum(out.logprobs - 0.1 * out.entropy)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary(2.0**-12) < 1.02 * temporary(0.0)  # 327 and 324 MiB
