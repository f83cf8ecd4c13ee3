"""`linear_kl` with ``cache_bytes`` in plain XLA: what is kept, how exact its gradients are, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import explain, linear_kl
from lce_jax.mesh._custom_partitioning import warn_once
from lce_jax.xla import _kl, _walk
from tests import kl_cases, oracle
from tests.kl_cases import Drawn, call, draw, evaluate, expected
from tests.pairs import values_of

FULL = 1 << 40
FLOAT16 = pytest.param("float16", marks=pytest.mark.slow)
SIXTEEN_BITS = ("bfloat16", FLOAT16)
# A mixture has both divergences.
every_direction = values_of("direction", ["forward", "reverse", "jsd", "tv"], slow=["forward", "reverse", "tv"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles of columns, the last one narrower, on a device that jit knows: elsewhere nothing may be kept."""

    def tiles(plan: _kl.KLPlan) -> tuple[int, int]:
        case = plan.calls.student
        return max(case.num_tokens // 2 if case.partial_rows else case.num_tokens, 1), min(48, plan.columns)

    monkeypatch.setattr(_kl.KLPlan, "tiles", property(tiles))
    jax.clear_caches()
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))):
        yield
    jax.clear_caches()


def full_cache(drawn: Drawn) -> int:
    """The bytes that spare the backward every product of logits."""
    (hidden, weight, *_), labels = drawn.student, jax.ShapeDtypeStruct(drawn.seed.shape, "int32")
    options = {x: y for x, y in drawn.options.items() if x in ("where", "vocab_size", "weight_layout")}
    teachers = drawn.teacher[1] if drawn.options.get("teacher_weight_layout") != "vh" else drawn.teacher[1].T
    return explain(hidden, weight, labels, teacher=(drawn.teacher[0], teachers), **options).full_cache_bytes


NAMES = ("ragged", "ragged, reverse", "ragged jsd", "one column", "mixed", "everything, forward", "everything, jsd",
         "everything, tv")  # fmt: skip
CALLS = [test for test in kl_cases.CALLS if test.name in NAMES]
OFTEN = [("ragged jsd", 0.5), ("one column", 1.0), ("everything, jsd", 1.0), ("everything, tv", 0.5)]


@pytest.mark.parametrize(
    ("test", "share"),
    [
        pytest.param(
            test, share, marks=pytest.mark.slow if (i + j) % 2 or test.name not in OFTEN else (), id=f"{test}-{share}"
        )
        for i, test in enumerate(CALLS)
        for j, share in enumerate((1.0, 0.5))
    ],
)
def test_matches_float64(test: kl_cases.Call, share: float) -> None:
    """As exact as without a cache, with the same bits of the value."""
    drawn = draw(test)
    kl, gradients = evaluate(drawn, cache_bytes=int(share * full_cache(drawn)))
    np.testing.assert_array_equal(kl, evaluate(drawn)[0])
    for got, true in zip(gradients, expected(drawn).gradients, strict=True):
        rounding = 0.0 if got.dtype == jnp.float32 else float(jnp.finfo(got.dtype).eps) / 2
        assert oracle.relative_norm(got, true) < 3e-6 + rounding


def backward_products(drawn: Drawn, **options: Any) -> int:
    """Matrix products in the backward's program; a loop over tiles has those of one."""
    _, backward = jax.vjp(lambda *x: linear_kl(*x, *drawn.teacher, **options), *drawn.student)
    return str(jax.make_jaxpr(backward)(drawn.seed)).count("dot_general")


@every_direction
def test_a_full_cache_spares_the_products_of_both_heads(direction: str) -> None:
    drawn = draw(call("products", V=96, direction=direction))
    options = {"direction": direction}
    without = backward_products(drawn, **options)
    assert backward_products(drawn, **options, cache_bytes=full_cache(drawn)) == without - 2
    assert backward_products(drawn, **options, cache_bytes=full_cache(drawn) // 2 - 1) == without  # less than a tile


def near(drawn: Drawn, distance: float) -> Drawn:
    """With the student for a teacher, but for a part of its weight."""
    hidden, weight = drawn.student
    noise = np.random.default_rng(1).standard_normal(weight.shape) * float(jnp.std(weight.astype(jnp.float32)))
    return drawn._replace(teacher=(hidden, (weight + distance * noise).astype(weight.dtype)))


@pytest.mark.fast("1.5-0.05")
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@every_direction
@pytest.mark.parametrize(
    ("spread", "distance"), [pytest.param(0.5, None, marks=pytest.mark.slow), (4.0, None), (1.5, 0.05)]
)
def test_sixteen_bits(
    direction: str, dtype: str, spread: float, distance: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept and multiplied as a GPU does it: the gradient in the logits is rounded once more, and no more."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)
    drawn = draw(call("16 bits", leading=(64,), H=64, V=480, dtypes=(dtype,) * 4, spread=spread, direction=direction))
    drawn = drawn if distance is None else near(drawn, distance)
    want = expected(drawn).gradients
    plain, kept = (evaluate(drawn, cache_bytes=number)[1] for number in (0, FULL))
    for a, b, true in zip(plain, kept, want, strict=True):
        assert oracle.relative_norm(b, true) < 1.5 * oracle.relative_norm(a, true)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@every_direction
def test_a_teacher_that_rules_tokens_out(direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their log-ratios are 1e6, which float16 has not: a reverse KL's gradient is as large."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)
    drawn = draw(call("ruled out", leading=(16,), V=480, dtypes=(dtype,) * 4, direction=direction))
    ruled_out = jnp.where(jnp.arange(480) % 7 == 3, -1e6, 0.0)
    drawn = drawn._replace(seed=drawn.seed * (1e-3 if direction == "reverse" else 1.0))
    (kl, plain), (same, kept) = (evaluate(drawn, teacher_bias=ruled_out, cache_bytes=x) for x in (0, FULL))
    np.testing.assert_array_equal(kl, same)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in kept)
    bound = {"bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert all(oracle.relative_norm(b, np.asarray(a, np.float64)) < bound for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@every_direction
def test_a_cold_cap(direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its derivative asks for logits that lie 1e6 below the largest."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)
    cap = {"logit_softcap": 30.0, "teacher_logit_softcap": "same"}
    test = call("cold", leading=(16,), V=480, dtypes=(dtype,) * 4, direction=direction, spread=3.0, **cap)
    drawn = draw(test)
    drawn = drawn._replace(options=drawn.options | {"temperature": 1e-4}, seed=drawn.seed * 1e-4)
    (kl, plain), (same, kept) = (evaluate(drawn, cache_bytes=number) for number in (0, FULL))
    np.testing.assert_array_equal(kl, same)
    bound = {"bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert all(oracle.relative_norm(b, np.asarray(a, np.float64)) < bound for a, b in zip(plain, kept, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN_BITS])
@values_of("ruled_out", [-1e3, -1e6, -1e9], slow=[-1e3, -1e9])
def test_a_student_that_prefers_what_the_teacher_rules_out(
    ruled_out: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-ratios are nearly all of them equal, and the gradient of a reverse KL is in their differences."""
    monkeypatch.setattr(_walk, "gradient_dtype", lambda case: case.dtype)
    drawn = draw(call("preferred", leading=(16,), V=480, dtypes=(dtype,) * 4, direction="reverse"))
    out = jnp.arange(480) % 7 != 3
    biases = {"bias": jnp.where(out, 0.0, -40.0), "teacher_bias": jnp.where(out, ruled_out, 0.0)}
    plain, kept = (evaluate(drawn, **biases, cache_bytes=number)[1] for number in (0, FULL))
    bound = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert all(oracle.relative_norm(b, np.asarray(a, np.float64)) < bound for a, b in zip(plain, kept, strict=True))


@pytest.mark.slow
@every_direction
def test_small_temperatures(direction: str) -> None:
    """One-hots, whose gradient is what nearly cancels: as exact as what is computed anew."""
    drawn = draw(call("cold", leading=(40,), V=480, spread=4.0, direction=direction))
    temperature = jnp.asarray(np.logspace(0, -4, 40), jnp.float32)
    drawn = drawn._replace(seed=drawn.seed * temperature, options=drawn.options | {"temperature": temperature})
    want = expected(drawn).gradients
    plain, kept = (evaluate(drawn, cache_bytes=number)[1] for number in (0, FULL))
    for a, b, true in zip(plain, kept, want, strict=True):
        assert oracle.relative_norm(b, true) < max(2.0 * oracle.relative_norm(a, true), 2e-6)


def test_is_planned() -> None:
    drawn = draw(call("planned", V=480))
    (hidden, weight), labels = drawn.student, jax.ShapeDtypeStruct(drawn.seed.shape, "int32")
    given = full_cache(drawn) // 2
    plan = explain(hidden, weight, labels, teacher=drawn.teacher, cache_bytes=given)
    assert 0 <= given - (plan.kept_bytes - 6 * 4 * 24) < full_cache(drawn) / 10
    assert "the forward keeps 5 of 10 vocabulary tiles" in str(plan)


@pytest.mark.slow
def test_nothing_is_kept_where_xla_splits_the_call(caplog: pytest.LogCaptureFixture) -> None:
    drawn = draw(call("auto", leading=(4, 8), V=128))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    drawn = jax.device_put(drawn, there)
    warn_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger="lce_jax"):
        _, gradients = evaluate(drawn, cache_bytes=FULL)
    assert "cache_bytes keeps nothing" in caplog.text
    for got, true in zip(gradients, expected(drawn).gradients, strict=True):
        assert oracle.relative_norm(got, true) < 2e-6


@pytest.mark.slow
def test_under_vmap() -> None:
    drawn = draw(call("vmap", leading=(3, 5), direction="reverse"))
    (hidden, weight), teacher = drawn.student, drawn.teacher

    def one(hidden: Any, teacher_hidden: Any, seed: Any) -> Any:
        def objective(hidden: Any) -> Any:
            kl = linear_kl(hidden, weight, teacher_hidden, teacher[1], direction="reverse", cache_bytes=FULL)
            return jnp.sum(seed * kl)

        return jax.grad(objective)(hidden)

    dhidden = jax.jit(jax.vmap(one))(hidden, teacher[0], drawn.seed)
    assert oracle.relative_norm(dhidden, expected(drawn).gradients[0]) < 2e-6
