"""What the kernels become for GPUs, compiled here (`make test-compile`), and what whole programs hold there."""

from __future__ import annotations

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import explain, linear_logprobs
from lce_jax.explain._targets import TARGETS
from tests.compiled import machine_code, needs_wheels
from tests.compiled.machine_code import DEVICES, table_of

pytestmark = [
    needs_wheels,
    pytest.mark.skipif(not table_of("h200").exists(), reason=f"there is no {table_of('h200').name}"),
]


@pytest.mark.parametrize("target", DEVICES)
def test_registers_and_spills_are_those_of_the_table(target: str) -> None:
    """A change of a kernel is a change of the table: python -m tests.compiled.machine_code prints it anew."""
    committed, found = table_of(target).read_text(), machine_code.table(target, machine_code.entries(target))
    changes = difflib.unified_diff(committed.splitlines(), found.splitlines(), "committed", "now", lineterm="", n=0)
    assert found == committed, "\n".join(changes)


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4096, 4096, 151936), {}),
        ((4096, 4096, 151936), {"cache_bytes": 1 << 40}),
        ((8192, 2880, 201088), {"temperature": 0.7, "logit_softcap": 30.0, "stats": True}),
    ],
    ids=str,
)
def test_a_program_holds_no_more_than_its_plan_says(
    shape: tuple[int, int, int], options: dict[str, Any], target: str
) -> None:
    """Temporary memory as XLA has planned it for the GPU, gradients aside. The logits would take several times that."""
    T, H, V = shape
    options = {"implementation": "mosaic_gpu", **options}
    mesh = TARGETS[target].mesh(1, 1)

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    def objective(hidden: Any, weight: Any, labels: Any) -> Any:
        out = linear_logprobs(hidden, weight, labels, **options)
        return out.logprobs.sum() + out.entropy.sum()

    given = struct((T, H), jnp.bfloat16), struct((V, H), jnp.bfloat16), struct((T,), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(*given)
    memory, plan = lowered.compile().memory_analysis(), explain(*given, **options)
    planned = plan.kept_bytes + max(plan.forward_bytes, plan.backward_bytes)
    assert 0.5 * planned < memory.temp_size_in_bytes < 1.05 * planned
    assert memory.temp_size_in_bytes < 0.6 * T * V * 4
