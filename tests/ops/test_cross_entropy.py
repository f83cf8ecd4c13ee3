"""`linear_cross_entropy` against the definition on stored logits, and against optax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import (
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    sharded_linear_cross_entropy,
    sharded_linear_logprobs,
    sharded_linear_loss,
)
from tests import cases, oracle
from tests.pairs import combined

TEST = cases.case("loss", leading=(4, 6), H=16, V=96)


def definition(hidden, weight, labels, where, label_smoothing, z_loss, temperature=1.0):
    z = jnp.matmul(hidden, weight.T, precision="highest") / temperature
    targets = optax.smooth_labels(jax.nn.one_hot(labels, weight.shape[0]), label_smoothing)
    loss = optax.softmax_cross_entropy(z, targets) + z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    return jnp.where(where, loss, 0)


@pytest.mark.fast("0.1-0.01-both", "none-0.0-0.0-ignore", "sum-0.1-0.01-where")
@combined(
    reduction=["mean", "sum", "none"], label_smoothing=[0.0, 0.1], z_loss=[0.0, 1e-2],
    masked=["none", "where", "ignore_index", "both"],
)  # fmt: skip
def test_matches_the_definition(reduction: str, label_smoothing: float, z_loss: float, masked: str) -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    live, labels = np.random.default_rng(0).random(labels.shape) < 0.6, np.array(labels)
    counted, options = np.ones(labels.shape, bool), {}
    if masked in ("where", "both"):
        counted, options["where"] = counted & live, live
    if masked in ("ignore_index", "both"):
        labels[::2, 1] = -100
        counted, options["ignore_index"] = counted & (labels != -100), -100
    options |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
    reduce = {"mean": lambda x: x.sum() / counted.sum(), "sum": jnp.sum, "none": lambda x: x}[reduction]

    def ours(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, reduction=reduction, precision="highest", **options)

    def theirs(hidden, weight):
        return reduce(definition(hidden, weight, labels, counted, label_smoothing, z_loss))

    def both(loss):
        sums = jax.grad(lambda h, w: jnp.sum(loss(h, w)), argnums=(0, 1))
        return jax.jit(lambda h, w: (loss(h, w), sums(h, w)))(hidden, weight)

    (value, got), (true, want) = both(ours), both(theirs)
    assert oracle.value_error(value, true) < 2e-6
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.fast("True-one device", "False-inside shard_map")
@pytest.mark.parametrize("place", ["one device", "sharded", "inside shard_map"])
@pytest.mark.parametrize("masked", [False, True])
def test_ignored_labels_of_log_probabilities(place: str, masked: bool) -> None:
    """As with ``where=labels != ignore_index``, to the bit; also of NumPy's labels, which do not hold -100."""
    hidden, weight, labels, *_ = cases.draw(TEST)
    ignored, mesh = 7, jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    labels = np.asarray(labels.at[::2, 1].set(ignored), np.uint8)
    live = jnp.asarray(np.random.default_rng(0).random(labels.shape) < 0.6) if masked else None
    kept = jnp.asarray(labels != ignored) if live is None else jnp.asarray(labels != ignored) & live
    named = {"mesh": mesh, "batch_axes": "data"}

    def both(hidden, weight, labels, **options):
        if place == "sharded":
            total, _ = sharded_linear_loss(negative, hidden, weight, labels, **options, **named)
            return sharded_linear_logprobs(hidden, weight, labels, **options, **named).logprobs, total
        options |= {"axis_name": "tensor"} if place == "inside shard_map" else {}
        total, _ = linear_loss(negative, hidden, weight, labels, **options)
        return linear_logprobs(hidden, weight, labels, **options).logprobs, total

    def negative(logprob, *_):
        return -logprob

    def run(**options):
        call = functools.partial(both, **options)
        if place == "inside shard_map":
            specs = {"in_specs": (P(), P("tensor"), P()), "out_specs": (P(), P())}
            call = jax.jit(jax.shard_map(call, mesh=mesh, **specs))
        return call(hidden, weight, labels)

    got = run(ignore_index=ignored, where=live)
    for x, y in zip(got, run(where=kept), strict=True):
        np.testing.assert_array_equal(x, y)
    assert jnp.all((got[0] == 0) == ~kept)
    for x, y in zip(run(ignore_index=-100, where=live), run(where=live), strict=True):
        np.testing.assert_array_equal(x, y)


def test_smoothing_with_temperature_scale_and_padding() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    labels = np.asarray(labels) % 90
    temperature = np.linspace(0.5, 2, 24, dtype=np.float32).reshape(labels.shape)

    def losses(hidden, weight, labels):
        ours = linear_cross_entropy(
            hidden, weight, labels, label_smoothing=0.3, temperature=temperature, logit_scale=0.5, vocab_size=90,
            precision="highest", reduction="none",
        )  # fmt: skip
        return ours, definition(hidden * 0.5, weight[:90], labels, True, 0.3, 0.0, temperature[..., None])

    assert oracle.value_error(*jax.jit(losses)(hidden, weight, labels)) < 2e-6


def test_smoothing_by_1_leaves_the_labels_out() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)

    def losses(hidden, weight, labels):
        ours = linear_cross_entropy(hidden, weight, labels, label_smoothing=1.0, precision="highest")
        return ours, definition(hidden, weight, labels, True, 1.0, 0.0)

    ours, theirs = jax.jit(losses)(hidden, weight, labels)
    assert oracle.value_error(ours, theirs.mean()) < 2e-6


def test_smoothing_with_a_softcap() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)

    def ours(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.2, logit_softcap=2.0, precision="highest")

    def theirs(hidden, weight):
        z = 2.0 * jnp.tanh(jnp.matmul(hidden, weight.T, precision="highest") / 2.0)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, weight.shape[0]), 0.2)
        return optax.softmax_cross_entropy(z, targets).mean()

    got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, weight) for f in (ours, theirs))
    assert np.isclose(got[0], want[0], rtol=2e-6)
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.slow
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
    wide = [np.float32(x) for x in (hidden, weight)]

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def grads(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.3, precision="highest")

    for got, true in zip(grads(hidden, weight), grads(*wide), strict=True):
        rounded = oracle.relative_norm(np.asarray(true).astype(jnp.bfloat16), true)
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


@pytest.mark.slow
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

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
    assert float(value) == 0
    assert all(np.all(np.asarray(grad) == 0) for grad in grads)


def test_labels_of_a_small_type_with_ignore_index() -> None:
    loss = linear_cross_entropy(
        jnp.ones((3, 4)), jnp.zeros((100, 4)), jnp.array([1, 2, -100], jnp.int8), ignore_index=-100
    )
    assert np.isclose(loss, np.log(100))


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_traced_z_loss_is_the_number_and_has_a_gradient(dtype: jnp.dtype) -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)

    @jax.jit
    def loss(z_loss, hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, z_loss=z_loss, precision="highest")

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    value, (slope, *grads) = run(jnp.float32(0.01), hidden, weight)
    fixed = functools.partial(linear_cross_entropy, labels=labels, z_loss=0.01, precision="highest")
    want, wanted = jax.jit(jax.value_and_grad(fixed, argnums=(0, 1)))(hidden, weight)
    assert value.dtype == jnp.float32
    assert np.isclose(value, want, rtol=1e-6)
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(grads, wanted, strict=True))
    assert np.isclose(slope, (want - loss(jnp.float32(0), hidden, weight)) / 0.01, rtol=1e-3)
    with jax.enable_x64(True):
        assert loss(jnp.float64(0.01), hidden, weight).dtype == jnp.float32
    assert loss._cache_size() == 2  # one float32, one float64: the value compiles nothing


@pytest.mark.slow
def test_z_loss_of_each_example_under_vmap() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    penalties = jnp.asarray([0.0, 1e-3, 1e-2, 0.1])
    got = jax.vmap(lambda h, y, z: linear_cross_entropy(h, weight, y, z_loss=z))(hidden, labels, penalties)
    want = [
        linear_cross_entropy(h, weight, y, z_loss=float(z)) for h, y, z in zip(hidden, labels, penalties, strict=True)
    ]
    assert np.allclose(got, want, rtol=1e-6)


@pytest.mark.fast("traced")
@pytest.mark.parametrize("normalizer", ["number", "traced"])
def test_micro_batches_add_up_to_the_mean_of_all(normalizer: str) -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    labels = np.array(labels)
    labels[0] = labels[1:, ::3] = -100  # a micro-batch without rows, and ragged ones
    options = {"ignore_index": -100, "z_loss": 1e-3, "label_smoothing": 0.1, "precision": "highest"}
    count = np.sum(labels != -100)
    divisor = int(count) if normalizer == "number" else jnp.int32(count)

    def mean_of_all(weight):
        return linear_cross_entropy(hidden, weight, labels, **options)

    def part(weight, i):
        return linear_cross_entropy(hidden[i], weight, jnp.asarray(labels)[i], normalizer=divisor, **options)

    want, wanted = jax.jit(jax.value_and_grad(mean_of_all))(weight)
    parts = [*map(functools.partial(jax.jit(jax.value_and_grad(part)), weight), range(4))]
    assert float(parts[0][0]) == 0
    assert np.isclose(sum(float(value) for value, _ in parts), want, rtol=1e-6)
    assert oracle.relative_norm(sum(np.asarray(grad) for _, grad in parts), wanted) < 1e-5


@pytest.mark.slow
def test_a_normalizer_over_devices() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    labels = labels.at[0].set(-100).at[1:, ::3].set(-100)
    options = {"ignore_index": -100, "precision": "highest"}
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def body(hidden, weight, labels):
        count = jax.lax.psum(jnp.sum(labels != -100), "data")
        loss = linear_cross_entropy(hidden, weight, labels, axis_name="tensor", normalizer=count, **options)
        return jax.lax.psum(loss, "data")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P("tensor"), P("data")), out_specs=P())
    want, wanted = jax.value_and_grad(lambda w: linear_cross_entropy(hidden, w, labels, **options))(weight)
    got, grad = jax.jit(jax.value_and_grad(lambda w: mapped(hidden, w, labels)))(weight)
    assert np.isclose(got, want, rtol=1e-6)
    assert oracle.relative_norm(grad, wanted) < 1e-5

    def halved(weight, count, z_loss):
        return sharded_linear_cross_entropy(
            hidden, weight, labels, mesh=mesh, batch_axes="data", normalizer=count, z_loss=z_loss, **options
        )

    count = jnp.sum(labels != -100)
    assert np.isclose(jax.jit(halved)(weight, 2 * count, jnp.float32(0)), want / 2, rtol=1e-6)


def test_a_traced_normalizer_of_zero_counts_as_one() -> None:
    hidden, weight, labels, _, _ = cases.draw(TEST)

    def loss(weight, count):
        return linear_cross_entropy(hidden, weight, labels, ignore_index=-100, normalizer=count)

    labels = jnp.full_like(labels, -100)
    value, grad = jax.jit(jax.value_and_grad(loss))(weight, jnp.int32(0))
    assert value == 0
    assert np.all(np.asarray(grad) == 0)


def test_labels_of_minus_100_do_not_count() -> None:
    """As in PyTorch. With ``ignore_index=None`` each has logprob 0 and a gradient."""
    hidden, weight = np.ones((4, 8), np.float32), np.eye(50, 8, dtype=np.float32)
    labels = np.array([1, -100, 3, -100], np.int32)

    @jax.jit
    def losses(hidden, weight):
        kept = linear_cross_entropy(hidden[::2], weight, labels[::2])
        every = linear_cross_entropy(hidden, weight, labels, ignore_index=None)
        return jax.value_and_grad(linear_cross_entropy)(hidden, weight, labels), kept, every

    (loss, dhidden), kept, every = losses(hidden, weight)
    assert loss == kept
    assert not np.asarray(dhidden)[1::2].any()
    assert abs(every - loss / 2) < 1e-6
