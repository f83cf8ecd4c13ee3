"""`linear_loss` over meshes: inside ``shard_map``, from outside it, and under plain ``jit``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_loss, sharded_linear_loss
from tests import oracle
from tests.draws import Draws
from tests.ops.test_linear_loss import arguments, ppo, two_passes
from tests.pairs import combined

B, S, H, V = 4, 128, 16, 64
DRAWS = Draws()
HIDDEN = DRAWS.normal(B, S, H)
WEIGHT = DRAWS.normal(V, H)
LABELS = DRAWS.integers(-2, V, B, S)
# One device's rows all left out, another's all kept: their numbers of chunks differ.
WHERE = DRAWS.chances(0.4, B, S).at[0].set(False).at[1].set(True)
OLD, ADVANTAGE, GROUP = arguments(LABELS)
BIAS = jnp.linspace(-1.0, 1.0, V)


def mesh_of(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(kind,) * 2, devices=devices)


@functools.cache
def expected(masked: bool = True, biased: bool = False) -> Any:
    def total(hidden: Any, weight: Any, advantage: Any, scale: Any) -> Any:
        extra = {"bias": BIAS} if biased else {}
        return two_passes(scaled(scale), hidden, weight, LABELS, OLD, advantage, GROUP,
                          where=WHERE if masked else None, precision="highest", **extra)  # fmt: skip

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))(HIDDEN, WEIGHT, ADVANTAGE, 1.5)


def scaled(scale: Any) -> Any:
    """A loss that closes over a number."""
    return lambda logprob, entropy, lse, *own: ppo(logprob, scale * entropy, lse, *own)


def assert_same(got: Any, want: Any) -> None:
    assert oracle.value_error(got[0], want[0]) < 1e-5
    for x, y in zip(got[1], want[1], strict=True):
        assert oracle.relative_norm(x, y) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axes", "kind"),
    [
        pytest.param((1, 1), {}, AxisType.Auto, marks=pytest.mark.slow),
        ((2, 4), {"batch_axes": "data", "sequence_axis": "tensor"}, AxisType.Explicit),
        ((2, 2), {"vocab_axis": None, "batch_axes": "data", "sequence_axis": "tensor"}, AxisType.Auto),
    ],
)
def test_from_outside(shape: tuple[int, int], axes: dict[str, Any], kind: AxisType) -> None:
    mesh = mesh_of(shape, kind)

    def total(hidden: Any, weight: Any, advantage: Any, scale: Any) -> Any:
        return sharded_linear_loss(
            scaled(scale), hidden, weight, LABELS, OLD, advantage, GROUP,
            mesh=mesh, where=WHERE, chunk_bytes=1, precision="highest", **axes,
        )  # fmt: skip

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))
        (value, out), grads = step(HIDDEN, WEIGHT, ADVANTAGE, 1.5)
    assert_same((value, grads), expected())
    assert out.logprobs.shape == LABELS.shape


@pytest.mark.slow
@combined(check_vma=[True, False], use=["same", "mean", "weighted"], kind=["whole", "gathered"])
def test_inside_shard_map(check_vma: bool, use: str, kind: str) -> None:
    """Under the types of ``check_vma``, and by the convention of ``psum`` without them.

    Weighted: each data shard's loss has a cotangent of its own.
    """
    mesh = mesh_of((2, 4))

    def body(hidden: Any, weight: Any, bias: Any, advantage: Any, rest: Any) -> Any:
        labels, where, old, group = rest
        if kind == "gathered":  # typed as varying over "tensor"
            hidden, advantage = (lax.all_gather(x, "tensor", axis=1, tiled=True) for x in (hidden, advantage))
        value, _ = linear_loss(
            ppo, hidden, weight, labels, old, advantage, group,
            where=where, axis_name="tensor", chunk_bytes=1, precision="highest", bias=bias,
        )  # fmt: skip
        value *= 1.0 + lax.axis_index("data") if use == "weighted" else 1.0
        value = lax.psum(value, "data")
        return lax.pmean(value, "tensor") if use == "mean" else value

    split = P("data", "tensor") if kind == "gathered" else P("data")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(split, P("tensor"), P("tensor"), split, P("data")), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip
    rest = (LABELS, WHERE, OLD, GROUP)
    got = jax.jit(jax.value_and_grad(lambda *x: mapped(*x, rest), argnums=(0, 1, 2, 3)))(
        HIDDEN, WEIGHT, BIAS, ADVANTAGE
    )

    def plain(hidden: Any, weight: Any, bias: Any, advantage: Any) -> Any:
        total, parts = 0.0, (slice(0, B // 2), slice(B // 2, B))
        for i, part in enumerate(parts):
            value = two_passes(
                ppo, hidden[part], weight, LABELS[part], OLD[part], advantage[part], GROUP[part],
                where=WHERE[part], precision="highest", bias=bias,
            )  # fmt: skip
            total += value * (1.0 + i if use == "weighted" else 1.0)
        return total

    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2, 3)))(HIDDEN, WEIGHT, BIAS, ADVANTAGE)
    assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hidden_and_weight_that_other_axes_share(check_vma: bool) -> None:
    """The data shards have the same hidden states and other labels, so dhidden is summed over them, in float32."""
    mesh = mesh_of((2, 4))

    def body(hidden: Any, weight: Any, labels: Any) -> Any:
        value, _ = linear_loss(
            lambda logprob, entropy, _: -logprob + 0.1 * entropy, hidden, weight, labels,
            axis_name="tensor", chunk_bytes=1, precision="highest",
        )  # fmt: skip
        return lax.psum(value, "data")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("tensor"), P("data")), out_specs=P(), check_vma=check_vma)
    hidden = HIDDEN[: B // 2]
    got = jax.jit(jax.value_and_grad(lambda *x: mapped(*x, LABELS), argnums=(0, 1)))(hidden, WEIGHT)

    def plain(hidden: Any, weight: Any) -> Any:
        return two_passes(
            lambda logprob, entropy, _: -logprob + 0.1 * entropy, jnp.concatenate([hidden, hidden]), weight, LABELS
        )

    assert_same(got, jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(hidden, WEIGHT))


def test_a_traced_number_inside_shard_map() -> None:
    """Its gradient cannot be told apart by data shard, so it comes as an argument."""
    mesh = mesh_of((2, 4))

    def body(broadcast: bool, hidden: Any, weight: Any, labels: Any, scale: Any) -> Any:
        if broadcast:
            own = jnp.broadcast_to(scale, labels.shape)
            value, _ = linear_loss(lambda logprob, _, __, s: s * logprob, hidden, weight, labels, own,
                                   axis_name="tensor", chunk_bytes=1)  # fmt: skip
        else:
            value, _ = linear_loss(lambda logprob, _, __: scale * logprob, hidden, weight, labels, axis_name="tensor")
        return lax.psum(value, "data")

    def run(broadcast: bool) -> Any:
        mapped = jax.shard_map(
            functools.partial(body, broadcast), mesh=mesh, in_specs=(P("data"), P("tensor"), P("data"), P()),
            out_specs=P(),
        )  # fmt: skip
        return jax.jit(jax.grad(lambda scale: mapped(HIDDEN, WEIGHT, LABELS, scale)))(jnp.float32(1.5))

    with pytest.raises(ValueError, match=r"jnp.broadcast_to\(x, \(\*labels.shape, \*x.shape\)\)"):
        run(False)
    want = two_passes(lambda logprob, _, __: logprob, HIDDEN, WEIGHT, LABELS)
    assert oracle.value_error(run(True), want) < 1e-5


def test_arguments_that_differ_between_the_shards_are_nan() -> None:
    mesh = mesh_of((1, 4))

    def body(hidden: Any, weight: Any, labels: Any, own: Any) -> Any:
        own = own.at[1].add(jnp.where(lax.axis_index("tensor") == 2, 1.0, 0.0))
        value, out = linear_loss(lambda logprob, _, __, x: x * logprob, hidden, weight, labels, own, axis_name="tensor")
        return value, out.logprobs

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("tensor"), P(), P()), out_specs=P())
    value, logprobs = jax.jit(mapped)(HIDDEN, WEIGHT, LABELS, ADVANTAGE)
    assert jnp.isnan(value)
    assert jnp.isnan(logprobs[1]).all()
    assert not jnp.isnan(logprobs[0]).any()


def test_a_number_typed_over_explicit_axes() -> None:
    """JAX cannot close over it in a program of one device; the advice gives the right gradient."""
    mesh = mesh_of((2, 4), AxisType.Explicit)

    def total(scale: Any, broadcast: bool) -> Any:
        own = (jnp.broadcast_to(scale, LABELS.shape),) if broadcast else ()
        loss = (lambda logprob, _, __, s: s * logprob) if broadcast else (lambda logprob, _, __: scale * logprob)
        return sharded_linear_loss(loss, HIDDEN, WEIGHT, LABELS, *own, batch_axes="data", chunk_bytes=1)[0]

    def run(broadcast: bool) -> Any:
        steps = jnp.asarray([1.0, 2.0])
        step = jax.grad(lambda x: lax.scan(lambda c, y: (c + total(x * y, broadcast), None), 0.0, steps)[0])
        return jax.jit(step)(1.5)

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"jnp.broadcast_to\(x, \(\*labels.shape, \*x.shape\)\)"):
            run(False)
        got = run(True)
    assert oracle.value_error(got, 3 * two_passes(lambda logprob, _, __: logprob, HIDDEN, WEIGHT, LABELS)) < 1e-5
