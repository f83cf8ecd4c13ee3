"""Under plain ``jit`` on a mesh the operation is partitioned as a matrix product is, for every kind of axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_logprobs
from lce_jax.mesh._layout import layout_of_specs
from tests import oracle
from tests.mesh.functions import SPLITS
from tests.pairs import combined
from tests.partition_cases import HIDDEN, KINDS, LABELS, WEIGHT, mesh_of, put


@pytest.mark.parametrize(("tokens", "gathers_hidden"), [(4096, True), (1 << 20, False)])
def test_what_a_device_would_hold_decides_what_is_gathered(tokens: int, gathers_hidden: bool) -> None:
    """Not the hidden states of all replicas: a pod with more of them must gather the same."""
    for replicas in (1, 64):
        mesh = AbstractMesh((replicas, 8), ("data", "tensor"))
        hidden = jax.ShapeDtypeStruct((replicas, tokens, 64), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((1 << 15, 64), jnp.bfloat16)
        found = layout_of_specs(mesh, hidden, weight, P("data", "tensor"), P("tensor"), [], 0)
        assert (found.gather_dim == 1, found.vocab_axes == "tensor") == (gathers_hidden, gathers_hidden)
        assert found.token_shards == replicas * (1 if gathers_hidden else 8)


@pytest.mark.parametrize(
    ("split", "token_shards", "vocab_axes", "gather_dim"),
    [
        ("batch", 4, None, None),
        ("tokens alone", 4, None, None),
        ("sequence on the vocabulary's axis", 4, "tensor", 1),
        ("one axis for both", 1, "data", 0),
        ("hidden dimension", 4, "tensor", None),
        ("weight over both axes", 4, "tensor", None),
    ],
)
def test_splits_of_operands_split_the_work(split: str, token_shards: int, vocab_axes: Any, gather_dim: Any) -> None:
    """`test_every_function` has the results."""
    given, mesh = SPLITS[split], AbstractMesh((4, 2), ("data", "tensor"))
    found = layout_of_specs(mesh, HIDDEN, WEIGHT, given.hidden, given.weight, [given.tokens], 0)
    assert (found.token_shards, found.vocab_axes, found.gather_dim) == (token_shards, vocab_axes, gather_dim)


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
