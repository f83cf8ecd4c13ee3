"""Inside ``shard_map``, for all types of the operands, results and gradients are those of stored logits."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs
from tests import oracle
from tests.draws import Draws
from tests.pairs import combined

B, S, H, V = 2, 8, 16, 64
MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
DRAWS = Draws()
HIDDEN = DRAWS.normal(B, S, H)
WEIGHT = DRAWS.normal(V, H)
LABELS = DRAWS.integers(-2, V, B, S)
WHERE = DRAWS.chances(0.7, B, S)
TEMPERATURE = DRAWS.uniform(0.5, 2.0, B, S)
SEEDS = DRAWS.normal(3, B, S)
PER_TOKEN = {"labels": LABELS, "where": WHERE, "temperature": TEMPERATURE}


def total(out: Any, seeds: jax.Array) -> jax.Array:
    return jnp.sum(seeds[0] * out.logprobs + seeds[1] * out.entropy + seeds[2] * out.lse)


def stored(hidden: jax.Array, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The total and its gradients in float64."""
    value = total(oracle.logprobs(hidden, WEIGHT, LABELS, **options), SEEDS)
    return value, oracle.gradients(hidden, WEIGHT, LABELS, SEEDS, **options)


def whole(x: jax.Array, how: str) -> jax.Array:
    """A shard's operand as hand-written sequence parallelism makes it whole, or one that comes whole."""
    if how == "gathered":
        return lax.all_gather(x, "tensor", axis=1, tiled=True)  # typed varying over "tensor"
    return lax.pcast(x, "tensor", to="varying") if how == "cast" else x


def spec(how: str) -> P:
    return P("data", "tensor") if how == "gathered" else P("data")


def sharded(kinds: dict[str, str], use: str, options: tuple[str, ...]) -> Any:
    """The objective over the mesh: each shard takes the mean over all shards, or sums up a slice of its own."""

    def body(hidden: jax.Array, weight: jax.Array, per_token: dict[str, jax.Array], seeds: jax.Array) -> jax.Array:
        hidden = whole(hidden, kinds["hidden"])
        rows = {name: whole(x, kinds.get(name, "whole")) for name, x in per_token.items()}
        labels = rows.pop("labels")
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor", precision="highest", **rows)
        axes: tuple[str, ...] = ("data",)
        if use == "sliced":
            size, start = S // 4, lax.axis_index("tensor") * (S // 4)
            out, seeds = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, -1), (out, seeds))
            axes = ("data", "tensor")
        value = lax.psum(total(out, seeds), axes)
        return lax.pmean(value, "tensor") if use == "mean" else value

    def run(hidden: jax.Array, weight: jax.Array, check_vma: bool) -> jax.Array:
        per_token = {name: PER_TOKEN[name] for name in ("labels", *options)}
        specs = {name: spec(kinds.get(name, "whole")) for name in per_token}
        in_specs = (spec(kinds["hidden"]), P("tensor"), specs, P(None, "data"))
        mapped = jax.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
        return mapped(hidden, weight, per_token, SEEDS)

    return run


CASES = [
    *({"hidden": hidden, "labels": labels} for hidden, labels in itertools.product(("whole", "gathered"), repeat=2)),
    {"hidden": "gathered", "labels": "gathered", "where": "gathered"},
    {"hidden": "whole", "labels": "whole", "where": "gathered"},
    {"hidden": "gathered", "labels": "whole", "temperature": "gathered"},
]


@pytest.mark.fast("'labels': 'gathered")
@combined(kinds=CASES, check_vma=[True, False], use=["mean", "sliced"])
def test_every_type_gives_the_gradients_of_stored_logits(kinds: dict[str, str], check_vma: bool, use: str) -> None:
    check_gradients(kinds, check_vma, use)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["mean", pytest.param("sliced", marks=pytest.mark.slow)])
def test_whole_operands_that_are_cast(use: str) -> None:
    """With check_vma: nothing is typed without it."""
    check_gradients({"hidden": "cast", "labels": "cast", "where": "whole", "temperature": "cast"}, True, use)


def check_gradients(kinds: dict[str, str], check_vma: bool, use: str) -> None:
    options = tuple(name for name in ("where", "temperature") if name in kinds)
    run = sharded(kinds, use, options)
    value, grads = jax.jit(jax.value_and_grad(lambda h, w: run(h, w, check_vma), argnums=(0, 1)))(HIDDEN, WEIGHT)
    want, wanted = stored(HIDDEN, **{name: PER_TOKEN[name] for name in options})
    assert oracle.value_error(value, want) < 1e-5
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.slow), False])
def test_operands_that_differ_over_other_axes(check_vma: bool) -> None:
    """The tokens of the data shards share hidden states and a weight gathered over data, but not labels."""

    def body(hidden: jax.Array, weight: jax.Array, labels: jax.Array, seeds: jax.Array) -> jax.Array:
        weight = lax.all_gather(weight, "data", axis=1, tiled=True)
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor", precision="highest")
        return lax.psum(total(out, seeds), "data")

    def run(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        specs = (P(), P("tensor", "data"), P("data"), P(None, "data"))
        mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return mapped(hidden, weight, LABELS, SEEDS)

    hidden = HIDDEN[:1]
    value, grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(hidden, WEIGHT)
    want, (dhidden, dweight) = stored(jnp.concatenate([hidden, hidden]))
    assert oracle.value_error(value, want) < 1e-5
    for got, true in zip(grads, (dhidden.sum(0, keepdims=True), dweight), strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


def test_a_whole_weight_with_an_axis_is_refused() -> None:
    def body(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return linear_logprobs(hidden, weight, labels, axis_name="tensor").logprobs

    mapped = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data"), P()), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"weight \(32, 16\) .*'tensor'"):
        jax.eval_shape(mapped, HIDDEN, WEIGHT, LABELS)


def test_rows_of_one_shard_for_all_are_refused() -> None:
    """A bias and an adapter's B have rows of their own on each shard, as the weight has. The advice is followed."""
    draws = Draws(7)
    bias, a, b = draws.normal(V), draws.normal(3, H), draws.normal(V, 3)

    def mapped(spec: P, **head: Any) -> Any:
        def body(hidden: Any, weight: Any, labels: Any, head: Any) -> Any:
            lora = (a, head["b"], 2.0) if "b" in head else None
            out = linear_logprobs(
                hidden, weight, labels, axis_name="tensor", bias=head.get("bias"), lora=lora, precision="highest"
            )
            return out.logprobs

        specs = P("data"), P("tensor"), P("data"), spec
        run = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data"))
        return jax.jit(run)(HIDDEN, WEIGHT, LABELS, head)

    shards = MESH.shape["tensor"]
    with pytest.raises(ValueError, match=rf"bias \({V // shards},\) is the same .*in_specs=P\('tensor'\)\)"):
        mapped(P(), bias=bias[: V // shards])
    with pytest.raises(ValueError, match=rf"lora's B \({V // shards}, 3\) is the same .*P\('tensor', None\)\)"):
        mapped(P(), b=b[: V // shards])
    want = oracle.logprobs(HIDDEN, WEIGHT, LABELS, bias=bias).logprobs
    assert oracle.value_error(mapped(P("tensor"), bias=bias), want) < 1e-5
    merged = np.float64(WEIGHT) + 2.0 * np.float64(b) @ np.float64(a)
    want = oracle.logprobs(HIDDEN, merged, LABELS).logprobs
    assert oracle.value_error(mapped(P("tensor", None), b=b), want) < 1e-5


@pytest.mark.slow
def test_an_axis_of_one_device_needs_no_split() -> None:
    mesh = jax.make_mesh((2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:2])

    def body(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return linear_logprobs(hidden, weight, labels, axis_name="tensor").logprobs

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    assert oracle.value_error(mapped(HIDDEN, WEIGHT, LABELS), oracle.logprobs(HIDDEN, WEIGHT, LABELS).logprobs) < 1e-5
