"""``sharded_*`` inside a ``shard_map`` that is manual over the data alone: as without one, its gradients too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import linear_logprobs, losses, sharded_linear_logprobs
from tests import oracle
from tests.draws import Draws
from tests.pairs import values_of
from tests.sharding_cases import B, H, S, V

DRAWS = Draws()
OPERANDS = DRAWS.normal(B, S, H), DRAWS.normal(V, H), DRAWS.integers(-1, V, B, S)
ROWS = P("data")


class Function(NamedTuple):
    """A function's name without and with its mesh, and a number made of its results."""

    name: str
    total: Callable[..., Any]

    def bind(self, sharded: bool, **axes: Any) -> Callable[..., Any]:
        function = getattr(lce_jax, f"sharded_{self.name}" if sharded else self.name)
        return lambda *operands: self.total(lambda *args, **more: function(*args, **axes, **more), *operands)


FUNCTIONS = [
    Function("linear_loss", lambda f, *x: f(losses.cross_entropy, *x)[0]),
    Function("linear_logprobs", lambda f, *x: jnp.sum(f(*x).logprobs)),
    Function("linear_cross_entropy", lambda f, *x: f(*x, reduction="sum")),
    Function("linear_logits", lambda f, hidden, weight, labels: jnp.sum(f(hidden, weight, labels[..., None]))),
    Function("linear_kl", lambda f, hidden, weight, _: jnp.sum(f(hidden, weight, hidden[..., ::-1], weight))),
]


def value_and_gradients(mesh: Any, weight_spec: P, axes: set[str] | None, how: dict[str, Any]) -> Any:
    """Of each function's sum over the data, and the gradients that are taken inside."""

    def body(*operands: Any) -> Any:
        found = []
        for function in FUNCTIONS:
            value, gradients = jax.value_and_grad(function.bind(**how), argnums=(0, 1))(*operands)
            found.append((lax.psum(value, "data"), gradients))
        return found

    specs = (ROWS, weight_spec, ROWS)
    more = {} if axes is None else {"axis_names": axes}
    out_specs = [(P(), (ROWS, weight_spec))] * len(FUNCTIONS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, **more)
    put = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(OPERANDS, specs, strict=True))
    return jax.jit(mapped)(*put)


@functools.cache
def run_on_one_device() -> Any:
    steps = [jax.value_and_grad(function.bind(False), argnums=(0, 1)) for function in FUNCTIONS]
    return jax.jit(lambda *operands: [step(*operands) for step in steps])(*OPERANDS)


@pytest.mark.slow
@values_of("kind", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])
def test_gradients_over_both_axes(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        given = {"mesh": mesh} if kind == AxisType.Auto else {}
        inside = value_and_gradients(mesh, P(), {"data"}, {"sharded": True, **given})
        by_hand = value_and_gradients(mesh, P("tensor"), None, {"sharded": False, "axis_name": "tensor"})
    for found in (inside, by_hand):
        for function, (value, gradients), (want, wanted) in zip(FUNCTIONS, found, run_on_one_device(), strict=True):
            assert oracle.value_error(value, want) < 5e-6, function.name
            for got, true in zip(gradients, wanted, strict=True):
                assert oracle.relative_norm(got, true) < 1e-5, function.name


def test_a_sum_inside_varies_as_its_tokens_do() -> None:
    """So ``shard_map`` refuses to return it as one number."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(FUNCTIONS[0].bind(True), in_specs=(ROWS, P(), ROWS), out_specs=P(), axis_names={"data"})
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(mapped, *OPERANDS)


def test_an_axis_that_is_manual_already() -> None:
    """It is refused, and what the message says is right."""
    hidden, weight, labels = OPERANDS
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))

    def map_over_data(function: Callable[..., Any], weight_spec: P, rows: P, **axes: Any) -> Any:
        def body(*operands: Any) -> Any:
            return function(*operands, **axes).logprobs

        mapped = jax.shard_map(body, in_specs=(rows, weight_spec, rows), out_specs=rows, axis_names={"data"})
        return jax.jit(mapped)(hidden, weight, labels)

    want = linear_logprobs(hidden, weight, labels).logprobs
    with jax.set_mesh(mesh):
        with pytest.raises(
            ValueError, match=r"batch_axes 'data': this is inside shard_map over 'data'.* Leave 'data' out"
        ):
            map_over_data(sharded_linear_logprobs, P(), ROWS, batch_axes="data")
        with pytest.raises(
            ValueError, match=r"vocab_axis 'data': .* without sharded_ in its name, with axis_name='data'"
        ):
            map_over_data(sharded_linear_logprobs, P("data"), P(), vocab_axis="data")
        for got in (
            map_over_data(sharded_linear_logprobs, P(), ROWS),
            map_over_data(linear_logprobs, P("data"), P(), axis_name="data"),
        ):
            assert oracle.value_error(got, want) < 2e-6
