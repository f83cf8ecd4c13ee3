"""`linear_kl` at small temperatures: value and gradients as exact as those of stored float32 logits.

Rows have temperatures from 1 to 1e-6 and cotangents in proportion, so that all of them count in dweight. The last rows
have 1e-8, as padding may, and cotangents of 0.

At 1e-6 an error of one unit in the last place of one logit may be all there is, and it is a matter of luck who has it.
So each error is a mean over sums in several orders: those of hidden and weight with their H permuted alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_kl, sharded_linear_kl
from tests.kl_cases import Drawn, expected
from tests.pairs import combined

pytestmark = pytest.mark.usefixtures("optimized")  # rounding as users get it

TEMPERATURES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
PADDING = 1e-8
EACH, H, V, ORDERS = 24, 64, 1000, 4
FLOOR = 4 * float(np.finfo(np.float32).eps)  # a few roundings, where stored logits have none
LEAST = 1e-30  # what probabilities below 1.2e-38, float32's least normal number, can make of a gradient

# Standard deviation of the logits, and that of the factors, less 1, from the student's weights to the teacher's.
MODELS = {"random": (1.5, None), "peaked": (20.0, None), "near": (1.5, 0.05), "near, peaked": (20.0, 0.05)}


def draw(models: str, direction: str, softcap: float | None) -> Drawn:
    rng, (spread, nearness) = np.random.default_rng(0), MODELS[models]
    temperature = np.repeat([*TEMPERATURES, PADDING], EACH)

    def model() -> list[np.ndarray]:
        return [rng.standard_normal((len(temperature), H)), rng.standard_normal((V, H)) * (spread / np.sqrt(H))]

    student = model()
    near = None if nearness is None else [student[0], student[1] * (1 + nearness * rng.standard_normal((V, H)))]
    arrays = [tuple(jnp.asarray(x, jnp.float32) for x in own) for own in (student, near or model())]
    seed = np.where(temperature == PADDING, 0, temperature) * rng.standard_normal(len(temperature))
    options = {"direction": direction, "logit_softcap": softcap, "temperature": jnp.asarray(temperature, jnp.float32)}
    return Drawn(*arrays, options, jnp.asarray(seed, jnp.float32))


def stored(hidden, weight, teacher_hidden, teacher_weight, *, direction, temperature, logit_softcap):
    """Plain JAX code, whose float32 logits are stored."""

    def log_softmax(hidden: Any, weight: Any) -> Any:
        z = jnp.matmul(hidden, weight.T, precision="highest")
        z = z if logit_softcap is None else logit_softcap * jnp.tanh(z / logit_softcap)
        return jax.nn.log_softmax(z / temperature[:, None])

    q, p = log_softmax(hidden, weight), log_softmax(teacher_hidden, teacher_weight)
    if direction == "forward":
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    if direction == "reverse":
        return jnp.sum(jnp.exp(q) * (q - p), axis=-1)
    if direction == "tv":
        return jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1) / 2
    m = jnp.logaddexp(p, q) - jnp.log(2.0)
    return jnp.sum(jnp.exp(p) * (p - m) + jnp.exp(q) * (q - m), axis=-1) / 2


@functools.cache
def compiled(shards: int, direction: str, softcap: float | None) -> Any:
    """The value and the gradients of a call; of stored logits, with no shards."""
    own: dict[str, Any] = {"precision": "highest", "teacher_logit_softcap": "same"}
    function: Any = functools.partial(linear_kl, **own) if shards else stored
    if shards > 1:
        mesh = jax.make_mesh((shards,), ("tensor",), devices=jax.devices("cpu")[:shards])
        function = functools.partial(sharded_linear_kl, mesh=mesh, **own)

    def objective(student: Any, teacher: Any, seed: Any, temperature: Any) -> Any:
        options = {"direction": direction, "logit_softcap": softcap, "temperature": temperature}
        kl = function(*student, *teacher, **options)
        return jnp.sum(seed * kl), kl

    return jax.jit(jax.grad(objective, has_aux=True))


def groups(kl: Any, dhidden: Any, dweight: Any) -> list[np.ndarray]:
    """The value and dhidden by temperature, and dweight."""
    count = len(TEMPERATURES)
    parts = [part for x in (kl, dhidden) for part in np.split(np.asarray(x, np.float64)[: count * EACH], count)]
    return [*parts, np.asarray(dweight, np.float64)]


def permute_hidden_size(drawn: Drawn) -> Iterator[tuple[Drawn, np.ndarray]]:
    """The same call with its H permuted, and how to put the gradients back."""
    for i in range(ORDERS):
        order = np.random.default_rng(i).permutation(H)
        student, teacher = (tuple(x[:, order] for x in model) for model in (drawn.student, drawn.teacher))
        yield drawn._replace(student=student, teacher=teacher), np.argsort(order)


def errors(drawn: Drawn, shards: int) -> np.ndarray:
    """Root mean squares over the orders, beside float64. Stored logits are without padding, of which they make NaN."""
    want = expected(drawn)
    rows = slice(None if shards else -EACH)
    true, found = groups(want.kl, *want.gradients), []
    run = compiled(shards, drawn.options["direction"], drawn.options["logit_softcap"])
    for one, back in permute_hidden_size(drawn):
        (hidden, weight), (teacher_hidden, teacher_weight), temperature = *one[:2], one.options["temperature"]
        models = (hidden[rows], weight), (teacher_hidden[rows], teacher_weight)
        gradients, kl = run(*models, one.seed[rows], temperature[rows])
        dhidden, dweight = (np.asarray(x) for x in gradients)
        assert np.isfinite(kl).all()
        assert not dhidden[len(TEMPERATURES) * EACH :].any()
        got = groups(kl, dhidden[:, back], dweight[:, back])
        found.append([np.linalg.norm(a - b) for a, b in zip(got, true, strict=True)])
    return np.sqrt(np.mean(np.square(found), axis=0))


def assert_as_exact_as_stored(drawn: Drawn, shards: int) -> None:
    want = expected(drawn)
    floor = [FLOOR * np.linalg.norm(x) + LEAST for x in groups(want.kl, *want.gradients)]
    ours, theirs = errors(drawn, shards), errors(drawn, 0)
    assert (ours <= np.maximum(2 * theirs, floor)).all(), ours / np.maximum(theirs, floor)


@pytest.mark.slow
@combined(direction=["forward", "reverse", "jsd", "tv"], softcap=[None, 3.0], models=[*MODELS])
def test_gradients(direction: str, softcap: float | None, models: str) -> None:
    assert_as_exact_as_stored(draw(models, direction, softcap), 1)


@pytest.mark.fast("('reverse', 4)-near")
@combined(split=[("forward", 2), ("reverse", 4), ("jsd", 2), ("tv", 2)], models=["random", "near, peaked"])
def test_a_split_vocabulary(split: tuple[str, int], models: str) -> None:
    direction, shards = split
    assert_as_exact_as_stored(draw(models, direction, 3.0 if shards == 2 else None), shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "models", "temperature"),
    [("reverse", "random", 1e-3), ("jsd", "random", 1e-1), ("jsd", "peaked", 1.0), ("tv", "peaked", 1.0)],
)
def test_models_that_share_little(direction: str, models: str, temperature: float) -> None:
    """A student that is nearly one-hot, elsewhere than its teacher: the gradient is a rest of 1e-3 to 1e-13.

    Its error is that of the logits, which 1 / τ multiplies. Stored log-probabilities have lost most or all of it.
    """
    drawn = draw(models, direction, None)
    want, place = expected(drawn), len(TEMPERATURES) + TEMPERATURES.index(temperature)
    size = np.linalg.norm(groups(want.kl, *want.gradients)[place])
    ours, theirs = errors(drawn, 1)[place], errors(drawn, 0)[place]
    assert ours < 2e-6 * MODELS[models][0] / temperature * size
    assert ours < theirs / 10
