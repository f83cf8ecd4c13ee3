"""A token's results have the same bits in JAX and in torch, and over any number of shards: interpreted."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec

import lce_jax
import lce_torch_bridge
from lce_jax import mosaic
from lce_jax.call import _describe, _options
from lce_jax.mathematics import _logprobs
from lce_jax.mesh import _collectives
from lce_jax.mosaic._chunks import GROUP
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.sm90 import HOPPER
from lce_jax.run import _shard
from lce_jax.run.kernels import trace_for_device
from lce_jax.types._types import Operands
from lce_torch_bridge.tensors import _padding
from tests.devices import H200
from tests.mosaic_cases import MULTIPROCESSORS, case, make_call
from tests.mosaic_interpreter import races_found
from tests.pairs import combined
from tests.torch.as_gpu import emulated

FIELDS = ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared")
COLUMNS = GROUP * HOPPER.tiling.tile  # of a group
SMALL = H200._replace(core_count=MULTIPROCESSORS)  # each is a block that the interpreter runs


def drawn(T: int, H: int, V: int) -> tuple[Any, Any, Any]:
    """Products that float32 holds exactly: those of some CPUs round a row by where it lies among the others."""
    rng = np.random.default_rng(T)

    def steps(rows: int, size: float) -> jax.Array:
        return jnp.asarray(np.clip(np.round(rng.normal(size=(rows, H)) * 16), -64, 64) / 16 * size, jnp.bfloat16)

    hidden, weight = steps(T, 1.0), steps(V, 2.0 ** np.round(np.log2(3 / H**0.5)))
    return hidden, weight, jnp.asarray(rng.integers(-1, V, T), jnp.int32)


def by_jax(hidden: Any, weight: Any, labels: Any, where: Any = None, **options: Any) -> dict[str, np.ndarray]:
    temperature = options.pop("temperature", None)

    def run(*given: Any) -> Any:
        hidden, weight, labels, where, temperature = given
        told = options if temperature is None else {**options, "temperature": temperature}
        bound = _describe.bind_call(
            _describe.describe_call(_options.parse_arguments(told, hidden, weight, labels, where))
        )
        return _shard.device_forward(*bound[:3], False)[0].outputs

    with trace_for_device(SMALL), interpreting(plgpu.InterpretGPUParams()):
        out = jax.jit(run)(hidden, weight, labels, where, temperature)
    return {name: np.asarray(getattr(out, name)) for name in FIELDS if getattr(out, name) is not None}


def by_torch(hidden: Any, weight: Any, labels: Any, temperature: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """Launched directly."""
    given = [torch.from_numpy(np.array(x, np.float32)).bfloat16() for x in (hidden, weight)]
    if temperature is not None:
        options["temperature"] = torch.from_numpy(np.array(temperature))
    with pytest.MonkeyPatch.context() as patch, contextlib.contextmanager(emulated)(patch):
        patch.setattr(_padding, "size", lambda _: 256)
        out = lce_torch_bridge.linear_logprobs(*given, torch.from_numpy(np.array(labels)), stats=True, **options)
    return {name: getattr(out, name).numpy() for name in FIELDS}


@pytest.mark.slow  # a function of a few numbers per token is compared in the next test
@combined(has_temperature=[False, True], options=[{}, {"vocab_part_size": 264}])  # the last part is smaller
def test_jax_and_torch(has_temperature: bool, options: dict[str, Any]) -> None:
    T = 140
    given = drawn(T, 128, 784)
    temperature = jnp.asarray(np.random.default_rng(1).uniform(0.3, 3.0, T), jnp.float32) if has_temperature else None
    wanted = by_torch(*given, temperature, **options)
    found = by_jax(*given, stats=True, temperature=temperature, **options)
    assert all(np.array_equal(found[name], wanted[name]) for name in FIELDS)
    where = np.random.default_rng(2).random(T) < 0.3
    some = by_jax(*given, where=jnp.asarray(where), stats=True, temperature=temperature, **options)
    for name in FIELDS:
        assert np.array_equal(some[name], np.where(where, wanted[name], 0.0)), name


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_of_whole_groups(most: int) -> None:
    """A vocabulary whose last columns are padding, and its parts, merged."""
    T, H, V, padding = 12, 64, most * COLUMNS, 300
    hidden, weight, labels = drawn(T, H, V)
    labels = jnp.minimum(labels, V - padding - 1)
    inverse = jnp.asarray(np.random.default_rng(3).uniform(0.5, 2.0, T), jnp.float32)

    def operands(shards: int, shard: int) -> Operands:
        size = V // shards
        own = labels - shard * size
        targets = jnp.where((own >= 0) & (own < size), own, -1)
        columns = jnp.clip(V - padding - shard * size, 0, size)
        return Operands(hidden, weight[shard * size :][:size], targets, inverse, None, columns)

    def of(shards: int) -> Any:
        call = make_call(case("bits", T=T, H=H, V=V // shards, stats=True))

        def run(*given: Operands) -> Any:
            parts = [mosaic.partial_statistics(each, call)[0] for each in given]
            return mosaic.merge_statistics(jax.tree.map(lambda *x: jnp.stack(x), *parts), call, inverse, None)

        with interpreting(plgpu.InterpretGPUParams()):
            return jax.jit(run)(*(operands(shards, shard) for shard in range(shards)))

    whole = of(1)
    for shards in (2, 4)[: most // 2]:
        for name, x, y in zip(whole._fields, whole, of(shards), strict=True):
            assert (x is None and y is None) or np.array_equal(x, y), (shards, name)


def test_a_function_of_a_few_numbers_per_token() -> None:
    """For any number of tokens; without races, but for equal numbers that two blocks write where there are 200."""
    call = make_call(case("a few", V=256))
    for count in (3, 256, 200):
        temperature = jnp.asarray(np.random.default_rng(4).uniform(0.1, 3.0, count), jnp.float32).at[1].set(-1.0)
        with interpreting(plgpu.InterpretGPUParams(detect_races=count != 200)):
            found = jax.jit(lambda x: mosaic.compute_per_token(call, _logprobs.invert_temperature, x))(temperature)
        assert count == 200 or not races_found()
        np.testing.assert_allclose(found, _logprobs.invert_temperature(temperature), rtol=1e-6)


@pytest.mark.usefixtures("hopper")
def test_plans_say_what_holds() -> None:
    """And count what is gathered."""

    def plan(V: int, shards: int, **options: Any) -> Any:
        shapes = ((4096, 1024), "bfloat16"), ((V, 1024), "bfloat16"), ((4096,), "int32")
        mesh = jax.sharding.AbstractMesh((shards,), ("tensor",), axis_types=(AxisType.Auto,))
        place = {"mesh": mesh, "vocab_axis": "tensor"} if shards > 1 else {}
        return lce_jax.explain(*(jax.ShapeDtypeStruct(*x) for x in shapes), **place, **options)

    whole, other = plan(8 * COLUMNS, 4), plan(8 * COLUMNS + 32, 4)
    assert "any number of shards" in whole.same_bits
    assert "4 shards, because 8,200 columns" in other.same_bits
    assert "of these columns" in plan(32000, 1).same_bits
    assert whole.same_bits in str(whole)
    assert whole.forward_bytes - plan(2 * COLUMNS, 1).forward_bytes == 8 * 4 * 4096 * 4  # groups, fields, tokens, bytes
    assert plan(8 * COLUMNS, 1, implementation="xla").same_bits is None


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@combined(
    options=[{"cache_bytes": 1 << 19}, {"temperature": True, "stats": True}, {"logit_softcap": 30.0}],
    checked=[True, False],
)
def test_no_logarithm_or_quotient_of_rows_outside_the_kernels(options: dict[str, Any], checked: bool) -> None:
    """Forward and backward, in a program for CUDA, over two shards."""
    T, H, V = 512, 128, 4 * COLUMNS
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, same = PartitionSpec("tensor"), PartitionSpec()

    def objective(hidden: Any, weight: Any, labels: Any, temperature: Any) -> Any:
        told = {**options, "temperature": temperature} if "temperature" in options else options
        out = lce_jax.linear_logprobs(
            hidden, weight, labels, axis_name="tensor", where=labels > 3, implementation="mosaic_gpu", **told
        )
        return jnp.sum(out.logprobs + out.entropy + out.lse)

    step = jax.shard_map(
        jax.grad(objective, argnums=(0, 1)), mesh=mesh, in_specs=(same, split, same, same), out_specs=(same, split),
        check_vma=checked,
    )  # fmt: skip
    struct = jax.ShapeDtypeStruct
    arrays = struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), struct((T,), "int32"), struct((T,), "float32")
    text = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    compared = jax.jit(_collectives.sketch).lower(arrays[0]).as_text()  # of hidden: goes into no result
    assert inexact(text) == inexact(compared) != []
    assert inexact(jax.jit(jnp.log).lower(arrays[3]).as_text()) == [("log", "tensor<512xf32>")]  # the search finds one


def inexact(text: str) -> list[tuple[str, str]]:
    """The operations of a program that XLA and the kernels round differently, and their shapes."""
    return re.findall(r"stablehlo\.((?:log|divide|exponential|tanh|power|sqrt|rsqrt)\w*) .*(tensor<[0-9x]*f32>)", text)
