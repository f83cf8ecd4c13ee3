"""Under plain ``jit`` on a mesh the operation is partitioned as a matrix product is, for every kind of axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import explain, linear_logprobs
from tests import oracle
from tests.mesh.functions import SPLITS
from tests.pairs import combined
from tests.partition_cases import HIDDEN, KINDS, LABELS, WEIGHT, mesh_of, put


def shares(mesh: Any, specs: tuple[P, P, P], shape: tuple[int, int, int], V: int) -> tuple[int, int]:
    """The tokens and the columns that a device computes."""
    arrays = (shape, "bfloat16"), ((V, shape[-1]), "bfloat16"), (shape[:-1], "int32")
    given = [
        jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    call = explain(*given, implementation="xla").call
    return call.num_tokens, call.columns


@pytest.mark.parametrize(("tokens", "own"), [(4096, (4096, 1 << 12)), (1 << 20, (1 << 17, 1 << 15))])
def test_what_a_device_would_hold_decides_what_is_gathered(tokens: int, own: tuple[int, int]) -> None:
    """Few tokens' hidden states, or the weight. A pod with more replicas must gather the same."""
    specs = P("data", "tensor"), P("tensor"), P("data", "tensor")
    for replicas in (1, 64):
        mesh = AbstractMesh((replicas, 8), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
        assert shares(mesh, specs, (replicas, tokens, 64), 1 << 15) == own


@pytest.mark.parametrize(
    ("split", "tokens", "columns"),
    [
        ("batch", 4, 1),
        ("tokens alone", 4, 1),
        ("sequence on the vocabulary's axis", 4, 2),
        ("one axis for both", 1, 4),
        ("hidden dimension", 4, 2),
        ("weight over both axes", 4, 2),
    ],
)
def test_splits_of_operands_split_the_work(split: str, tokens: int, columns: int) -> None:
    """Into so many parts. `test_every_function` has the results."""
    specs, mesh = SPLITS[split], mesh_of(AxisType.Explicit)
    own = shares(mesh, (specs.hidden, specs.weight, specs.tokens), HIDDEN.shape, len(WEIGHT))
    assert own == (LABELS.size // tokens, len(WEIGHT) // columns)


@pytest.mark.fast("True")
@pytest.mark.parametrize("outside", [True, False])
def test_a_weight_whose_gradient_is_not_to_be_summed(outside: bool) -> None:
    """``reduced={"data"}`` asks for a gradient that stays unreduced over data, inside ``shard_map`` and outside."""
    mesh = mesh_of(AxisType.Explicit)

    def own(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return lax.psum(linear_logprobs(hidden, weight, labels, axis_name="tensor").lse.sum(), "data")

    with jax.set_mesh(mesh):
        kinds = (P("data"), P("tensor", None, reduced={"data"}), P("data"))
        mapped = jax.shard_map(own, in_specs=kinds, out_specs=P())

        @jax.jit
        def gradient(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            weight = jax.reshard(weight, kinds[1])
            loss = (lambda w: linear_logprobs(hidden, w, labels).lse.sum()) if outside else None
            got = jax.grad(loss or (lambda w: mapped(hidden, w, labels)))(weight)
            assert jax.typeof(got).sharding.spec.unreduced == {"data"}
            return jax.reshard(got, P("tensor"))

        got = gradient(put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data")))
    want = jax.grad(lambda w: linear_logprobs(HIDDEN, w, LABELS).lse.sum())(WEIGHT)
    assert oracle.relative_norm(got, want) < 1e-5


@pytest.mark.fast("ragged-AxisType.Explicit", "cache-AxisType.Auto")
@combined(shape=["no tokens", "no leading dimension", "ragged", "hv", "remat in a scan", "cache"], kind=KINDS)
def test_shapes_and_transforms(shape: str, kind: AxisType) -> None:
    mesh = mesh_of(kind)
    hidden, weight, labels = HIDDEN, WEIGHT, LABELS
    specs, options, run = (P("data"), P("tensor"), P("data")), {}, linear_logprobs
    if shape == "no tokens":
        hidden, labels = HIDDEN[:, :0], LABELS[:, :0]
    elif shape == "no leading dimension":
        hidden, labels, specs = HIDDEN[0, 0], LABELS[0, 0], (P(), P("tensor"), P())
    elif shape == "ragged":
        hidden, weight, labels, specs = HIDDEN[:7], WEIGHT[:509], LABELS[:7], (P(None, "data"), P(), P(None, "data"))
    elif shape == "hv":
        weight, specs, options = WEIGHT.T, (P("data"), P(None, "tensor"), P("data")), {"weight_layout": "hv"}
    elif shape == "cache":
        options = {"cache_bytes": 1 << 20}
    elif shape == "remat in a scan":
        specs = (P(None, "data"), P("tensor"), P(None, "data"))

        def run(hidden: Any, weight: Any, labels: Any) -> Any:
            one = jax.checkpoint(linear_logprobs)
            return lax.scan(lambda _, x: (None, one(x[0], weight, x[1])), None, (hidden, labels))[1]

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        out = run(hidden, weight, labels, **options)
        return jnp.sum(out.logprobs + 0.1 * out.entropy)

    operands = [put(x, mesh, s) for x, s in zip((hidden, weight, labels), specs, strict=True)]
    with jax.set_mesh(mesh):
        value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*operands)
    want, wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight, labels)
    assert oracle.value_error(value, want) < 1e-5
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


def test_outside_jit() -> None:
    mesh = mesh_of(AxisType.Auto)
    out = linear_logprobs(put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), LABELS)
    assert out.logprobs.sharding.spec[0] == "data"
    assert oracle.value_error(out.logprobs, linear_logprobs(HIDDEN, WEIGHT, LABELS).logprobs) < 2e-6
