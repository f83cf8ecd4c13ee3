"""What the compiler says: no array of T × V, and temporary memory far below the logits."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests.pairs import combined

T, H, V = 4096, 512, 65536
SHAPE = re.compile(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]")


def largest_array(compiled: jax.stages.Compiled) -> int:
    """Elements of the largest array in the compiled program, inside fusions and loops too."""
    return max(math.prod(map(int, dims.split(","))) for dims in SHAPE.findall(compiled.as_text()))


def call(hidden, weight, labels, where=None, **options):
    out = linear_logprobs(hidden, weight, labels, where=where, implementation="xla", **options)
    return jnp.sum(out.logprobs + 0.1 * out.entropy)


def structs(T: int = T, dtype: str = "float32"):
    hidden, weight = jax.ShapeDtypeStruct((T, H), dtype), jax.ShapeDtypeStruct((V, H), dtype)
    return hidden, weight, jax.ShapeDtypeStruct((T,), jnp.int32)


PASSES = {"forward": call, "value_and_grad": jax.value_and_grad(call, argnums=(0, 1))}


@combined(name=["value_and_grad", "forward"], dtype=["float32", "bfloat16"])
def test_temporary_memory_under_an_eighth_of_the_logits(name: str, dtype: str) -> None:
    args = structs(dtype=dtype)
    compiled = jax.jit(PASSES[name]).lower(*args).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < T * V * 4 / 8
    assert largest_array(compiled) < T * V


@pytest.mark.fast("value_and_grad")
@pytest.mark.parametrize("name", PASSES)
def test_with_rows_left_out(name: str) -> None:
    compiled = jax.jit(PASSES[name]).lower(*structs(), jax.ShapeDtypeStruct((T,), bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * V * 4 / 8
    assert largest_array(compiled) < T * V


def test_the_search_finds_logits_where_they_are_stored() -> None:
    """The control: the materialised path does hold T × V."""

    def materialised(hidden, weight, labels):
        return jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T), labels[:, None], axis=1).sum()

    compiled = jax.jit(materialised).lower(*structs()).compile()
    assert largest_array(compiled) >= T * V
    assert compiled.memory_analysis().temp_size_in_bytes >= T * V * 4


@pytest.mark.fast("tensor")
@pytest.mark.parametrize("sequence_axis", [None, "tensor"])
def test_no_shard_holds_its_logits(sequence_axis: str | None) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("data", sequence_axis), P("tensor"), P("data"))
    hidden, weight, labels = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(
            [(4, T, H), (V, H), (4, T)], [jnp.float32, jnp.float32, jnp.int32], specs, strict=True
        )
    )

    def objective(hidden, weight, labels):
        out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, batch_axes="data", sequence_axis=sequence_axis)
        return jnp.sum(out.logprobs + out.entropy)

    compiled = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(hidden, weight, labels).compile()
    local_logits = (4 * T // 2) * (V // 4)
    assert largest_array(compiled) < local_logits
    gathers = compiled.as_text().count(" all-gather(") + compiled.as_text().count(" all-gather-start(")
    # One for the statistics; with the sequence split, one for hidden states in each direction, one for all cotangents.
    assert gathers <= (1 if sequence_axis is None else 4)
