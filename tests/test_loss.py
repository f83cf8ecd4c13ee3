"""`linear_cross_entropy` against the definition on stored logits, and against optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lce_jax import linear_cross_entropy
from tests import cases, oracle

TEST = cases.case("loss", leading=(4, 6), H=16, V=96)


def definition(hidden, weight, labels, where, label_smoothing, z_loss, temperature=1.0):
    z = jnp.matmul(hidden, weight.T, precision="highest") / temperature
    targets = optax.smooth_labels(jax.nn.one_hot(labels, weight.shape[0]), label_smoothing)
    loss = optax.softmax_cross_entropy(z, targets) + z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    return jnp.where(where, loss, 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("masked", ["none", "where", "ignore_index", "both"])
def test_matches_the_definition(reduction: str, label_smoothing: float, z_loss: float, masked: str) -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    live = jnp.asarray(np.random.default_rng(0).random(labels.shape) < 0.6)
    counted, options = jnp.ones(labels.shape, bool), {}
    if masked in ("where", "both"):
        counted, options["where"] = counted & live, live
    if masked in ("ignore_index", "both"):
        labels = labels.at[::2, 1].set(-100)
        counted, options["ignore_index"] = counted & (labels != -100), -100
    options |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
    reduce = {"mean": lambda x: x.sum() / counted.sum(), "sum": jnp.sum, "none": lambda x: x}[reduction]

    def ours(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, reduction=reduction, precision="highest", **options)

    def theirs(hidden, weight):
        return reduce(definition(hidden, weight, labels, counted, label_smoothing, z_loss))

    assert oracle.value_error(ours(hidden, weight), theirs(hidden, weight)) < 2e-6
    got, want = (jax.grad(lambda h, w, f=f: jnp.sum(f(h, w)), argnums=(0, 1))(hidden, weight) for f in (ours, theirs))
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


def test_smoothing_with_temperature_scale_and_padding() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    labels = labels % 90
    temperature = jnp.linspace(0.5, 2, 24).reshape(labels.shape)
    got = linear_cross_entropy(
        hidden, weight, labels, label_smoothing=0.3, temperature=temperature, logit_scale=0.5, vocab_size=90,
        precision="highest", reduction="none",
    )  # fmt: skip
    want = definition(hidden * 0.5, weight[:90], labels, True, 0.3, 0.0, temperature[..., None])
    assert oracle.value_error(got, want) < 2e-6


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_smoothing_with_a_softcap(implementation: str) -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)

    def ours(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, label_smoothing=0.2, logit_softcap=2.0, precision="highest",
            implementation=implementation,
        )  # fmt: skip

    def theirs(hidden, weight):
        z = 2.0 * jnp.tanh(jnp.matmul(hidden, weight.T, precision="highest") / 2.0)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, weight.shape[0]), 0.2)
        return optax.softmax_cross_entropy(z, targets).mean()

    got, want = (jax.value_and_grad(f, argnums=(0, 1))(hidden, weight) for f in (ours, theirs))
    assert np.isclose(got[0], want[0], rtol=2e-6)
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got[1], want[1], strict=True))


def test_smoothing_sees_hidden_as_the_products_do() -> None:
    """A float32 hidden beside a bfloat16 weight is rounded for the mean logit too."""
    hidden, weight, labels, _, _ = cases.draw(TEST)
    weight = (weight + 1).astype(jnp.bfloat16)
    losses = [
        linear_cross_entropy(h, weight, labels, label_smoothing=0.5) for h in (hidden, hidden.astype(jnp.bfloat16))
    ]
    assert float(losses[0]) == float(losses[1])


def test_smoothed_16_bit_gradients_are_rounded_once() -> None:
    hidden, weight, labels, _, _ = cases.draw(cases.case("rounding", leading=(64,), H=64, V=256, dtype="bfloat16"))
    wide = [x.astype(jnp.float32) for x in (hidden, weight)]

    def grads(hidden, weight):
        loss = lambda h, w: linear_cross_entropy(h, w, labels, label_smoothing=0.3, precision="highest")  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(hidden, weight)

    for got, true in zip(grads(hidden, weight), grads(*wide), strict=True):
        rounded = oracle.relative_norm(true.astype(jnp.bfloat16), true)
        assert oracle.relative_norm(got, true) < 1.05 * rounded


def test_the_loss_is_float32_whatever_the_numbers_are() -> None:
    with jax.enable_x64(True):
        hidden, weight = jnp.ones((3, 4), jnp.float32), jnp.ones((8, 4), jnp.float32)
        loss = linear_cross_entropy(
            hidden, weight, jnp.zeros((3,), int), where=jnp.ones((3,), bool), label_smoothing=0.1,
            temperature=np.full((3,), 0.5), logit_scale=np.float64(0.5),
        )  # fmt: skip
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("library", [np, jnp])
def test_ignore_index_matches_its_value_not_its_bits(dtype: type, library) -> None:
    """-100 is 156 as uint8, and -100 - 2³² is -100 as int32: neither is ignored."""
    values = {np.uint8: [156, 1], np.int8: [1, 2], np.int64: [-100 - 2**32, 1]}.get(dtype, [2**32 - 100, 1])
    labels = np.array(values, dtype)
    labels = labels if library is np else jnp.asarray(labels)
    if library is jnp and labels.dtype != dtype:
        labels = jnp.asarray(values[1:] * 2)  # JAX has no 64-bit integers here: nothing can wrap any more
    weight = jnp.zeros((300, 4))
    loss = linear_cross_entropy(jnp.ones((2, 4)), weight, labels, ignore_index=-100, reduction="none")
    inside = (np.asarray(labels) >= 0) & (np.asarray(labels) < 300)
    assert np.allclose(loss, np.where(inside, np.log(300), 0))
    counted = linear_cross_entropy(jnp.ones((2, 4)), weight, labels, ignore_index=-100)
    assert np.isclose(counted, np.log(300) * inside.mean())


def test_rows_left_out_may_hold_anything() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    live = jnp.arange(24).reshape(4, 6) % 3 != 0
    junk = jnp.where(live[..., None], hidden, jnp.nan)
    temperature = jnp.where(live, 1.5, 0.0)

    def loss(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, where=live, temperature=temperature, label_smoothing=0.1, z_loss=1e-3
        )

    value, (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(junk, weight)
    assert np.isfinite(value)
    assert np.all(np.isfinite(dweight))
    assert np.all(np.asarray(dhidden)[~np.asarray(live)] == 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("nothing", ["no tokens", "no live rows"])
def test_nothing_to_count(reduction: str, nothing: str) -> None:
    T = 0 if nothing == "no tokens" else 5
    hidden, weight, labels = jnp.ones((T, 8)), jnp.ones((32, 8)), jnp.full((T,), -100)

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, ignore_index=-100, reduction=reduction, z_loss=0.1)

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    assert float(value) == 0
    assert all(np.all(np.asarray(grad) == 0) for grad in grads)


def test_labels_of_a_small_type_with_ignore_index() -> None:
    loss = linear_cross_entropy(
        jnp.ones((3, 4)), jnp.zeros((100, 4)), jnp.array([1, 2, -100], jnp.int8), ignore_index=-100
    )
    assert np.isclose(loss, np.log(100))
