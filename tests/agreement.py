"""Results and gradients of one case by two ways of calling it, and whether they agree."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs, sharded_linear_logprobs
from tests import cases, oracle

WAYS = ("sharded", "sequence over the vocabulary's axis", "jit")  # over a mesh


def evaluate(test: cases.TestCase, function: Any = linear_logprobs, place: Any = None, **more: Any) -> Any:
    """Results and the gradients in hidden, weight and the bias, if there is one."""
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


on_one_device = functools.cache(evaluate)


def over_a_mesh(test: cases.TestCase, way: str, axis_type: AxisType) -> Any:
    """The same over 2 parts of the batch and 4 of the vocabulary, by one of the `WAYS`."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    vocab = P("tensor") if dict(test.options).get("weight_layout") != "hv" else P(None, "tensor")

    def put(x: Any, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    def place(operands: Any, labels: Any, options: Any) -> Any:
        if "candidates" in options:
            options["candidates"] = put(options["candidates"], P("data"))
        specs = (P("data"), vocab, P("tensor"))
        return [put(x, spec) for x, spec in zip(operands, specs, strict=False)], put(labels, P("data"))

    with jax.set_mesh(mesh):
        if way == "jit":
            return evaluate(test, place=place)
        sequence = {"sequence_axis": "tensor"} if "sequence" in way else {}
        return evaluate(test, sharded_linear_logprobs, batch_axes="data", **sequence)


def assert_same(got: Any, want: Any) -> None:
    for name, field in got[0]._asdict().items():
        true = getattr(want[0], name)
        assert (field is None) == (true is None), name
        assert field is None or oracle.value_error(field, true) < 2e-6, name
    for gradient, true in zip(got[1], want[1], strict=True):
        assert (gradient.shape, gradient.dtype) == (true.shape, true.dtype)
        assert oracle.relative_norm(gradient, true) < 1e-5
