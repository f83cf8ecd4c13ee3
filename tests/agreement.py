"""Calls of one case on a device and on a mesh, and the comparison of their results and gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle
from tests.sharding_cases import LAYOUTS, mesh_of


def evaluate(test: cases.TestCase, function: Any = linear_logprobs, place: Any = None, **more: Any) -> Any:
    """Returns results, and the gradients in hidden, weight and the bias, if there is one."""
    hidden, weight, labels, options, seeds = cases.draw(test)
    operands = (hidden, weight, options.pop("bias")) if "bias" in options else (hidden, weight)
    if place is not None:
        operands, labels = place(operands, labels, options)

    def objective(*operands: Any) -> Any:
        bias = {"bias": operands[2]} if len(operands) == 3 else {}
        out = function(*operands[:2], labels, **bias, **{"precision": "highest", **options, **more})
        return cases.objective(out, seeds), out

    argnums = tuple(range(len(operands)))
    (_, out), grads = jax.jit(jax.value_and_grad(objective, argnums=argnums, has_aux=True))(*operands)
    return out, grads


call_on_one_device = functools.cache(evaluate)


def call_over_named_axes(test: cases.TestCase, layout: str, axis_type: AxisType) -> Any:
    """Calls ``sharded_linear_logprobs`` with operands that are not split yet."""
    mesh = mesh_of(layout, axis_type)
    with jax.set_mesh(mesh):
        return evaluate(test, functools.partial(sharded_linear_logprobs, mesh=mesh, **LAYOUTS[layout][2]))


def call_on_split_operands(test: cases.TestCase, layout: str, axis_type: AxisType) -> Any:
    """Calls ``linear_logprobs`` with operands that are split over "data" and "tensor"."""
    mesh = mesh_of(layout, axis_type)

    def put(x: Any, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    def place(operands: Any, labels: Any, options: Any) -> Any:
        if "candidates" in options:
            options["candidates"] = put(options["candidates"], P("data"))
        specs = P("data"), weight_spec(test), P("tensor")
        return [put(x, spec) for x, spec in zip(operands, specs, strict=False)], put(labels, P("data"))

    with jax.set_mesh(mesh):
        return evaluate(test, place=place)


def call_inside_shard_map(test: cases.TestCase, layout: str, check_vma: bool) -> Any:
    """Calls ``linear_logprobs`` in each shard, with ``axis_name``. The gradient is that of the ``shard_map``."""
    per_token = "where", "temperature", "candidates", "logit_floor"

    def mapped(hidden: Any, weight: Any, labels: Any, bias: Any = None, **options: Any) -> Any:
        rows = {name: options.pop(name) for name in per_token if isinstance(options.get(name), jax.Array)}

        def body(hidden: Any, weight: Any, bias: Any, labels: Any, rows: Any) -> Any:
            return linear_logprobs(hidden, weight, labels, bias=bias, axis_name="tensor", **rows, **options)

        specs = P("data"), weight_spec(test), P("tensor"), P("data"), P("data")
        mapped_body = jax.shard_map(
            body, mesh=mesh_of(layout, AxisType.Auto), in_specs=specs, out_specs=P("data"), check_vma=check_vma
        )
        return mapped_body(hidden, weight, bias, labels, rows)

    return evaluate(test, mapped)


def weight_spec(test: cases.TestCase) -> P:
    """Returns how the case's weight is split."""
    return P("tensor") if dict(test.options).get("weight_layout") != "hv" else P(None, "tensor")


def assert_same(got: Any, want: Any) -> None:
    """Compares up to a few roundings of float32. Partial sums in 16 bits round once more, by half a unit in 2^8."""
    for name, field in got[0]._asdict().items():
        true = getattr(want[0], name)
        assert (field is None) == (true is None), name
        assert field is None or oracle.value_error(field, true) < 2e-6, name
    for gradient, true in zip(got[1], want[1], strict=True):
        assert (gradient.shape, gradient.dtype) == (true.shape, true.dtype)
        assert oracle.relative_norm(gradient, true) < (1e-5 if true.dtype == "float32" else 4e-3)
