"""Where XLA cannot partition the operation by itself, a message says what to call, and that gives right numbers."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import (
    UnsupportedError,
    explain,
    linear_cross_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    losses,
    masked_logprobs,
    sharded_linear_logprobs,
)
from lce_jax.mesh import _custom_partitioning
from lce_jax.types._jax import abstract_device
from tests import oracle
from tests.partition_cases import HIDDEN, KINDS, LABELS, WEIGHT, H, V, mesh_of, put


def test_a_cache_under_auto_axes_says_that_it_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto)
    hidden, labels = put(HIDDEN, mesh, P("data")), put(LABELS, mesh, P("data"))
    _custom_partitioning.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        jax.jit(jax.grad(lambda w: linear_logprobs(hidden, w, labels, cache_bytes=1 << 20).lse.sum())).lower(WEIGHT)
    assert "call sharded_linear_logprobs" in caplog.text


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shard_map_over_some_axes(kind: AxisType, caplog: pytest.LogCaptureFixture) -> None:
    """The other axes cannot be read there: Explicit ones that split something are refused, Auto ones give a warning."""
    mesh = mesh_of(kind)

    def some(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, weight, labels).lse

    def all_(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:  # as the messages advise
        return linear_logprobs(hidden, weight, labels, axis_name="tensor").lse

    rows = P("data")
    operands = put(HIDDEN, mesh, rows), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, rows)
    _custom_partitioning.warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger="lce_jax"):
        over_data = jax.shard_map(some, in_specs=(rows, P(), rows), out_specs=rows, axis_names={"data"})
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"\['tensor'\] .*make shard_map manual over these"):
                jax.jit(over_data)(*operands)
        else:
            jax.jit(over_data).lower(*operands)
            assert "make shard_map manual over these too" in caplog.text
        over_both = jax.shard_map(all_, in_specs=(rows, P("tensor"), rows), out_specs=rows)
        got = jax.jit(over_both)(*operands)
    assert oracle.value_error(got, linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6


def test_axes_of_both_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """Types show what Explicit axes split, but not what Auto axes split."""
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds, devices=jax.devices("cpu"))
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    _custom_partitioning.warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger="lce_jax"):
        got = jax.jit(linear_logprobs)(*operands).lse
        assert "treats its operands as replicated over 'tensor'" in caplog.text
        told = jax.jit(functools.partial(sharded_linear_logprobs, batch_axes="data"))(*operands).lse
    for lse in (got, told):
        assert oracle.value_error(lse, linear_logprobs(HIDDEN, WEIGHT, LABELS).lse) < 2e-6


FUNCTIONS = {
    "linear_kl": lambda *operands: linear_kl(*operands[:2], *operands[:2]),
    "linear_logits": lambda hidden, weight, labels: linear_logits(hidden, weight, labels[..., None]),
    "linear_loss": lambda *operands: linear_loss(losses.cross_entropy, *operands)[0],
    "linear_topk": lambda *operands: linear_topk(*operands[:2], 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_warnings_name_the_function_that_was_called(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = (AxisType.Explicit, AxisType.Auto)
    both = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds, devices=jax.devices("cpu"))
    operands = put(HIDDEN, both, P("data")), put(WEIGHT, both, P()), put(LABELS, both, P("data"))
    _custom_partitioning.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lce_jax"):
        with jax.set_mesh(both):
            jax.eval_shape(FUNCTIONS[name], *operands)
        with jax.set_mesh(mesh_of(AxisType.Auto)):
            over = jax.shard_map(FUNCTIONS[name], in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
            jax.eval_shape(over, HIDDEN, WEIGHT, LABELS)
    assert f"{name} treats its operands as replicated over 'tensor'" in caplog.text
    assert f"or call sharded_{name}" in caplog.text
    assert f"{name} inside shard_map over 'data'" in caplog.text
    assert "linear_logprobs" not in caplog.text


def test_export_says_that_it_loses_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto)
    operands = put(HIDDEN, mesh, P("data")), put(WEIGHT, mesh, P("tensor")), put(LABELS, mesh, P("data"))
    _custom_partitioning.warn_once.cache_clear()
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


@pytest.mark.parametrize("symbol", ["T", "H", "V", "K"])
def test_symbolic_shapes_are_refused(symbol: str) -> None:
    (n,), at = jax.export.symbolic_shape("n"), {"T": 16, "H": H, "V": V, "K": 3}
    at |= {symbol: n}
    shapes = (at["T"], at["H"]), (at["V"], at["H"]), (at["T"],), (at["T"], at["K"])
    structs = [jax.ShapeDtypeStruct(shape, "float32" if i < 2 else "int32") for i, shape in enumerate(shapes)]
    of_ids = {
        "linear_logits": lambda hidden, weight, _, ids: linear_logits(hidden, weight, ids),
        "candidates": lambda *x: linear_logprobs(*x[:3], candidates=x[3]),
    }
    plain = {"linear_logprobs": linear_logprobs, "linear_cross_entropy": linear_cross_entropy}
    called = {name: lambda *x, f=f: f(*x[:3]) for name, f in (FUNCTIONS | plain).items()}
    for function in (of_ids if symbol == "K" else called | of_ids).values():
        with pytest.raises(UnsupportedError, match=r"symbolic size, .* Export one"):
            jax.export.export(jax.jit(function))(*structs)
    if symbol == "T":  # these read no weight
        logprobs, ids = jax.ShapeDtypeStruct((n, 3), "float32"), structs[3]
        jax.export.export(jax.jit(masked_logprobs))(logprobs, ids, structs[2])
        jax.export.export(jax.jit(losses.distillation_loss))(logprobs, logprobs, ids)


@pytest.mark.slow
def test_programs_of_a_few_sizes_serve_others() -> None:
    """As the message that refuses symbolic shapes advises."""

    def f(hidden: jax.Array, weight: jax.Array, labels: jax.Array, where: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, weight, labels, where=where).logprobs

    def shapes(n: int) -> list[jax.ShapeDtypeStruct]:
        each = ((n, H), jnp.float32), ((V, H), jnp.float32), ((n,), jnp.int32), ((n,), jnp.bool_)
        return [jax.ShapeDtypeStruct(*x) for x in each]

    programs = {n: jax.export.export(jax.jit(f))(*shapes(n)) for n in (8, 32)}
    hidden, labels = HIDDEN.reshape(-1, H), LABELS.reshape(-1)
    want = linear_logprobs(hidden, WEIGHT, labels).logprobs
    for count, n in ((3, 8), (8, 8), (27, 32)):
        padded = [jnp.pad(x[:count], [(0, n - count)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden, labels)]
        got = programs[n].call(padded[0], WEIGHT, padded[1], jnp.arange(n) < count)
        assert oracle.value_error(got[:count], want[:count]) < 2e-6
        assert not got[count:].any()


def test_auto_axes_of_tpus_are_refused() -> None:
    """Their compiler reads no rule. What the message advises is compiled for TPUs by `make test-tpu`."""
    kinds, v5p = (AxisType.Auto,) * 2, abstract_device("tpu", "TPU v5", 2)
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=kinds, abstract_device=v5p)

    def struct(x: jax.Array, *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    operands = struct(HIDDEN, "data"), struct(WEIGHT, "tensor"), struct(LABELS, "data")
    advice = "Give sharded_linear_logprobs .*the axes of {'data': 2, 'tensor': 4} as vocab_axis= and batch_axes="
    for call in (jax.jit(linear_logprobs).trace, explain):
        with pytest.raises(UnsupportedError, match=advice):
            call(*operands)
    given = {"mesh": mesh, "vocab_axis": "tensor", "batch_axes": "data"}
    jax.jit(lambda *x: sharded_linear_logprobs(*x, **given)).trace(*operands)  # as the message advises
    assert explain(*operands, **given).call.num_tokens == LABELS.size // 2

    def own(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:  # keeps Auto out of shard_map
        plan = explain(hidden, weight, labels)
        assert (plan.call.num_tokens, plan.call.device.kind) == (LABELS.size // 2, "TPU v5")
        return linear_cross_entropy(hidden, weight, labels, cache_bytes=1 << 20, reduction="none")

    specs = (P("data"), P(), P("data"))
    jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("data"))).trace(*operands)
