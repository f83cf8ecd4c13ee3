"""Meshes of 1 to 8 devices equal one device, for results and all gradients; shards agree to the last bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle
from tests.agreement import (
    assert_same,
    call_inside_shard_map,
    call_on_one_device,
    call_on_split_operands,
    call_over_named_axes,
    evaluate,
)
from tests.pairs import combined
from tests.sharding_cases import CALLS, LAYOUTS, mesh_of

PLAIN, EVERYTHING = CALLS[0], CALLS[3]
KINDS = [AxisType.Auto, AxisType.Explicit]
WIDEST = "data 2, tensor 4"
LAYOUTS_OF_ALL = (WIDEST, "data 4, tensor 2, sequence over tensor")


# `test_every_function` has those of all functions as well.
MANY = {
    "tensor 2",
    "tensor 8",
    "data 2, tensor 2",
    "data 2, tensor 4",
    "data, sequence over context and tensor",
    "data alone",
    "1",
    "an axis nobody uses",
    "batch over two axes",
    "tensor 8, sequence over tensor",
}


@pytest.mark.fast("vocabulary over two axes")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.slow if x in MANY else ()) for x in LAYOUTS])
@pytest.mark.parametrize("test", [pytest.param(PLAIN, marks=pytest.mark.slow), EVERYTHING], ids=str)
def test_over_named_axes(test: cases.TestCase, layout: str, axis_type: AxisType) -> None:
    assert_same(call_over_named_axes(test, layout, axis_type), call_on_one_device(test))


@pytest.mark.slow
@combined(test=[x for x in CALLS if x not in (PLAIN, EVERYTHING)], layout=LAYOUTS_OF_ALL, axis_type=KINDS)
def test_other_calls_over_named_axes(test: cases.TestCase, layout: str, axis_type: AxisType) -> None:
    assert_same(call_over_named_axes(test, layout, axis_type), call_on_one_device(test))


@pytest.mark.fast("floor and everything-AxisType.Explicit")
@combined(test=[EVERYTHING, CALLS[4]], axis_type=KINDS)
def test_where_operands_are(test: cases.TestCase, axis_type: AxisType) -> None:
    assert_same(call_on_split_operands(test, WIDEST, axis_type), call_on_one_device(test))


def test_explicit_axes_tell_the_batch_and_keep_their_types() -> None:
    hidden, weight, labels, *_ = cases.draw(PLAIN)
    mesh = mesh_of(WIDEST, AxisType.Explicit)
    hidden = jax.device_put(hidden, NamedSharding(mesh, P("data")))
    weight = jax.device_put(weight, NamedSharding(mesh, P("tensor")))
    labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
    run = functools.partial(sharded_linear_logprobs, precision="highest")
    with jax.set_mesh(mesh):
        out, gradient = jax.jit(lambda h, w, y: (run(h, w, y), jax.grad(lambda w: run(h, w, y).logprobs.sum())(w)))(
            hidden, weight, labels
        )
    assert out.logprobs.sharding.spec == P("data", None)
    assert gradient.sharding.spec == P("tensor", None)
    assert oracle.value_error(out.logprobs, call_on_one_device(PLAIN)[0].logprobs) < 2e-6


@pytest.mark.fast("floor and everything-True")
@combined(test=CALLS[2:], check_vma=[True, False])
def test_inside_shard_map(test: cases.TestCase, check_vma: bool) -> None:
    assert_same(call_inside_shard_map(test, WIDEST, check_vma), call_on_one_device(test))


def plain_logprobs(hidden, weight, labels, axis_name):
    """The materialised loss with JAX's own collectives, to compare conventions with."""
    z = jnp.matmul(hidden, weight.T, precision="highest")
    top = lax.pmax(lax.stop_gradient(z.max(-1)), axis_name)
    lse = top + jnp.log(lax.psum(jnp.exp(z - top[..., None]).sum(-1), axis_name))
    column = labels - lax.axis_index(axis_name) * weight.shape[0]
    owned = (column >= 0) & (column < weight.shape[0])
    target = jnp.take_along_axis(z, jnp.where(owned, column, 0)[..., None], -1)[..., 0]
    return lax.psum(jnp.where(owned, target, 0), axis_name) - lse


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gathered", [False, True], ids=["replicated hidden", "gathered hidden"])
def test_gradient_inside_shard_map_follows_jax(check_vma: bool, gathered: bool) -> None:
    """Gradients taken inside equal those of plain JAX with psum, in either mode and for either kind of hidden."""
    hidden, weight, labels, *_ = cases.draw(PLAIN)
    mesh = mesh_of(WIDEST, AxisType.Auto)

    def gradients(function):
        def body(hidden, weight, labels):
            def loss(hidden, weight):
                if gathered:
                    hidden = lax.all_gather(hidden, "tensor", axis=1, tiled=True)
                return jnp.sum(function(hidden, weight, labels) ** 2)

            return jax.grad(loss, argnums=(0, 1))(hidden, weight)

        spec = P("data", "tensor") if gathered else P("data")
        # Under check_vma=False the gradient of a replicated operand is a partial sum, different on each shard:
        # stack the parts to see them all.
        stacked = not check_vma
        outs = (
            P(("data", "tensor")) if stacked and not gathered else spec,
            P(("tensor", "data")) if stacked else P("tensor"),
        )
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(spec, P("tensor"), P("data")), out_specs=outs, check_vma=check_vma
        )
        return jax.jit(mapped)(hidden, weight, labels)

    def ours(hidden, weight, labels):
        return linear_logprobs(hidden, weight, labels, axis_name="tensor", precision="highest").logprobs

    theirs = functools.partial(plain_logprobs, axis_name="tensor")
    for got, true in zip(gradients(ours), gradients(theirs), strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


@pytest.mark.fast("padding-False")
@combined(test=CALLS[1:3], check_vma=[True, False])
def test_shards_agree_bitwise(test: cases.TestCase, check_vma: bool) -> None:
    hidden, weight, labels, options, _ = cases.draw(test)
    where = options.pop("where", None)
    mesh = mesh_of("tensor 8", AxisType.Auto)

    def body(hidden, weight, labels, where):
        out = linear_logprobs(hidden, weight, labels, where=where, axis_name="tensor", **options)
        if check_vma:
            out = jax.tree.map(lambda x: lax.pcast(x, ("tensor",), to="varying"), out)
        return jax.tree.map(lambda x: x[None], out)

    specs = (P(), P("tensor"), P(), P())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=check_vma)
    for field in jax.tree.leaves(jax.jit(mapped)(hidden, weight, labels, where)):
        copies = np.asarray(field)
        assert copies.shape[0] == 8
        assert all(np.array_equal(copies[0], copy) for copy in copies)


@pytest.mark.slow
@pytest.mark.parametrize("axis_types", [KINDS, KINDS[::-1]], ids=str)
def test_mixed_axis_types(axis_types: list[AxisType]) -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=tuple(axis_types))):
        got = evaluate(PLAIN, sharded_linear_logprobs, batch_axes="data")
    assert_same(got, call_on_one_device(PLAIN))


@pytest.mark.slow
def test_float64_keeps_its_temperature() -> None:
    mesh = mesh_of("tensor 8", AxisType.Auto)
    with jax.enable_x64(True):
        hidden, weight = jnp.ones((4, 8)), jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)))
        labels, temperature = jnp.arange(4), np.full((4,), 0.7)
        want = linear_logprobs(hidden, weight, labels, temperature=temperature).entropy
        for value in (0.7, temperature):
            got = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, temperature=value).entropy
            assert oracle.value_error(got, want) < 1e-14
