"""What the compiler says: no array of T × V, and temporary memory far below the logits."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import explain, linear_cross_entropy, linear_logprobs, sharded_linear_logprobs
from tests import cases
from tests.pairs import pairs_of

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


@pairs_of(1, name=["value_and_grad", "forward"], dtype=["float32", "bfloat16"])
def test_temporary_memory_under_an_eighth_of_the_logits(name: str, dtype: str) -> None:
    args = structs(dtype=dtype)
    compiled = jax.jit(PASSES[name]).lower(*args).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < T * V * 4 / 8
    assert largest_array(compiled) < T * V


@pytest.mark.parametrize("name", PASSES)
def test_with_rows_left_out(name: str) -> None:
    compiled = jax.jit(PASSES[name]).lower(*structs(), jax.ShapeDtypeStruct((T,), bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * V * 4 / 8
    assert largest_array(compiled) < T * V


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes of one call; the lower-case options name arrays or are passed on."""

    __test__ = False

    T: int
    H: int
    V: int
    dtype: str = "float32"
    hidden_dtype: str | None = None
    where: bool = False
    temperature: bool = False
    K: int = 0  # candidates
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        flags = [name for name in ("where", "temperature") if getattr(self, name)]
        flags += [f"{self.K} candidates"] if self.K else []
        words = [f"{self.T} x {self.H} x {self.V}", self.dtype, *flags]
        return " ".join([*words, *(name for name, _ in self.options)])


def shapes(T: int, H: int, V: int, dtype: str = "float32", **rest: Any) -> Call:
    own = {key: rest.pop(key) for key in ("hidden_dtype", "where", "temperature", "K") if key in rest}
    return Call(T, H, V, dtype, **own, options=tuple(rest.items()))


CALLS = [
    shapes(16, 1024, 262144),
    shapes(64, 4096, 50257, "bfloat16"),
    shapes(2048, 256, 32768, vocab_size=32000),
    shapes(2048, 512, 32768),
    shapes(2048, 512, 32768, entropy=False),
    shapes(4096, 512, 65536, "bfloat16"),
    shapes(8192, 512, 32768),
    shapes(512, 1024, 50257, where=True, temperature=True, logit_softcap=30.0, stats=True, vocab_size=50000),
    shapes(512, 1024, 50257, weight_layout="hv", where=True),
    shapes(4096, 512, 65536, "bfloat16", where=True, weight_layout="hv", logit_softcap=30.0),
    shapes(300, 640, 5000, label_smoothing=0.1),
    shapes(512, 512, 32000, where=True, label_smoothing=0.1, logit_softcap=30.0),
    shapes(300, 640, 5000, "float16", temperature=True),
    shapes(300, 640, 5000, hidden_dtype="bfloat16"),
    shapes(300, 640, 5000, "bfloat16", hidden_dtype="float32", weight_layout="hv"),
    shapes(4096, 256, 8192),  # a tile of logits is larger than dweight
    shapes(1, 512, 50257),
    shapes(1, 4096, 32000, "bfloat16"),
    shapes(300, 64, 1000, where=True, stats=True),  # a tile and a remainder, which XLA has no loop for
    shapes(300, 64, 1000, label_smoothing=0.1),
    shapes(2048, 256, 32768, K=64),
    shapes(4096, 256, 8192, "bfloat16", K=64),
    shapes(2048, 256, 32768, K=8, where=True),
]  # fmt: skip
# What other calls have together with more.
ALONE = {
    shapes(2048, 512, 32768),
    shapes(4096, 512, 65536, "bfloat16"),
    shapes(8192, 512, 32768),
    shapes(512, 1024, 50257, weight_layout="hv", where=True),
    shapes(300, 640, 5000, label_smoothing=0.1),
    shapes(300, 640, 5000, "float16", temperature=True),
    shapes(2048, 256, 32768, K=64),
}
MATRIX = [
    shapes(math.prod(test.leading), test.H, test.V, test.dtype, hidden_dtype=test.hidden_dtype,
           where=test.where is not None, temperature=test.temperature != 1.0, **dict(test.options))
    for test in cases.MATRIX
]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.slow if shape in ALONE or shape not in CALLS else ())
        for shape in dict.fromkeys([*CALLS, *MATRIX])
    ],
    ids=str,
)
def test_explain_foretells_what_is_compiled(shape: Call) -> None:
    """Temporary bytes of the forward, and of both passes in one program, whose outputs the gradients are.

    An upper bound, of at most 1.25 of what is held, but for four KiB, because arrays of a few bytes take 64 each. Of a
    call of less than two tiles, what XLA merges of the passes is not foretold: at most 1.5 of what either held.
    """
    struct = jax.ShapeDtypeStruct
    options = dict(shape.options)
    transposed = options.get("weight_layout") == "hv"
    weight = struct((shape.H, shape.V) if transposed else (shape.V, shape.H), shape.dtype)
    args = struct((shape.T, shape.H), shape.hidden_dtype or shape.dtype), weight, struct((shape.T,), "int32")
    arrays = {name: struct((shape.T,), dtype) for name, dtype in (("where", "bool"), ("temperature", "float32"))
              if getattr(shape, name)}  # fmt: skip
    if shape.K:
        arrays["candidates"] = struct((shape.T, shape.K), "int32")

    def objective(hidden, weight, labels, arrays):
        if "label_smoothing" in options:
            return linear_cross_entropy(hidden, weight, labels, **options, **arrays)
        out = linear_logprobs(hidden, weight, labels, **options, **arrays)
        return sum(jnp.sum(field) for field in out if field is not None)

    plan = explain(*args, **options, **arrays)
    both = jax.value_and_grad(objective, argnums=(0, 1))
    assert any("64 candidates per token add" in note for note in plan.notes) == (shape.K == 64)
    most, few_tiles = 0, 2 * plan.tiles["vocabulary"] > shape.V
    for function, said in ((objective, plan.forward_bytes), (both, plan.backward_bytes)):
        held = jax.jit(function).lower(*args, arrays).compile().memory_analysis().temp_size_in_bytes
        most = max(most, held)
        assert held - 4096 < said < (1.5 * most if few_tiles else 1.25 * held) + 4096, (said, held, plan.tiles)
        if shape.V > 32768 and shape.T > 1:  # of one token, half a MiB of the weight is more than its logits
            assert held < plan.logits_bytes, "few tokens too"


def test_the_search_finds_logits_where_they_are_stored() -> None:
    """The control: the materialised path does hold T × V."""

    def materialised(hidden, weight, labels):
        return jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T), labels[:, None], axis=1).sum()

    compiled = jax.jit(materialised).lower(*structs()).compile()
    assert largest_array(compiled) >= T * V
    assert compiled.memory_analysis().temp_size_in_bytes >= T * V * 4


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
