"""`linear_topk` with the vocabulary and the tokens split, for every kind of axes, and under ``vmap``."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_topk, sharded_linear_topk
from lce_jax.mesh import _custom_partitioning
from tests.draws import Draws
from tests.pairs import combined
from tests.partition_cases import mesh_of, put
from tests.sharding_cases import LAYOUTS
from tests.sharding_cases import mesh_of as mesh_of_layout
from tests.topk_cases import assert_exact, integers

HIDDEN, WEIGHT = integers((8, 16), 4096, "float32", H=64)


@pytest.mark.fast("2-False", "8-True")
@combined(shards=[1, 2, 8], check_vma=[True, False])
def test_inside_shard_map(shards: int, check_vma: bool) -> None:
    """Shards of 13 columns, fewer than k, of which the last has padding alone; every shard returns the same bits."""
    hidden, weight = integers((8, 3), 104, "bfloat16")
    weight = np.array(weight)
    weight[90:] = np.nan
    mesh = jax.make_mesh((8 // shards, shards), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def body(hidden: Any, weight: Any, temperature: Any) -> Any:
        if check_vma:  # typed as varying, as after `lax.all_gather`
            temperature = jax.lax.pcast(temperature, "tensor", to="varying")
        out = linear_topk(hidden, weight, 30, axis_name="tensor", vocab_size=90, temperature=temperature)
        return jax.tree.map(lambda x: x[None], jax.lax.pcast(out, "tensor", to="varying") if check_vma else out)

    specs = (P("data"), P("tensor"), P("data"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor", "data"), check_vma=check_vma)
    every = jax.tree.map(np.asarray, jax.jit(run)(hidden, weight, np.ones((8, 3), np.float32)))
    for x in every:
        assert x.shape[0] == shards
        assert all(part.tobytes() == x[0].tobytes() for part in x)
    assert_exact(jax.tree.map(lambda x: x[0], every), hidden, weight[:90], 30)


@pytest.mark.fast("1.0")
@pytest.mark.parametrize("scale", [1.0, jnp.float32(0.0)])
def test_a_cap_and_small_temperatures_over_a_mesh(scale: Any) -> None:
    """The x of the merge are those of the shards: no log-probability is above 0, padding or not."""
    draws = Draws()
    hidden, weight = draws.normal(64, 16), draws.normal(1024, 16)
    temperature = np.float32(10.0 ** -(np.arange(64) % 9))
    given = {"temperature": temperature, "logit_softcap": 3.0, "logit_scale": scale, "vocab_size": 700}
    run = functools.partial(sharded_linear_topk, mesh=mesh_of_layout("tensor 8", AxisType.Auto))
    got, want = run(hidden, weight, 6, **given), linear_topk(hidden, weight, 6, **given)
    assert np.all(np.asarray(got.logprobs) <= 0)
    assert np.array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.fast("two axes")
@pytest.mark.parametrize("layout", ["data, sequence over context and tensor", "vocabulary over two axes"])
def test_over_a_mesh(layout: str) -> None:
    hidden, weight = integers((4, 8), 128, "float32")
    where = Draws().chances(0.6, 4, 8)
    hidden = np.where(where[..., None], hidden, np.nan)
    mesh = mesh_of_layout(layout, AxisType.Auto)
    run = functools.partial(sharded_linear_topk, mesh=mesh, **LAYOUTS[layout][2])
    options: Any = {"vocab_size": 101, "weight_layout": "hv", "bias": np.zeros(128, np.float32)}
    out = run(hidden, np.asarray(weight).T, 20, where=where, **options)
    live = np.asarray(where)
    assert_exact(jax.tree.map(lambda x: np.asarray(x)[live], out), hidden[live], weight[:101], 20)
    assert np.all(np.asarray(out.ids)[~live] == -1)
    assert np.all(np.asarray(out.logprobs)[~live] == 0)


def test_in_shardings_alone_split_the_work() -> None:
    """No type shows these shardings; XLA's partitioning rule sees them."""
    mesh = mesh_of(AxisType.Auto)
    shardings = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("tensor"))
    compiled = jax.jit(lambda h, w: linear_topk(h, w, 5), in_shardings=shardings).lower(HIDDEN, WEIGHT).compile()
    assert_exact(compiled(HIDDEN, WEIGHT), HIDDEN, WEIGHT, 5)
    assert compiled.cost_analysis()["flops"] < 1.5 * 2 * HIDDEN.size * len(WEIGHT) / 8
    assert compiled.as_text().count(" all-gather(") == 1


def test_export_says_what_to_export(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor"))
    _custom_partitioning.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "lce_jax"), jax.set_mesh(mesh):
        jax.export.export(jax.jit(lambda h, w: linear_topk(h, w, 5)))(*operands)
    assert "Export sharded_linear_topk" in caplog.text
    told = jax.jit(lambda h, w: sharded_linear_topk(h, w, 5, mesh=mesh, batch_axes="data"))  # as the message advises
    assert_exact(jax.export.export(told)(*operands).call(*operands), HIDDEN, WEIGHT, 5)


@pytest.mark.slow
def test_under_vmap() -> None:
    out = jax.jit(jax.vmap(lambda h: linear_topk(h, WEIGHT, 40)))(HIDDEN)
    assert_exact(out, HIDDEN, WEIGHT, 40)
    weights = WEIGHT.reshape(8, 512, 64)
    each = jax.vmap(lambda h, w: linear_topk(h, w, 40))(HIDDEN, weights)
    for i in range(8):
        assert_exact(jax.tree.map(lambda x, i=i: x[i], each), HIDDEN[i], weights[i], 40)


def test_a_whole_weight_inside_shard_map_is_refused() -> None:
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda h, w: linear_topk(h, w, 3, axis_name="tensor"), mesh=mesh, in_specs=(P(), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"weight .*'tensor'"):
        jax.eval_shape(run, HIDDEN, WEIGHT)
