"""A vocabulary in parts: a token's results have the same bits however many parts each shard has, interpreted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import lce_jax
from lce_jax.mosaic import _chunks
from lce_jax.mosaic._operands import make_geometry
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.sm90 import HOPPER
from lce_jax.run.kernels import trace_for_device
from tests import one_device_shards, oracle
from tests.devices import H200
from tests.mosaic.test_lowering import lower
from tests.mosaic.test_same_bits import FIELDS
from tests.mosaic_cases import case, make_call
from tests.pairs import values_of

T, H = 16, 64
NAMES = (*FIELDS, "candidate_logprobs")


def labels_at_borders(part: int, columns: int) -> jax.Array:
    """At both sides of each border of parts and of tiles, and in no column."""
    borders = [start + tile for start in range(0, columns, part) for tile in (0, 256)]
    found = [at for border in (*borders, columns) for at in (border, border - 1) if at < columns]
    return jnp.asarray(np.resize(found, T), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "parts", "columns", "shards"),
    [
        pytest.param(536, 4, 2144, (2, 4), marks=pytest.mark.slow),  # two tiles and a bit
        (264, 4, 704, (2,)),  # padding begins inside the third part
        pytest.param(4120, 2, 8240, (2,), marks=pytest.mark.slow),  # two groups of tiles a part
        pytest.param(1024, 8, 8001, (2, 4, 8), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_shards(part: int, parts: int, columns: int, shards: tuple[int, ...]) -> None:
    """And with or without padding, in which the weight holds NaN."""
    rng, V = np.random.default_rng(0), part * parts
    hidden = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(V, H)) * 3 / H**0.5, jnp.bfloat16).at[columns:].set(jnp.nan)
    labels = labels_at_borders(part, columns)
    temperature = jnp.asarray(rng.uniform(0.5, 2.0, T), jnp.float32)
    options = {"temperature": temperature, "candidates": jnp.asarray(rng.integers(-1, columns, (T, 3)), jnp.int32)}

    def over(count: int, weight: Any) -> Any:
        given = {**options, "stats": True, "vocab_size": columns, "vocab_part_size": part}
        with trace_for_device(H200), interpreting(plgpu.InterpretGPUParams()):
            return one_device_shards.linear_logprobs(count, hidden, weight, labels, **given)

    whole = over(1, weight)
    for other in [*(over(count, weight) for count in shards), *([over(1, weight[:columns])] if columns < V else [])]:
        assert all(np.array_equal(getattr(whole, name), getattr(other, name)) for name in NAMES)
    wanted = oracle.logprobs(hidden, weight[:columns], labels, **options)
    for name in NAMES:
        assert oracle.value_error(getattr(whole, name), getattr(wanted, name)) < 2e-5, name


@pytest.mark.parametrize(("V", "part"), [(784, 264), (8240, 4120), (151936, 18992), (4096, 8), (777, 512), (700, 800)])
def test_where_tiles_and_groups_lie(V: int, part: int) -> None:
    """As a walk over the parts finds them."""
    tile, group = HOPPER.tiling.tile, _chunks.GROUP
    shape = make_geometry(make_call(case("", V=V, vocab_part_size=part)), HOPPER.tiling)
    parts = [range(start, min(start + part, V), tile) for start in range(0, V, part)]
    columns = [column for each in parts for column in each]
    firsts = [columns.index(each[i]) for each in parts for i in range(0, len(each), group)]
    assert [shape.column(i) for i in range(shape.num_tiles)] == columns
    assert [_chunks.first_tile(shape, i) for i in range(_chunks.count_groups(shape))] == firsts
    assert _chunks.first_tile(shape, len(firsts)) >= shape.num_tiles
    for column in {0, 1, part - 1, min(part, V - 1), V // 2, V - 1} & set(range(V)):
        number, place = divmod(shape.place(column), tile)
        assert columns[number] + place == column
        assert shape.count_tiles(column + 1) == number + 1


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("tokens", "V", "options"),
    [
        (65536, 151936, {"vocab_part_size": 18992, "stats": True, "temperature": True, "vocab_size": 151643}),
        pytest.param(100, 50257, {"vocab_part_size": 6288, "K": 8}, marks=pytest.mark.slow),
        pytest.param(65536, 151936, {"vocab_part_size": 64 * 297, "weight_layout": "hv"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowering(tokens: int, V: int, options: dict[str, Any]) -> None:
    """Of both passes, in a program for CUDA; many tokens take several launches of a forward."""
    lower(tokens, 1024, V, **options)


def structs(V: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 1024), "bfloat16"), ((V, 1024), "bfloat16"), ((4096,), "int32"))
    ]


@pytest.mark.usefixtures("hopper")
def test_plans_say_what_holds() -> None:
    plan = lce_jax.explain(*structs(151936), vocab_part_size=18992)
    assert "whole parts of 18,992 columns" in plan.same_bits
    assert any("vocab_part_size=18992" in note for note in plan.notes)
    assert plan.backward_bytes == lce_jax.explain(*structs(151936), cache_bytes=0).backward_bytes
    other = lce_jax.explain(*structs(151936), vocab_part_size=18992, implementation="xla")
    assert other.same_bits is None
    assert any("vocab_part_size=18992 is not used" in note for note in other.notes)
    hv = [structs(151936)[0], jax.ShapeDtypeStruct((1024, 151936), "bfloat16"), structs(1)[2]]
    with pytest.raises(lce_jax.UnsupportedError, match="multiple of 64 with V 151936, got 18992"):
        lce_jax.explain(*hv, vocab_part_size=18992, weight_layout="hv", implementation="mosaic_gpu")


@values_of("kind", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])
def test_shards_without_whole_parts(kind: AxisType) -> None:
    """They are refused by name, by the operands' types, by XLA's rule, and inside ``shard_map``."""
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(kind,), devices=jax.devices()[:4])
    split, same = jax.NamedSharding(mesh, jax.P("tensor")), jax.NamedSharding(mesh, jax.P())
    hidden, weight, labels = jnp.ones((4, 8)), jnp.ones((96, 8)), jnp.zeros((4,), jnp.int32)
    given = jax.device_put(hidden, same), jax.device_put(weight, split), jax.device_put(labels, same)

    def run(part: int) -> Any:
        return jax.jit(lambda *x: lce_jax.linear_logprobs(*x, vocab_part_size=part).logprobs)(*given)

    def by_name(part: int) -> Any:
        out = lce_jax.sharded_linear_logprobs(
            hidden, weight, labels, mesh=mesh, vocab_axis="tensor", vocab_part_size=part
        )
        return out.logprobs

    def inside(part: int) -> Any:
        def of_shard(*x: Any) -> Any:
            return lce_jax.linear_logprobs(*x, axis_name="tensor", vocab_part_size=part).logprobs

        specs = jax.P(), jax.P("tensor"), jax.P()
        return jax.jit(jax.shard_map(of_shard, in_specs=specs, out_specs=jax.P()))(*given)

    message = "vocab_part_size=16: each of the 4 shards has 24 of the 96 columns of weight"
    with jax.set_mesh(mesh):
        for function in (run, by_name, inside):
            np.testing.assert_allclose(function(8), -np.log(96), rtol=1e-6)
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
                function(16)
