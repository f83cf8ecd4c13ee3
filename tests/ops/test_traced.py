"""A scale and a softcap that are arrays: the results of the same numbers, one program for all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import UnsupportedError, explain, linear_cross_entropy, linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle

CALLS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "scale": ({}, {"logit_scale": 0.7}),
    "scale below 0": ({"stats": True, "temperature": "token"}, {"logit_scale": -1.3}),
    "scale 0": ({"vocab_size": 97, "stats": True}, {"logit_scale": 0.0}),
    "softcap": ({"temperature": 0.6, "where": "nan"}, {"logit_softcap": 4.0}),
    "scale beside a softcap": ({"logit_softcap": 4.0, "weight_layout": "hv"}, {"logit_scale": -1.3}),
    "softcap beside a scale": ({"logit_scale": 1.3, "stats": True}, {"logit_softcap": 4.0}),
    "both": (
        {"temperature": "token", "where": "nan", "labels": "foreign", "vocab_size": 97, "stats": True},
        {"logit_scale": 1.3, "logit_softcap": 4.0},
    ),
    "bfloat16": ({"dtype": "bfloat16"}, {"logit_scale": -0.25}),
}
# A traced factor is multiplied in, a number is folded into another one: a rounding or two of difference.
VALUE, GRADIENT = 2e-6, {"float32": 2e-6, "bfloat16": 4e-3}


def draw(name: str, **shape: Any) -> tuple[Any, ...]:
    """(call, arrays, numbers): ``call(hidden, weight, **numbers)`` gives the objective and the results."""
    options, numbers = CALLS[name]
    test = cases.case(name, spread=3.0, **shape, **options)
    hidden, weight, labels, rest, seeds = cases.draw(test)
    rest = {"precision": "highest", **rest}

    def call(hidden, weight, function=linear_logprobs, **numbers):
        out = function(hidden, weight, labels, **{**rest, **numbers})
        return cases.objective(out, seeds), out

    return call, (hidden, weight), numbers


def evaluate(call: Any, arrays: Any, numbers: Any, **options: Any) -> Any:
    def run(hidden, weight, numbers):
        return call(hidden, weight, **numbers, **options)

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(*arrays, numbers)


def fixed(call: Any, arrays: Any, numbers: Any, **options: Any) -> Any:
    """With Python numbers."""

    def run(hidden, weight):
        return call(hidden, weight, **numbers, **options)

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(*arrays)


def make_arrays(numbers: dict[str, float]) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in numbers.items()}


def assert_same(got: Any, want: Any, dtype: str = "float32") -> None:
    ((_, out), grads), ((_, true), wanted) = got, want
    for name, field in out._asdict().items():
        assert (field is None) == (getattr(true, name) is None), name
        assert field is None or oracle.value_error(field, getattr(true, name)) < VALUE, name
    for gradient, other in zip(grads, wanted, strict=True):
        assert gradient.dtype == other.dtype
        assert oracle.relative_norm(gradient, other) < GRADIENT[dtype]


@pytest.mark.fast("scale 0", "both")
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_number(name: str) -> None:
    call, arrays, numbers = draw(name)
    want = fixed(call, arrays, numbers)
    got = evaluate(call, arrays, make_arrays(numbers))
    assert_same(got, want, dict(CALLS[name][0]).get("dtype", "float32"))


@pytest.mark.slow
def test_over_tiles_of_tokens_and_vocabulary_and_eagerly() -> None:
    call, arrays, numbers = draw("both", leading=(640,), V=1100)
    want = fixed(call, arrays, numbers)
    assert_same(evaluate(call, arrays, make_arrays(numbers)), want)
    run = jax.value_and_grad(lambda h, w: call(h, w, **make_arrays(numbers)), argnums=(0, 1), has_aux=True)
    assert_same(run(*arrays), want)


def test_one_program_for_all_numbers_and_no_gradient() -> None:
    hidden, weight, labels, _, _ = cases.draw(cases.MATRIX[0])
    traced = []

    @jax.jit
    def loss(scale, softcap):
        traced.append(scale)
        return linear_cross_entropy(hidden, weight, labels, logit_scale=scale, logit_softcap=softcap)

    for scale, softcap in [(0.5, 3.0), (-2.0, 8.0), (1.0, -3.0)]:  # the cap is even in c
        want = linear_cross_entropy(hidden, weight, labels, logit_scale=scale, logit_softcap=abs(softcap))
        assert np.isclose(loss(scale, softcap), want, rtol=2e-6)
    assert len(traced) == 1
    assert jax.grad(loss, argnums=(0, 1))(0.5, 3.0) == (0.0, 0.0)


@pytest.mark.slow
def test_of_each_example_under_vmap() -> None:
    hidden, weight, labels, _, _ = cases.draw(cases.case("vmap", leading=(3, 8)))
    scales, caps = jnp.asarray([0.5, -1.0, 2.0]), jnp.asarray([2.0, 3.0, 4.0])

    def loss(hidden, weight, labels, scale, cap):
        return linear_cross_entropy(hidden, weight, labels, logit_scale=scale, logit_softcap=cap, z_loss=1e-3)

    grad = jax.grad(loss, argnums=(0, 1))
    of_one = jax.jit(grad, static_argnums=(3, 4))
    got = jax.jit(jax.vmap(grad, in_axes=(0, None, 0, 0, 0)))(hidden, weight, labels, scales, caps)
    for i in range(3):
        want = of_one(hidden[i], weight, labels[i], float(scales[i]), float(caps[i]))
        assert all(oracle.relative_norm(a[i], b) < 2e-6 for a, b in zip(got, want, strict=True))


@pytest.mark.fast("jit, explicit")
@pytest.mark.parametrize(
    ("how", "name"),
    [("sharded", "both"), ("sharded, explicit", "both"), ("jit, auto", "scale below 0"), ("jit, explicit", "both")],
)
def test_over_a_mesh(how: str, name: str) -> None:
    call, arrays, numbers = draw(name, leading=(4, 8), V=128)
    want = fixed(call, arrays, numbers)
    kind = AxisType.Explicit if "explicit" in how else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    options = {"function": sharded_linear_logprobs, "batch_axes": "data"} if "sharded" in how else {}
    with jax.set_mesh(mesh):
        arrays = tuple(
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, (P("data"), P("tensor")), strict=True)
        )
        got = evaluate(call, arrays, make_arrays(numbers), **options)
    assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    hidden, weight, labels, _, _ = cases.draw(cases.case("shard_map", leading=(16,), V=128, spread=3.0))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def body(hidden, weight, labels, scale, cap):
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor", logit_scale=scale, logit_softcap=cap)
        return out.logprobs

    specs = (P("data"), P("tensor"), P("data"), P(), P())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    got = jax.jit(jax.grad(lambda h, w, *numbers: mapped(h, w, labels, *numbers).sum(), argnums=(0, 1)))(
        hidden, weight, jnp.float32(1.3), jnp.float32(4.0)
    )
    want = jax.grad(
        lambda h, w: linear_logprobs(h, w, labels, logit_scale=1.3, logit_softcap=4.0).logprobs.sum(), argnums=(0, 1)
    )(hidden, weight)
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("hopper")
def test_the_kernels_refuse_a_traced_cap_and_say_why() -> None:
    struct = jax.ShapeDtypeStruct
    call = (struct((512, 256), jnp.bfloat16), struct((1024, 256), jnp.bfloat16), struct((512,), jnp.int32))
    scalar = struct((), jnp.float32)
    assert explain(*call, logit_scale=scalar).implementation == "mosaic_gpu"
    assert explain(*call, logit_softcap=30.0).implementation == "mosaic_gpu"
    for options in ({"logit_softcap": scalar}, {"logit_softcap": 30.0, "logit_scale": scalar}):
        plan = explain(*call, **options)
        assert plan.implementation == "xla"
        assert "logit_softcap with an array" in plan.refused["mosaic_gpu"]
        with pytest.raises(UnsupportedError, match="the kernels have the cap and the scale as constants"):
            explain(*call, implementation="mosaic_gpu", **options)
