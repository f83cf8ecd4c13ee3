"""A Flax head under plain ``jit`` on a mesh: partitioned by the annotations of its weight."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax.flax.linen
import lce_jax.flax.nnx
from lce_jax import linear_cross_entropy, sharded_linear_cross_entropy
from tests import oracle
from tests.pairs import combined
from tests.partition_cases import HIDDEN, KINDS, LABELS, H, V, flops, mesh_of, put


@pytest.mark.fast("linen-AxisType.Explicit")
@combined(api=["nnx", "linen"], kind=KINDS)
def test_heads_without_axes(api: str, kind: AxisType) -> None:
    """A head that names no axis is partitioned by the annotations of its weight."""
    mesh = mesh_of(kind)
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))
    init = jax.nn.initializers.normal(0.1)
    run: Any
    with jax.set_mesh(mesh):
        if api == "nnx":
            annotated = nnx.with_partitioning(init, ("tensor", None))
            make = nnx.jit(lambda: lce_jax.flax.nnx.LMHead(H, V, weight_init=annotated, rngs=nnx.Rngs(0)))
            graph, state = nnx.split(make())
            weight = state["weight"][...]

            def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
                return nnx.merge(graph, nnx.State({"weight": state["weight"].replace(weight)})).loss(hidden, labels)
        else:
            head = lce_jax.flax.linen.LMHead(H, V, weight_init=nn.with_partitioning(init, ("tensor", None)))
            variables = nn.meta.unbox(jax.jit(lambda: head.init(jax.random.key(0), HIDDEN, LABELS, method="loss"))())
            weight = jax.device_put(variables["params"]["weight"], NamedSharding(mesh, P("tensor")))

            def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
                return head.apply({"params": {"weight": weight}}, hidden, labels, method="loss")

        assert weight.sharding.spec[0] == "tensor"
        compiled = jax.jit(jax.value_and_grad(run, argnums=(0, 1))).lower(hidden, weight, labels).compile()
        value, grads = compiled(hidden, weight, labels)
    told = functools.partial(sharded_linear_cross_entropy, mesh=mesh_of(AxisType.Auto), batch_axes="data")
    whole = np.asarray(weight)
    want, wanted = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1)))(HIDDEN, jnp.asarray(whole), LABELS)
    assert oracle.value_error(value, want) < 1e-6
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5
    cost = flops(jax.jit(jax.value_and_grad(told, argnums=(0, 1))), HIDDEN, jnp.asarray(whole), LABELS)
    assert compiled.cost_analysis()["flops"] < 1.1 * cost


@pytest.mark.fast("linen-AxisType.Explicit")
@combined(api=["nnx", "linen"], kind=KINDS)
def test_an_initializer_that_says_how_the_weight_is_split(api: str, kind: AxisType) -> None:
    """Its annotation is kept beside ``vocab_axis``, which must name the same axes for the rows."""
    mesh = mesh_of(kind)
    init, flax_api = jax.nn.initializers.normal(0.1), nnx if api == "nnx" else nn
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))

    def weight_of(names: tuple[Any, ...], vocab_size: int = V) -> P:
        annotated = flax_api.with_partitioning(init, names)
        options: dict[str, Any] = {"vocab_axis": "tensor", "batch_axes": "data", "weight_init": annotated}
        if api == "nnx":
            head = nnx.jit(lambda: lce_jax.flax.nnx.LMHead(H, vocab_size, rngs=nnx.Rngs(0), **options))()
            loss = nnx.jit(lambda head, hidden, labels: head.loss(hidden, labels))(head, hidden, labels)
            assert jnp.isfinite(loss)
            return head.weight[...].sharding.spec
        head = lce_jax.flax.linen.LMHead(H, vocab_size, **options)
        variables = jax.jit(lambda h, y: head.init(jax.random.key(0), h, y, method="loss"))(hidden, labels)
        assert jnp.isfinite(jax.jit(lambda *x: head.apply(*x, method="loss"))(variables, hidden, labels))
        return nn.get_partition_spec(variables)["params"]["weight"]

    with jax.set_mesh(mesh):
        assert tuple(weight_of(("tensor", "data"))) == ("tensor", "data")
        with pytest.raises(ValueError, match=r"weight_init splits the vocabulary over \('data',\), vocab_axis over"):
            weight_of(("data", None))
        with pytest.raises(ValueError, match="must divide by the 2 shards of vocab_axis 'tensor': give pad_to_mult"):
            weight_of(("tensor", None), V + 1)
