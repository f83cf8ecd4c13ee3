"""What `linear_loss` hands to its loss: complex numbers, which have gradients, and typed random keys, wherever it runs.

Per-token arguments, and what the loss closes over.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_loss, sharded_linear_loss
from tests import oracle
from tests.draws import Draws
from tests.mesh.test_linear_loss import HIDDEN, LABELS, WEIGHT, assert_same, mesh_of
from tests.ops.test_linear_loss import two_passes
from tests.pairs import combined

SHAPE = LABELS.shape
REAL, IMAGINARY = Draws(1).normal(2, *SHAPE)
KINDS = {"complex": REAL + 1j * IMAGINARY, "keys": jax.random.split(jax.random.key(2), SHAPE)}


def factor(x: Any) -> Any:
    return jax.random.uniform(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else (x * x.conj() + x**3).real


def loss_of_argument(logprob: Any, entropy: Any, _: Any, x: Any) -> Any:
    return -factor(x) * logprob + 0.1 * entropy


def closing_over(x: Any) -> Any:
    return lambda logprob, entropy, lse: loss_of_argument(logprob, entropy, lse, x)


def value_and_gradients(total: Any, x: Any) -> Any:
    """In hidden, weight and, if it has one, ``x``."""
    argnums = (0, 1, 2) if jnp.issubdtype(x.dtype, jnp.inexact) else (0, 1)
    return jax.jit(jax.value_and_grad(total, argnums=argnums))


@functools.cache
def expected(kind: str, how: str) -> Any:
    x = KINDS[kind] if how == "argument" else KINDS[kind][0, 0]

    def total(hidden: Any, weight: Any, x: Any) -> Any:
        loss, own = (loss_of_argument, (x,)) if how == "argument" else (closing_over(x), ())
        return two_passes(loss, hidden, weight, LABELS, *own, precision="highest")

    return value_and_gradients(total, x)(HIDDEN, WEIGHT, x)


OPTIONS: dict[str, Any] = {"chunk_bytes": 1, "precision": "highest"}


@pytest.mark.fast("keys-closure-Auto", "complex-argument-one")
@combined(kind=[*KINDS], how=["argument", "closure"], place=["one device", "Auto"])
def test_under_jit(kind: str, how: str, place: str) -> None:
    x = KINDS[kind] if how == "argument" else KINDS[kind][0, 0]

    def total(hidden: Any, weight: Any, x: Any) -> Any:
        loss, own = (loss_of_argument, (x,)) if how == "argument" else (closing_over(x), ())
        return linear_loss(loss, hidden, weight, LABELS, *own, **OPTIONS)[0]

    hidden, weight = HIDDEN, WEIGHT
    if place == "Auto":
        mesh = mesh_of((4, 2))
        hidden, weight = (
            jax.device_put(x, NamedSharding(mesh, P(axis))) for x, axis in ((hidden, "data"), (weight, "tensor"))
        )
    assert_same(value_and_gradients(total, x)(hidden, weight, x), expected(kind, how))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_a_mesh(kind: str, axis_type: AxisType) -> None:
    def total(hidden: Any, weight: Any, x: Any) -> Any:
        return sharded_linear_loss(loss_of_argument, hidden, weight, LABELS, x, batch_axes="data", **OPTIONS)[0]

    with jax.set_mesh(mesh_of((2, 4), axis_type)):
        got = value_and_gradients(total, KINDS[kind])(HIDDEN, WEIGHT, KINDS[kind])
    assert_same(got, expected(kind, "argument"))


@pytest.mark.fast("complex")
@pytest.mark.parametrize("kind", KINDS)
def test_inside_shard_map(kind: str) -> None:
    """Gathered, and so typed as varying over the vocabulary's axis."""

    def body(hidden: Any, weight: Any, labels: Any, x: Any) -> Any:
        x = lax.all_gather(x, "tensor", axis=1, tiled=True)
        total, _ = linear_loss(loss_of_argument, hidden, weight, labels, x, axis_name="tensor", **OPTIONS)
        return lax.psum(total, "data")

    specs = P("data"), P("tensor"), P("data"), P("data", "tensor")
    mapped = jax.shard_map(body, mesh=mesh_of((2, 4)), in_specs=specs, out_specs=P())
    got = value_and_gradients(lambda h, w, x: mapped(h, w, LABELS, x), KINDS[kind])(HIDDEN, WEIGHT, KINDS[kind])
    assert_same(got, expected(kind, "argument"))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
def test_an_array_on_explicit_axes(spec: P, known: bool) -> None:
    """JAX cannot close over it in a program of one device; the advice gives the right gradients."""
    mesh = mesh_of((2, 4), AxisType.Explicit)
    table = jax.device_put(jnp.asarray([0.5, 2.0]), NamedSharding(mesh, spec))

    def total(broadcast: bool, hidden: Any, weight: Any, x: Any) -> Any:
        x = table if known else x
        own = (jnp.broadcast_to(x, (*LABELS.shape, *x.shape)),) if broadcast else ()

        def loss(logprob: Any, _: Any, __: Any, *own: Any) -> Any:
            return -jnp.sum(own[0] if own else x) * logprob

        return sharded_linear_loss(loss, hidden, weight, LABELS, *own, batch_axes="data", **OPTIONS)[0]

    def run(broadcast: bool) -> Any:
        step = jax.value_and_grad(functools.partial(total, broadcast), argnums=(0, 1, 2))
        return jax.jit(step)(HIDDEN, WEIGHT, table)

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"jnp.broadcast_to\(x, \(\*labels.shape, \*x.shape\)\)"):
            run(False)
        value, grads = run(True)

    def plain(hidden: Any, weight: Any, x: Any) -> Any:
        return two_passes(lambda logprob, *_: -jnp.sum(x) * logprob, hidden, weight, LABELS)

    want, wanted = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(HIDDEN, WEIGHT, jnp.asarray([0.5, 2.0]))
    count = 2 if known else 3
    assert_same((value, grads[:count]), (want, wanted[:count]))


def test_a_nan_that_every_shard_holds_and_a_number_that_differs() -> None:
    """In rows left out a NaN changes nothing; a number that differs makes the sum NaN."""

    def body(hidden: Any, weight: Any, own: Any, step: Any) -> Any:
        own = lax.pcast(own, "tensor", to="varying") + step * lax.axis_index("tensor")
        loss = functools.partial(linear_loss, loss_of_argument, axis_name="tensor", **OPTIONS)
        return loss(hidden, weight, LABELS, own.astype(jnp.float16), where=~jnp.isnan(own))[0]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh_of((1, 4)), in_specs=(P(), P("tensor"), P(), P()), out_specs=P()))
    own = np.float32(np.float16(REAL))
    own[0, 3] = np.nan
    want = jax.jit(functools.partial(two_passes, loss_of_argument))(HIDDEN, WEIGHT, LABELS, own, where=~np.isnan(own))
    assert oracle.value_error(mapped(HIDDEN, WEIGHT, own, 0.0), want) < 1e-3  # the losses' own arithmetic is float16
    assert np.isnan(mapped(HIDDEN, WEIGHT, own, 1.0))
