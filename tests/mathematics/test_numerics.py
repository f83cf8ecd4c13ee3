"""Distributions that break careless formulas. The bound is the plain path's own error where logits are large."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_cross_entropy, linear_logprobs, sharded_linear_cross_entropy, sharded_linear_logprobs
from tests import oracle
from tests.pairs import values_of

pytestmark = pytest.mark.usefixtures("optimized")  # rounding as users get it

H, V, T = 16, 257, 12


def heads() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(hidden, weight) by name; the first hidden unit is 1, so the first weight column is a bias."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((T, H))
    hidden[:, 0] = 1
    weight = rng.standard_normal((V, H)) / 4
    scaled, negative, positive, flat, onehot, twins = (weight.copy() for _ in range(6))
    scaled *= 2500  # logits of ±1e4
    negative[:, 0] -= 1e4
    positive[:, 0] += 1e4
    flat[:] = flat[0]
    onehot[3, 0] += 200
    twins[[3, 200], 0] += 200
    return {
        "logits of 1e4": (hidden, scaled),
        "all very negative": (hidden, negative),
        "all very positive": (hidden, positive),
        "flat": (hidden, flat),
        "one-hot": (hidden, onehot),
        "two equal peaks": (hidden, twins),
        "zero hidden": (0 * hidden, weight),
        "one column below -1e4, the rest at 0": (hidden * np.eye(H)[0], np.eye(V, H) * -1e4),
    }


def plain(
    hidden, weight, labels, temperature=1.0, logit_scale=1.0, logit_softcap=None, vocab_size=None, bias=0.0,
    candidates=None, **_unused,
):  # fmt: skip
    """What users write, in float32."""
    z = logit_scale * (jnp.matmul(hidden, weight.T, precision="highest") + bias)[:, :vocab_size]
    z = z if logit_softcap is None else logit_softcap * jnp.tanh(z / logit_softcap)
    z = z / jnp.broadcast_to(temperature, labels.shape)[:, None]
    log_p = jax.nn.log_softmax(z, axis=-1)
    logprobs = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    correct = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] == z.max(-1)
    of_candidates = None if candidates is None else jnp.take_along_axis(log_p, candidates, axis=-1)
    return oracle.Results(logprobs, entropy, jax.nn.logsumexp(z, axis=-1), z.max(-1), z.min(-1), correct, of_candidates)


@pytest.mark.parametrize("name", heads())
def test_values(name: str) -> None:
    hidden, weight = (jnp.asarray(x, jnp.float32) for x in heads()[name])
    labels = jnp.asarray(np.random.default_rng(1).integers(0, V, T).astype(np.int32)).at[0].set(3)
    out = linear_logprobs(hidden, weight, labels, precision="highest", stats=True)
    want = oracle.logprobs(hidden, weight, labels)
    theirs_of = plain(hidden, weight, labels)
    for field in oracle.Results._fields[:6]:
        got, theirs, true = (getattr(x, field) for x in (out, theirs_of, want))
        assert np.all(np.isfinite(got)), field
        bound = 2e-6 if "_logit" in field else max(2e-6, 1.1 * oracle.value_error(theirs, true))
        assert oracle.value_error(got, true) <= bound, field
    assert np.all(np.asarray(out.entropy) >= 0)
    assert np.all(np.asarray(out.logprobs) <= 0)


@pytest.mark.parametrize("name", heads())
def test_gradients(name: str) -> None:
    hidden, weight = (jnp.asarray(x, jnp.float32) for x in heads()[name])
    labels = jnp.arange(T, dtype=jnp.int32)
    seeds = [jnp.linspace(-1, 1, T), jnp.linspace(1, 0.5, T), jnp.linspace(0, 0.3, T)]

    def objective(function):
        return lambda h, w: sum(jnp.sum(s * f) for s, f in zip(seeds, function(h, w)[:3], strict=True))

    def ours(h, w):
        return linear_logprobs(h, w, labels, precision="highest")

    steps = [jax.grad(objective(f), argnums=(0, 1)) for f in (ours, lambda h, w: plain(h, w, labels))]
    got, theirs = jax.jit(lambda h, w: [step(h, w) for step in steps])(hidden, weight)
    wanted = oracle.gradients(hidden, weight, labels, seeds)
    for a, b, true in zip(got, theirs, wanted, strict=True):
        assert np.all(np.isfinite(a))
        scale = 1 if np.linalg.norm(true) < 1e-6 else np.linalg.norm(true)
        error, plain_error = (np.linalg.norm(np.asarray(x, np.float64) - true) / scale for x in (a, b))
        assert error <= max(1e-5, 2 * plain_error)


def test_the_entropy_of_a_near_certain_token_keeps_its_digits() -> None:
    """lse - E[z] loses all digits at logits of 1e4; the shifted sum does not."""
    gap = 20.0
    weight = jnp.asarray([[1e4], [1e4 - gap]], jnp.float32)
    out = linear_logprobs(jnp.ones((1, 1)), weight, jnp.array([0]), precision="highest")
    p = 1 / (1 + np.exp(gap))
    true = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    assert np.isclose(float(out.entropy[0]), true, rtol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "mesh"])
@pytest.mark.parametrize("junk", [1e30, -1e38, np.inf, np.nan])
def test_padding_may_hold_anything(junk: float, sharded: bool) -> None:
    """A padding row of NaN, inf or 1e30 is in no sum and no gradient."""
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.standard_normal((T, H)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((V, H)), jnp.float32)
    labels = jnp.arange(T, dtype=jnp.int32)
    function, options = linear_cross_entropy, {"vocab_size": 200}
    if sharded:  # the last shard is padding alone, the one before partly
        function, weight = sharded_linear_cross_entropy, weight[:256]
        options["mesh"] = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

    def value_and_grad(weight):
        return jax.value_and_grad(lambda h, w: function(h, w, labels, **options), argnums=(0, 1))(hidden, weight)

    (want, wanted), (got, grads) = value_and_grad(weight), value_and_grad(weight.at[200:].set(junk))
    assert float(got) == float(want)
    assert all(np.array_equal(a, b) for a, b in zip(grads, wanted, strict=True))
    assert np.all(np.asarray(grads[1][200:]) == 0)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.int8, [-100, 5, 127]),
        (np.uint8, [255, 5, 127]),
        (np.uint32, [2**32 - 1, 5, 2**31]),
        (np.int64, [2**32 + 3, 5, -(2**40)]),
        (np.uint64, [2**63 + 3, 5, 2**32]),
    ],
)
def test_labels_of_any_integer_type_do_not_wrap(dtype: type, values: list[int]) -> None:
    with jax.enable_x64(True):
        labels = jnp.asarray(np.array(values, dtype))
        out = linear_logprobs(jnp.ones((3, 4), jnp.float32), jnp.zeros((300, 4), jnp.float32), labels)
    inside = [0 <= value < 300 for value in values]
    assert np.allclose(out.logprobs, np.where(inside, -np.log(300), 0))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numpy_labels_of_64_bits_do_not_wrap_without_x64(dtype: type) -> None:
    labels = np.array([2**32 + 3, 5, 2**32 + 5], dtype)
    out = linear_logprobs(jnp.ones((3, 4)), jnp.zeros((300, 4)), labels)
    assert np.allclose(out.logprobs, [0, -np.log(300), 0])


def test_out_of_vocabulary_gradient_is_minus_softmax() -> None:
    hidden, weight = jnp.ones((1, 2)), jnp.asarray([[1.0, 0.0], [0.0, 2.0], [0.5, 0.5]])
    grad = jax.grad(lambda h: linear_logprobs(h, weight, jnp.array([-100])).logprobs[0])(hidden)
    assert np.allclose(grad[0], -jax.nn.softmax(hidden[0] @ weight.T) @ weight, atol=1e-6)


ROWS = 10_000
SURE = {
    "plain": {},
    "one hidden unit": {"H": 1},  # the product is no sum: XLA fuses it with what follows
    "softcap": {"logit_softcap": 30.0},
    "scale": {"logit_scale": 1.7},
    "negative scale": {"logit_scale": -1.5},
    "softcap of a negative scale": {"logit_scale": -0.3, "logit_softcap": 50.0},
    "padding": {"vocab_size": 900},
}


def draw_sure_rows(H: int = H, V: int = 1031, **options):
    """(hidden, weight, labels, temperature, options): the likeliest labels of logits with deviations up to 400.

    The vocabulary is two of xla's tiles on a CPU and 7 columns. The products' sums are exact in any order, so that
    errors are those of what follows them.
    """
    rng = np.random.default_rng(5)
    hidden = (rng.standard_normal((ROWS, H)) * rng.uniform(0, 40, (ROWS, 1))).astype(np.float32)
    weight = (rng.standard_normal((V, H)) / np.sqrt(H)).astype(np.float32)
    if H > 1:
        hidden, weight = np.round(hidden * 8) / 8, np.round(weight * 64) / 64
    raw = hidden.astype(np.float64) @ weight[: options.get("vocab_size")].T
    labels = np.argmax(raw * options.get("logit_scale", 1.0), axis=1)
    temperature = rng.uniform(0.1, 2.0, ROWS)
    arrays = zip((hidden, weight, labels, temperature), ("float32", "float32", "int32", "float32"), strict=True)
    return *(jnp.asarray(x, dtype) for x, dtype in arrays), {"precision": "highest", **options}


def assert_probabilities(out) -> None:
    """None above 1: what a loss computes from them is a number, or -inf where one rounds to 1."""
    assert np.all(np.asarray(out.logprobs) <= 0)
    assert np.all(np.asarray(out.entropy) >= 0)
    assert not np.any(np.isnan(jnp.log1p(-jnp.exp(out.logprobs))))


@pytest.mark.fast("softcap of")
@values_of("name", SURE, slow=[*SURE][1:4])
def test_no_probability_is_above_one(name: str) -> None:
    hidden, weight, labels, temperature, options = draw_sure_rows(**SURE[name])
    out = linear_logprobs(hidden, weight, labels, temperature=temperature, stats=True, **options)
    assert_probabilities(out)
    some = slice(1000)
    want = oracle.logprobs(hidden[some], weight, labels[some], temperature=temperature[some], **options)
    theirs = plain(hidden[some], weight, labels[some], temperature[some], **options)
    for field in oracle.Results._fields[:6]:
        got, true = getattr(out, field), getattr(want, field)
        errors = [
            np.mean(np.abs(np.asarray(x, np.float64) - true) / np.maximum(1, np.abs(true)))
            for x in (got[some], getattr(theirs, field))
        ]
        assert errors[0] <= 1.1 * errors[1] + 1e-8, field


@pytest.mark.slow
def test_no_probability_is_above_one_where_rows_are_left_out() -> None:
    hidden, weight, labels, _, options = draw_sure_rows()
    where = np.arange(ROWS) % 3 > 0

    @jax.jit
    def call(hidden, weight, where):
        return linear_logprobs(hidden, weight, labels, where=where, temperature=0.3, **options)

    out = call(hidden, weight, where)
    assert_probabilities(out)
    assert not np.any(np.asarray(out.logprobs)[~where])


@pytest.mark.slow
@values_of("name", ["plain", "softcap of a negative scale", "padding"], slow=["plain", "padding"])
def test_no_probability_is_above_one_over_a_mesh(name: str) -> None:
    hidden, weight, labels, temperature, options = draw_sure_rows(V=1024, **SURE[name])
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    out = sharded_linear_logprobs(hidden, weight, labels, mesh=mesh, temperature=temperature, **options)
    assert_probabilities(out)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_probability_that_was_above_one(wrap) -> None:
    def call(hidden, weight):
        return linear_logprobs(hidden, weight, jnp.array([0]), temperature=0.7)

    out = wrap(call)(jnp.ones((1, 1)), jnp.asarray([[33.3], [0.0]]))
    assert_probabilities(out)
    assert float(out.logprobs[0]) == 0  # in float32, 1 + exp(-47.6) is 1


@pytest.mark.parametrize("peak", [20, 200_000])
def test_many_small_terms_beside_a_peak(peak: int) -> None:
    """Each a hundred tiles later: their sums are far below 1, and every addition would round away the same part."""
    columns, T = 262144, 16
    weight = jnp.zeros((columns, 1)).at[peak].set(20.0)
    labels = jnp.full((T,), peak)
    out = linear_logprobs(jnp.ones((T, 1)), weight, labels, implementation="xla")
    others = (columns - 1) * np.exp(-20.0)
    assert oracle.value_error(out.logprobs, -np.log1p(others)) < 3e-7
    assert oracle.value_error(out.entropy, np.log1p(others) + 20 * others / (1 + others)) < 3e-7
