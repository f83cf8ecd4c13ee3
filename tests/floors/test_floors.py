"""`lce_jax.floors`: which tokens reach them in the call that takes them, equal and nearly equal logits, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import LogprobOutput, TopK, floors, linear_logprobs, linear_topk, masked_logprobs
from tests import cases
from tests.pairs import combined, values_of

T, H, V = 1000, 64, 300
NONE = jnp.full(T, -100)  # a label would be in its set, whatever its logit


def head(dtype: str) -> tuple[jax.Array, jax.Array]:
    """Hidden states, and a weight whose logits are all different."""
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[1], (V, H)) * 3 / H**0.5
    return jax.random.normal(keys[0], (T, H)).astype(dtype), weight.astype(dtype)


def cut(hidden: jax.Array, weight: jax.Array, floor: jax.Array, **options: Any) -> LogprobOutput:
    return linear_logprobs(hidden, weight, NONE, logit_floor=floor, stats=True, entropy=False, **options)


def lse_of_largest(hidden: jax.Array, weight: jax.Array, counts: Any, temperature: float) -> np.ndarray:
    """In float64, of so many of the largest logits of each token."""
    z = np.sort(np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T / temperature)[:, ::-1]
    return np.log(np.exp(z).cumsum(-1)[np.arange(T), np.asarray(counts) - 1])


@pytest.mark.fast("bfloat16-1.0")
@combined(dtype=["float32", "bfloat16"], temperature=[0.1, 1.0])
def test_equal_logits_are_all_in_the_set(dtype: str, temperature: float) -> None:
    hidden, weight = head(dtype)
    twice, options = jnp.concatenate([weight, weight]), {"temperature": temperature}
    top = linear_topk(hidden, twice, 4, temperature=temperature)
    three = floors.top_k(top)
    out = cut(hidden, twice, three, **options)
    assert np.all(out.support == 4)
    assert np.max(np.abs(out.lse - lse_of_largest(hidden, twice, out.support, temperature))) < 2e-5 / temperature
    assert np.array_equal(floors.top_p(top, 1.0, after_top_k=True), three)
    shares = jnp.linspace(0.01, 1.0, T)
    assert np.all(cut(hidden, twice, floors.top_p(top, shares, after_top_k=True), **options).support % 2 == 0)
    largest = cut(hidden, twice, -jnp.inf, **options).max_logit
    for highest in (largest, top.logprobs[:, 0] + top.lse):
        support = cut(hidden, twice, floors.min_p(highest, 1.0), **options).support
        assert np.all(support >= 2)
        assert np.mean(support == 2) > 0.99


def test_other_logits_are_not() -> None:
    """Also of the most likely 50, where they are close, those that are further apart than rounding."""
    hidden, weight = head("float32")
    z = np.sort(np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T)[:, ::-1]
    for k in (1, 3, 50):
        top = linear_topk(hidden, weight, k + 1)
        support = np.asarray(cut(hidden, weight, floors.top_k(top)).support)
        apart = z[:, k - 1] - z[:, k] > 2.0**-15 * np.abs(top.lse)
        assert apart.mean() > 0.9
        assert np.all(support[apart] == k)
        assert np.all(support >= k)
    top, probabilities = linear_topk(hidden, weight, 200), np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True)))
    support = np.asarray(cut(hidden, weight, floors.top_p(top, 0.8)).support)
    wanted = 1 + np.sum(probabilities.cumsum(-1) < 0.8, axis=-1)
    assert np.mean(support == wanted) > 0.95
    assert np.all(support >= wanted - 1)  # float32 adds the probabilities up
    assert np.all(floors.top_p(top, 1.0) == -jnp.inf)
    assert np.all(np.isnan(floors.top_p(linear_topk(hidden, weight, 2), 0.999)) == (probabilities[:, 0] < 0.999))
    kept = cut(hidden, weight, floors.min_p(top.logprobs[:, 0] + top.lse, 0.1)).support
    assert np.mean(np.asarray(kept) == np.sum(probabilities >= 0.1 * probabilities[:, :1], axis=-1)) > 0.99


@pytest.mark.slow
def test_float64() -> None:
    with jax.enable_x64(True):
        hidden, weight = (x.astype("float64") for x in head("float32"))
        twice = jnp.concatenate([weight, weight])
        with jax.numpy_dtype_promotion("strict"):
            top = linear_topk(hidden, twice, 4)
            found = [floors.top_k(top), floors.top_p(top, 0.9, after_top_k=True), floors.min_p(top.lse, 0.5)]
            found.append(floors.of_smallest(top.lse, "float64"))
        assert {x.dtype.name for x in found} == {"float64"}
        assert np.all(cut(hidden, twice, found[0]).support == 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_rounds_to_the_smallest_reaches_its_floor(dtype: str) -> None:
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    smallest = np.concatenate([[0.0, 1.0, -1.0, 16.0, -16.0], np.random.default_rng(0).normal(size=2000) * 10])
    smallest = smallest.astype(kind).astype(np.float32)
    floor = np.asarray(floors.of_smallest(smallest, dtype))
    above, below = (np.nextafter(floor, side, dtype=np.float32) for side in (np.inf, -np.inf))
    assert np.all(above.astype(kind) >= smallest.astype(kind)) or dtype == "float32"
    assert np.all((below.astype(kind) < smallest.astype(kind))[1:])  # below 0 lie numbers that XLA takes for 0
    bound = 2.0**-15 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    assert np.all(smallest - floor <= bound * np.abs(smallest) + float(jnp.finfo(dtype).tiny))


def test_values_without_a_step() -> None:
    values = jnp.array([-jnp.inf, jnp.inf, jnp.nan, 65504.0, -65504.0])
    for dtype in ("bfloat16", "float16", "float32"):
        got = np.asarray(floors.of_smallest(values, dtype))
        assert np.array_equal(got[:3], values[:3], equal_nan=True)
        assert np.all(got[3:] < values[3:])
    large = jnp.array([1.0, 7e4])
    with pytest.raises(ValueError, match=r"65504, .* 70000.0 in 1 of 2 rows.*give the dtype"):
        floors.of_smallest(large, "float16")
    assert np.array_equal(np.isnan(jax.jit(lambda x: floors.of_smallest(x, "float16"))(large)), [False, True])


def top_of(shape: tuple[int, ...], dtype: str = "float32") -> TopK:
    logprobs = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.3, 0.2])), (*shape, 3))
    ids = jnp.broadcast_to(jnp.arange(3), (*shape, 3))
    return TopK(ids, logprobs.astype(dtype), jnp.full(shape, 1.5, dtype))


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_promoted_or_transferred(dtype: str) -> None:
    top, shares = top_of((2, 3), dtype), jnp.array([0.3, 0.5, 0.65], dtype)  # the largest of 1, 2 and 2 tokens
    ids, labels, numbers = top.ids.at[0].set(-1), top.ids[..., 1], jax.device_get(top)
    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        found = [
            floors.top_p(top, shares), floors.top_p(top, shares, after_top_k=True), floors.top_p(top, 0.3),
            floors.top_k(top), floors.min_p(top.lse, shares), floors.min_p(top.lse, 0.3),
            floors.of_smallest(top.lse, "bfloat16"),
        ]  # fmt: skip
        of_numpy = [floors.top_k(numbers), floors.min_p(numbers.lse, 0.3), floors.of_smallest(numbers.lse, "bfloat16")]
        replayed = masked_logprobs(top.logprobs, ids, labels).logprobs
        of_numpy_ids = np.asarray(ids, np.int64), np.asarray(labels, np.uint8)
        replayed_numpy = masked_logprobs(numbers.logprobs, *of_numpy_ids).logprobs
    assert all(x.shape == (2, 3) and x.dtype == jnp.float32 for x in found)
    assert replayed.dtype == dtype
    assert np.array_equal(replayed, replayed_numpy)
    assert np.array_equal(of_numpy, found[3:4] + found[5:7])
    z = np.asarray(top.logprobs[0, 0], np.float32) + 1.5
    assert np.all(
        (z >= np.asarray(found[0][0])[:, None]) == [[True, False, False], [True, True, False], [True] * 2 + [False]]
    )
    assert np.all((z >= np.asarray(found[3])[..., None]) == [True, True, False])


def test_a_traced_share_that_is_none_stays_in_its_row() -> None:
    top, wrong = top_of((6,)), jnp.array([0.3, 0.0, 1.5, jnp.nan, -0.1, 0.69])
    for call in (
        lambda p: floors.top_p(top, p),
        lambda p: floors.top_p(top, p, after_top_k=True),
        lambda p: floors.min_p(top.lse, p),
    ):
        assert np.array_equal(np.isnan(jax.jit(call)(wrong)), [False, True, True, True, True, False])


@pytest.mark.slow
@values_of("kind", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])
def test_of_split_tokens(kind: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    top, shares = top_of((4, 3)), jnp.linspace(0.1, 0.65, 12).reshape(4, 3)
    with jax.set_mesh(mesh):
        split, also = jax.device_put((top, shares), NamedSharding(mesh, P("data")))
        got = (
            floors.top_k(split),
            floors.top_p(split, also),
            floors.top_p(split, shares[:1]),
            floors.min_p(split.lse, also),
        )
    want = floors.top_k(top), floors.top_p(top, shares), floors.top_p(top, shares[:1]), floors.min_p(top.lse, shares)
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one, other)


TOP, ROWS = top_of((4,)), jnp.ones(4)
MISTAKES: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "dtype unknown": (floors.of_smallest, (ROWS, "foo"), TypeError, "dtype .* got 'foo'"),
    "dtype None": (floors.of_smallest, (ROWS, None), TypeError, "dtype .* got None"),
    "dtype of integers": (floors.of_smallest, (ROWS, "int8"), TypeError, "dtype .* got 'int8'"),
    "float8": (floors.of_smallest, (ROWS, "float8_e4m3fn"), TypeError, "must be one of .* got 'float8_e4m3fn'"),
    "integers": (floors.of_smallest, (TOP.ids, "bfloat16"), TypeError, "smallest .* got int32"),
    "a number": (floors.of_smallest, (1.0, "bfloat16"), TypeError, "smallest .*array, got float"),
    "a tuple": (floors.top_k, (tuple(TOP),), TypeError, "top must be what .*linear_topk returns, got builtins.tuple"),
    "an array": (floors.top_p, (ROWS, 0.5), TypeError, "top must be what lce_jax.linear_topk returns, got jax"),
    "no logprobs": (floors.top_k, (TopK(TOP.ids, None, ROWS),), TypeError, "top.logprobs .*array, got None"),
    "another lse": (floors.top_k, (TOP._replace(lse=ROWS[:3]),), ValueError, r"\(4, 3\) must be .* \(3,\) before k"),
    "one token": (floors.top_k, (TopK(TOP.ids, ROWS[:, None], ROWS),), ValueError, r"give linear_topk\(..., k \+ 1"),
    "max_logit a number": (floors.min_p, (2.0, 0.5), TypeError, "max_logit .*array, got float"),
    "p a string": (floors.min_p, (ROWS, "low"), TypeError, "p .*number, got str 'low'"),
    "p of integers": (floors.min_p, (ROWS, jnp.array(1)), TypeError, "p .*floating.* got int32"),
    "p of another shape": (floors.top_p, (TOP, ROWS[:3]), ValueError, r"p \(3,\) must broadcast to the rows \(4,\)"),
    "p of more rows": (floors.min_p, (ROWS, ROWS.reshape(1, 4)), ValueError, r"p \(1, 4\) must broadcast to the rows"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "given", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(function: Any, given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(*given)


def test_a_flag_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"after_top_k .*True or False, got 1"):
        floors.top_p(TOP, 0.5, after_top_k=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [2, 0, -0.5, float("nan")], ids=str)
@pytest.mark.parametrize(
    "kind", [float, np.float32, ml_dtypes.bfloat16, np.asarray, jnp.asarray, lambda p: jnp.array([0.5, p, 0.5, p])]
)
def test_a_share_that_is_none(p: float, kind: Any) -> None:
    for call in (lambda p: floors.top_p(TOP, p), lambda p: floors.min_p(ROWS, p)):
        with pytest.raises(ValueError, match=r"^p must .*(got|but is)"):
            call(kind(float(p)))


def test_the_rank_of_a_label_is_the_support_over_its_own_logit() -> None:
    """As docs/floors.md has it, and vLLM: how many ids have a logit at least as large, equal ones too."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(40,), H=32, V=500))
    weight = weight.at[7].set(weight[3])
    labels = labels.at[0].set(3).at[1].set(int(jnp.argmax(hidden[1] @ weight.T)))
    out = linear_logprobs(hidden, weight, labels)
    floor = floors.of_smallest(out.logprobs + out.lse, "float32")
    rank = linear_logprobs(hidden, weight, labels, logit_floor=floor, stats=True).support
    z = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    own = np.take_along_axis(z, np.asarray(labels)[:, None], axis=1)
    np.testing.assert_array_equal(rank, np.sum(z >= own - 2.0**-16 * np.abs(own), axis=1))
    assert rank[1] == 1
