"""Under plain ``jit`` on a mesh the operation is partitioned as a matrix product is, whatever kind of axes it has."""

from __future__ import annotations

import functools
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax.flax.linen
import lce_jax.flax.nnx
from lce_jax import (
    _xla_partitioning,
    linear_cross_entropy,
    linear_logprobs,
    sharded_linear_cross_entropy,
    sharded_linear_logprobs,
)
from tests import oracle

B, S, H, V = 8, 16, 64, 4096  # several vocabulary tiles a device: XLA merges a single one with the backward's
KEYS = jax.random.split(jax.random.key(0), 6)
HIDDEN = jax.random.normal(KEYS[0], (B, S, H))
WEIGHT = jax.random.normal(KEYS[1], (V, H)) / 8
LABELS = jax.random.randint(KEYS[2], (B, S), -1, V)
WHERE = jax.random.bernoulli(KEYS[3], 0.6, (B, S))
TEMPERATURE = jax.random.uniform(KEYS[4], (B, S), minval=0.5, maxval=2.0)
SEEDS = jax.random.normal(KEYS[5], (3, B, S))
KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))


def put(x: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def objective(function: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array, *rows: jax.Array) -> Any:
    where, temperature = rows or (None, 1.0)
    out = function(hidden, weight, labels, where=where, temperature=temperature)
    return jnp.sum(SEEDS[0] * out.logprobs + SEEDS[1] * out.entropy + SEEDS[2] * out.lse), out


def step(function: Any = linear_logprobs) -> Any:
    run = functools.partial(objective, function)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


def assert_same(got: Any, want: Any) -> None:
    ((value, out), grads), ((true, wanted), expected) = got, want
    assert oracle.value_error(value, true) < 1e-5
    for a, b in zip(out[:3], wanted[:3], strict=True):
        assert oracle.value_error(a, b) < 2e-6
    for a, b in zip(grads, expected, strict=True):
        assert oracle.relative_norm(a, b) < 1e-5


# How hidden, weight and everything per token lie, and what `sharded_linear_logprobs` is told for the same split.
PLACES: dict[str, tuple[P, P, P, dict[str, Any]]] = {
    "batch": (P("data"), P(), P("data"), {"batch_axes": "data", "vocab_axis": None}),
    "batch and vocabulary": (P("data"), P("tensor"), P("data"), {"batch_axes": "data"}),
    "labels alone": (P(), P(), P("data"), {"batch_axes": "data", "vocab_axis": None}),
    "sequence on the vocabulary's axis": (
        P("data", "tensor"), P("tensor"), P("data"), {"batch_axes": "data", "sequence_axis": "tensor"},
    ),
    "weight split twice": (P("data"), P("tensor", "data"), P("data"), {"batch_axes": "data"}),
    "hidden dimension split": (P("data", None, "tensor"), P("tensor"), P("data"), {"batch_axes": "data"}),
}  # fmt: skip


@functools.cache
def single() -> Any:
    return step()(HIDDEN, WEIGHT, LABELS, WHERE, TEMPERATURE)


@functools.cache
def told_flops(place: str) -> float:
    function = functools.partial(sharded_linear_logprobs, mesh=mesh_of(AxisType.Auto), **PLACES[place][3])
    return flops(step(function), HIDDEN, WEIGHT, LABELS, WHERE, TEMPERATURE)


def flops(run: Any, *operands: Any) -> float:
    """Of one device's program."""
    return run.lower(*operands).compile().cost_analysis()["flops"]


def names(x: jax.Array) -> tuple[Any, ...]:
    """The mesh axes of each dimension."""
    return tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_split_operands_split_the_work(place: str, kind: AxisType) -> None:
    mesh = mesh_of(kind)
    specs = (*PLACES[place][:2], *(PLACES[place][2],) * 3)
    operands = [put(x, mesh, s) for x, s in zip((HIDDEN, WEIGHT, LABELS, WHERE, TEMPERATURE), specs, strict=True)]
    compiled = step().lower(*operands).compile()
    got = compiled(*operands)
    assert_same(got, single())
    assert compiled.cost_analysis()["flops"] < 1.1 * told_flops(place)
    if kind == AxisType.Explicit:
        for gradient, operand in zip(got[1], operands, strict=False):
            assert names(gradient) == names(operand)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("place", ["set_mesh", "batch of both"])
def test_one_axis_for_tokens_and_vocabulary(place: str, kind: AxisType) -> None:
    """An axis cannot split both at once: the smaller operand is gathered, or the mesh comes from the context."""
    mesh = mesh_of(kind)
    if place == "set_mesh":
        with jax.set_mesh(mesh):

            def run(hidden: jax.Array, weight: jax.Array, *rows: jax.Array) -> Any:
                split = jax.sharding.reshard if kind == AxisType.Explicit else lax.with_sharding_constraint
                return objective(linear_logprobs, split(hidden, P("data")), split(weight, P("tensor")), *rows)

            got = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(HIDDEN, WEIGHT, LABELS)
            assert_same(got, step()(HIDDEN, WEIGHT, LABELS))
        return
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))
    for size in (V, 128):  # hidden states are the smaller operand, then the larger one
        weight = put(WEIGHT[:size], mesh, P("data"))
        assert_same(step()(hidden, weight, labels), step()(HIDDEN, WEIGHT[:size], LABELS))


def test_in_shardings_alone_split_the_work() -> None:
    """They are in no type: XLA's rule sees them."""
    mesh = mesh_of(AxisType.Auto)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P("data"), P("tensor"), P("data"), P("data"), P("data")))
    run = functools.partial(objective, linear_logprobs)
    jitted = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), in_shardings=shardings)
    operands = (HIDDEN, WEIGHT, LABELS, WHERE, TEMPERATURE)
    compiled = jitted.lower(*operands).compile()
    assert_same(compiled(*operands), single())
    assert compiled.cost_analysis()["flops"] < 1.1 * told_flops("batch and vocabulary")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_losses(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    options: dict[str, Any] = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 1e-3, "vocab_size": 3000}
    run = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, **options), argnums=(0, 1)))
    told = functools.partial(sharded_linear_cross_entropy, mesh=mesh_of(AxisType.Auto), batch_axes="data", **options)
    compiled = run.lower(*operands).compile()
    value, grads = compiled(*operands)
    want, wanted = run(HIDDEN, WEIGHT, LABELS)
    assert oracle.value_error(value, want) < 1e-6
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5
    assert flops(run, *operands) < 1.1 * flops(
        jax.jit(jax.value_and_grad(told, argnums=(0, 1))), HIDDEN, WEIGHT, LABELS
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("api", ["nnx", "linen"])
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
    want, wanted = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))(HIDDEN, jnp.asarray(whole), LABELS)
    assert oracle.value_error(value, want) < 1e-6
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5
    cost = flops(jax.jit(jax.value_and_grad(told, argnums=(0, 1))), HIDDEN, jnp.asarray(whole), LABELS)
    assert compiled.cost_analysis()["flops"] < 1.1 * cost


def loss_of_example(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels)
    return jnp.sum(out.logprobs + 0.1 * out.entropy)


@functools.cache
def gradients_of_examples() -> Any:
    return jax.jit(jax.grad(loss_of_example, argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_vmap_over_a_split_batch(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    want = gradients_of_examples()
    many = jax.vmap(loss_of_example, in_axes=(0, None, 0))
    outside = jax.jit(jax.grad(lambda *x: many(*x).sum(), argnums=(0, 1)))(*operands)
    inside = jax.jit(jax.vmap(jax.grad(loss_of_example, argnums=(0, 1)), in_axes=(0, None, 0)))(*operands)
    for dhidden, dweight in (outside, (inside[0], inside[1].sum(0))):
        assert oracle.relative_norm(dhidden, want[0]) < 1e-5
        assert oracle.relative_norm(dweight, want[1]) < 1e-5
    weights = jnp.stack([WEIGHT, 2 * WEIGHT])
    each = jax.jit(jax.vmap(loss_of_example, in_axes=(None, 0, None)))(operands[0], weights, operands[2])
    assert oracle.value_error(each[0], loss_of_example(HIDDEN, WEIGHT, LABELS)) < 1e-5


@pytest.mark.parametrize("call", ["sharded", "shard_map"])
def test_vmap_with_a_mesh_axis(call: str) -> None:
    """``spmd_axis_name`` spreads the batch over an axis, from outside ``shard_map``."""
    mesh = mesh_of(AxisType.Auto)

    def own(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        out = linear_logprobs(hidden, weight, labels, axis_name="tensor")
        return out.logprobs + 0.1 * out.entropy

    def example(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        if call == "sharded":
            out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh)
            return out.logprobs + 0.1 * out.entropy
        return jax.shard_map(own, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P())(hidden, weight, labels)

    many = jax.vmap(example, in_axes=(0, None, 0), spmd_axis_name="data")
    grads = jax.jit(jax.grad(lambda *x: many(*x).sum(), argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS)
    for got, true in zip(grads, gradients_of_examples(), strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


def test_what_vmap_cannot_take_one_by_one_is_refused() -> None:
    mesh = mesh_of(AxisType.Explicit)
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))

    def example(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda w: linear_logprobs(hidden, w, labels, cache_bytes=1 << 20).lse.sum())(WEIGHT)

    with pytest.raises(ValueError, match="Give hidden and labels the batch as a leading dimension"):
        jax.jit(jax.vmap(example))(hidden, labels)


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


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", ["no tokens", "no leading dimension", "ragged", "hv", "remat in a scan", "cache"])
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
    want, wanted = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight, labels)
    assert oracle.value_error(value, want) < 1e-5
    for got, true in zip(grads, wanted, strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


def test_outside_jit() -> None:
    mesh = mesh_of(AxisType.Auto)
    out = linear_logprobs(put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), LABELS)
    assert out.logprobs.sharding.spec[0] == "data"
    assert oracle.value_error(out.logprobs, linear_logprobs(HIDDEN, WEIGHT, LABELS).logprobs) < 2e-6


def test_a_cache_under_auto_axes_says_that_it_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto)
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))
    _xla_partitioning.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        jax.jit(jax.grad(lambda w: linear_logprobs(hidden, w, labels, cache_bytes=1 << 20).lse.sum())).lower(WEIGHT)
    assert "call sharded_linear_logprobs" in caplog.text


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shard_map_over_some_axes(kind: AxisType, caplog: pytest.LogCaptureFixture) -> None:
    """The others cannot be read there: Explicit ones are refused where they split something, Auto ones warned of."""
    mesh = mesh_of(kind)

    def some(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, weight, labels).lse

    def all_(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:  # as the messages advise
        return linear_logprobs(hidden, weight, labels, axis_name="tensor").lse

    rows = P("data")
    operands = put(HIDDEN, mesh, rows), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, rows)
    _xla_partitioning.warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger="lce_jax"):
        over_data = jax.shard_map(some, in_specs=(rows, P(), rows), out_specs=rows, axis_names={"data"})
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"split over \['tensor'\] as well: make shard_map manual over these"):
                jax.jit(over_data)(*operands)
        else:
            jax.jit(over_data).lower(*operands)
            assert "make shard_map manual over these too" in caplog.text
        over_both = jax.shard_map(all_, in_specs=(rows, P("tensor"), rows), out_specs=rows)
        got = jax.jit(over_both)(*operands)
    assert oracle.value_error(got, linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6


def test_axes_of_both_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """What Auto axes split is not in the types that Explicit ones are read from."""
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds, devices=jax.devices("cpu"))
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    _xla_partitioning.warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger="lce_jax"):
        got = jax.jit(linear_logprobs)(*operands).lse
        assert "takes its operands as whole over 'tensor'" in caplog.text
        told = jax.jit(functools.partial(sharded_linear_logprobs, batch_axes="data"))(*operands).lse
    for lse in (got, told):
        assert oracle.value_error(lse, linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6


def test_export_says_that_it_loses_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    _xla_partitioning.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        exported = jax.export.export(jax.jit(lambda *x: linear_logprobs(*x).lse))(*operands)
    assert "Export sharded_linear_logprobs" in caplog.text
    assert oracle.value_error(exported.call(*operands), linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6
    caplog.clear()
    told = jax.jit(lambda *x: sharded_linear_logprobs(*x, mesh=mesh, batch_axes="data").lse)  # as the message advises
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        exported = jax.export.export(told)(*operands)
    assert caplog.text == ""
    assert oracle.value_error(exported.call(*operands), linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6


def test_symbolic_shapes() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct
    operands = struct((batch, H), jnp.float32), struct((V, H), jnp.float32), struct((batch,), jnp.int32)
    with pytest.raises(lce_jax.UnsupportedError, match=r"symbolic: tokens b\. Export one program for each"):
        jax.export.export(jax.jit(linear_logprobs))(*operands)
    stored = functools.partial(linear_logprobs, implementation="reference")  # as the message advises
    exported = jax.export.export(jax.jit(lambda *x: stored(*x).lse))(*operands)
    assert (
        oracle.value_error(exported.call(HIDDEN[0], WEIGHT, LABELS[0]), stored(HIDDEN[0], WEIGHT, LABELS[0]).lse) < 2e-6
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_an_initializer_that_says_how_the_weight_is_split(api: str, kind: AxisType) -> None:
    """It stands as it is beside ``vocab_axis``, which must name the same axes for the rows."""
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
