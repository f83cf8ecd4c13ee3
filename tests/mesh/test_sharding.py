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

from lce_jax import (
    linear_logprobs,
    sharded_linear_logprobs,
)
from tests import cases, oracle
from tests.agreement import on_one_device
from tests.pairs import pairs_of
from tests.sharding_cases import CALLS, LAYOUTS, mesh_of


def single(test: cases.TestCase):
    """The call, and its results and gradients on one device."""
    hidden, weight, labels, options, seeds = cases.draw(test)
    return (hidden, weight, labels, {"precision": "highest", **options}, seeds), *on_one_device(test)


def assert_same(test: cases.TestCase, out, grads, want, wanted) -> None:
    for field, got, true in zip(out._fields, out, want, strict=True):
        assert (got is None) == (true is None), field
        if true is not None:
            assert oracle.value_error(got, true) < 2e-6, field
    bound = 1e-5 if test.dtype == "float32" else 4e-3  # bfloat16: partial sums round anew, by half a unit in 2^8
    for got, true in zip(grads, wanted, strict=True):
        assert got.shape == true.shape
        assert got.dtype == true.dtype
        assert oracle.relative_norm(got, true) < bound


# Two calls on every layout, the others on the two layouts that differ most. In turns one is slow with Auto axes and the
# other with Explicit ones: each call and each layout has both types without those.
COMBINATIONS = [
    pytest.param(test, layout, kind, marks=pytest.mark.slow if (i + j + k) % 2 else ())
    for i, layout in enumerate(LAYOUTS)
    for j, test in enumerate((CALLS[0], CALLS[3], CALLS[1], CALLS[2], CALLS[4]))
    for k, kind in enumerate((AxisType.Auto, AxisType.Explicit))
    if test.name in ("plain", "everything") or layout in ("data 2, tensor 4", "data 4, tensor 2, sequence over tensor")
]


@pytest.mark.parametrize(("test", "layout", "axis_type"), COMBINATIONS, ids=str)
def test_sharded_equals_single_device(test: cases.TestCase, layout: str, axis_type: AxisType) -> None:
    (hidden, weight, labels, options, seeds), want, wanted = single(test)
    mesh, where = mesh_of(layout, axis_type), LAYOUTS[layout][2]

    def objective(hidden, weight, labels):
        out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, **where, **options)
        return cases.objective(out, seeds), out

    with jax.set_mesh(mesh):
        value_and_grad = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
        (_, out), grads = value_and_grad(hidden, weight, labels)
    assert_same(test, out, grads, want, wanted)


def test_explicit_axes_tell_the_batch_and_keep_their_types() -> None:
    (hidden, weight, labels, options, _), want, _ = single(CALLS[0])
    mesh = mesh_of("data 2, tensor 4", AxisType.Explicit)
    hidden = jax.device_put(hidden, NamedSharding(mesh, P("data")))
    weight = jax.device_put(weight, NamedSharding(mesh, P("tensor")))
    labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        out, gradient = jax.jit(
            lambda h, w, y: (
                sharded_linear_logprobs(h, w, y, **options),
                jax.grad(lambda w: sharded_linear_logprobs(h, w, y, **options).logprobs.sum())(w),
            )
        )(hidden, weight, labels)
    assert out.logprobs.sharding.spec == P("data", None)
    assert gradient.sharding.spec == P("tensor", None)
    assert oracle.value_error(out.logprobs, want.logprobs) < 2e-6


@pairs_of(1, test=CALLS, check_vma=[True, False])
def test_inside_shard_map(test: cases.TestCase, check_vma: bool) -> None:
    """The gradient is taken outside: shard_map's transpose sums what was replicated."""
    (hidden, weight, labels, options, seeds), want, wanted = single(test)
    mesh = mesh_of("data 2, tensor 4", AxisType.Auto)
    rows = {key: options.pop(key) for key in ("where", "temperature") if isinstance(options.get(key), jax.Array)}
    vocab = P("tensor", None) if options.get("weight_layout") != "hv" else P(None, "tensor")

    def body(hidden, weight, labels, rows):
        return linear_logprobs(hidden, weight, labels, axis_name="tensor", **rows, **options)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), vocab, P("data"), P("data")), out_specs=P("data"), check_vma=check_vma
    )

    def objective(hidden, weight):
        out = mapped(hidden, weight, labels, rows)
        return cases.objective(out, seeds), out

    (_, out), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(hidden, weight)
    assert_same(test, out, grads, want, wanted)


def plain_logprobs(hidden, weight, labels, axis_name):
    """The materialised loss with JAX's own collectives, to compare conventions with."""
    z = jnp.matmul(hidden, weight.T, precision="highest")
    top = lax.pmax(lax.stop_gradient(z.max(-1)), axis_name)
    lse = top + jnp.log(lax.psum(jnp.exp(z - top[..., None]).sum(-1), axis_name))
    column = labels - lax.axis_index(axis_name) * weight.shape[0]
    owned = (column >= 0) & (column < weight.shape[0])
    target = jnp.take_along_axis(z, jnp.where(owned, column, 0)[..., None], -1)[..., 0]
    return lax.psum(jnp.where(owned, target, 0), axis_name) - lse


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gathered", [False, True], ids=["replicated hidden", "gathered hidden"])
def test_gradient_inside_shard_map_follows_jax(check_vma: bool, gathered: bool) -> None:
    """Gradients taken inside equal those of plain JAX with psum, in either mode and for either kind of hidden."""
    (hidden, weight, labels, *_), _, _ = single(CALLS[0])
    mesh = mesh_of("data 2, tensor 4", AxisType.Auto)

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


@pairs_of(1, test=CALLS[:3], check_vma=[True, False])
def test_shards_agree_bitwise(test: cases.TestCase, check_vma: bool) -> None:
    (hidden, weight, labels, options, _), _, _ = single(test)
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


@pytest.mark.parametrize("axis_types", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
def test_mixed_axis_types(axis_types: tuple[AxisType, ...]) -> None:
    (hidden, weight, labels, options, seeds), want, wanted = single(CALLS[0])
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=axis_types)

    def objective(hidden, weight):
        out = sharded_linear_logprobs(hidden, weight, labels, batch_axes="data", **options)
        return cases.objective(out, seeds), out

    with jax.set_mesh(mesh):
        (_, out), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(hidden, weight)
    assert_same(CALLS[0], out, grads, want, wanted)


def test_float64_keeps_its_temperature() -> None:
    mesh = mesh_of("tensor 8", AxisType.Auto)
    with jax.enable_x64(True):
        hidden, weight = jnp.ones((4, 8)), jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)))
        labels, temperature = jnp.arange(4), np.full((4,), 0.7)
        want = linear_logprobs(hidden, weight, labels, temperature=temperature).entropy
        for value in (0.7, temperature):
            got = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, temperature=value).entropy
            assert oracle.value_error(got, want) < 1e-14
