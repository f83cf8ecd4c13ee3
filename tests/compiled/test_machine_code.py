"""What the kernels become for GPUs, compiled here (`make test-compile`), and what whole programs hold there."""

from __future__ import annotations

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lce_jax import explain
from lce_jax.explain._compile_targets import TARGETS
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
def test_a_program_holds_what_its_plan_says(shape: tuple[int, int, int], options: dict[str, Any], target: str) -> None:
    """Temporary memory as XLA has allotted it for the GPU. The logits would take several times that."""
    T, H, V = shape
    mesh = TARGETS[target].mesh(1, 1)

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    given = struct((T, H), jnp.bfloat16), struct((V, H), jnp.bfloat16), struct((T,), jnp.int32)
    plan = explain(*given, implementation="mosaic_gpu", **options, compile=True)
    assert plan.compiled is not None
    assert abs(plan.compiled.forward - plan.forward_bytes) <= 256 * T  # which keeps nothing
    # Until a gradient is written, what its pass reads may lie in its memory: a cache's maxima, and the statistics.
    assert 0.95 * plan.most_bytes <= plan.compiled.backward <= plan.most_bytes + 256 * T
    assert plan.compiled.backward < 0.6 * T * V * 4
