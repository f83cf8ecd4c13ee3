"""Inside ``shard_map``, an axis that splits something else than the vocabulary, or shards that were given other tokens.

Rows that differ are NaN, in results and gradients, on every shard. All are, if two shards hold the same columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_jax.mesh import _collectives
from tests.draws import Draws

T, H, V, N = 8, 16, 64, 4
MESH = jax.make_mesh((N,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:N])
DRAWS = Draws()
DRAWN: dict[str, jax.Array] = {
    "hidden": DRAWS.normal(T, H),
    "weight": DRAWS.normal(V, H),
    "labels": DRAWS.integers(0, V, T),
    "temperature": DRAWS.uniform(0.5, 2.0, T),
    "ids": DRAWS.integers(0, V, T, 3),
    "teacher_hidden": DRAWS.normal(T, H),
    "teacher_weight": DRAWS.normal(V, H),
}
GIVEN = {name: np.array(x) for name, x in DRAWN.items()} | {"where": np.arange(T) != 5}
GIVEN["labels"][6:], GIVEN["ids"][6:] = (-100, V - 1), ((V - 1,) * 3, (V - 2,) * 3)
SPLIT = ("weight", "teacher_weight")
LABEL, TEMPERATURE, ID, HIDDEN, MASK, MASKED = range(6)  # rows in which one of them differs on shard 2


def logprobs(x: dict[str, Any], **told: Any) -> Any:
    out = linear_logprobs(x["hidden"], x["weight"], x["labels"], candidates=x["ids"], stats=True, **told)
    return [field for field in out if field is not None and field.dtype != bool]  # which cannot be NaN


def cross_entropy(x: dict[str, Any], **told: Any) -> Any:
    return [linear_cross_entropy(x["hidden"], x["weight"], x["labels"], reduction="none", ignore_index=None, **told)]


def loss(x: dict[str, Any], **told: Any) -> Any:
    total, out = linear_loss(lambda logprob, *_: -logprob, x["hidden"], x["weight"], x["labels"], **told)
    differs = jnp.isnan(out.lse)
    return [jnp.where(differs, total, 0.0) + jnp.where(jnp.any(differs), 0.0, total), out.logprobs, out.entropy]


def kl(x: dict[str, Any], **told: Any) -> Any:
    return [linear_kl(x["hidden"], x["weight"], x["teacher_hidden"], x["teacher_weight"], **told)]


def jsd(x: dict[str, Any], **told: Any) -> Any:
    return kl(x, direction="jsd", **told)


def logits(x: dict[str, Any], **told: Any) -> Any:
    return [linear_logits(x["hidden"], x["weight"], x["ids"], **told)]


def topk(x: dict[str, Any], **told: Any) -> Any:
    out = linear_topk(*(lax.stop_gradient(x[name]) for name in ("hidden", "weight")), 3, **told)
    missing = (out.ids < 0) & x["where"][:, None]
    return [jnp.where(missing, jnp.nan, out.logprobs), out.lse]


FUNCTIONS: dict[Callable[..., Any], set[int]] = {  # and the rows in which all that it takes makes a difference
    logprobs: {LABEL, TEMPERATURE, ID, HIDDEN},
    cross_entropy: {LABEL, TEMPERATURE, HIDDEN},
    loss: {LABEL, TEMPERATURE, HIDDEN},
    kl: {TEMPERATURE, HIDDEN},
    jsd: {TEMPERATURE, HIDDEN},
    logits: {TEMPERATURE, ID},  # of a row that one shard has, so hidden is nowhere compared
    topk: {TEMPERATURE, HIDDEN},
}


def run_on_shards(function: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    """Results and the gradient in hidden, of each shard; shard 2 is given the second set of tokens."""

    def body(x: dict[str, Any], other: dict[str, Any], weights: dict[str, Any]) -> Any:
        x = {name: jnp.where(lax.axis_index("tensor") == 2, other[name], x[name]) for name in x} | weights

        def total(hidden: Any, weight: Any) -> Any:
            how: Any = dict(where=x["where"], temperature=x["temperature"], axis_name="tensor")
            found = function(x | {"hidden": hidden, "weight": weight}, **how)
            return sum(jnp.sum(y) for y in found), found

        grads, found = jax.grad(total, (0, 1), has_aux=True)(x["hidden"], x["weight"])
        return jax.tree.map(
            lambda y: (lax.pcast(y, "tensor", to="varying") if _invariant(y) else y)[None], (found, grads)
        )

    def _invariant(y: Any) -> bool:
        return check_vma and "tensor" not in jax.typeof(y).mat.varying

    specs = P(), P(), P("tensor")
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("tensor"), check_vma=check_vma))


def run(call: Callable[..., Any], other: dict[str, Any], **weights: Any) -> Any:
    tokens = {name: x for name, x in GIVEN.items() if name not in SPLIT}
    return call(tokens, tokens | other, {name: GIVEN[name] for name in SPLIT} | weights)


def replace_row(x: np.ndarray, row: int, value: Any) -> np.ndarray:
    x = x.copy()
    x[row] = value
    return x


def nan_rows(x: Any) -> set[int]:
    return set(np.flatnonzero(np.isnan(np.asarray(x)).reshape(len(x), -1).any(1)).tolist())


@pytest.mark.fast("logprobs", "loss", "jsd", "logits", "topk")
@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_rows_that_differ(function: Callable[..., Any], check_vma: bool) -> None:
    call, rows = run_on_shards(function, check_vma), FUNCTIONS[function]

    def check(expected: set[int], other: dict[str, Any], **weights: Any) -> None:
        found, (dhidden, dweight) = run(call, other, **weights)
        for field in found:
            assert all(nan_rows(of_shard) == expected for of_shard in field), [nan_rows(y) for y in field]
            np.testing.assert_array_equal(field, field[:1].repeat(N, 0))
        if function is topk:
            return
        differ = nan_rows(np.asarray(dhidden).sum(0))
        assert differ == expected or (check_vma and differ > expected), differ  # with types, all of a sum's gradient
        assert np.isnan(dweight).any() == bool(expected)

    x = GIVEN
    check(set(), {})
    check(set(), {"hidden": x["hidden"] * (1 + 2.0**-8), "teacher_hidden": x["teacher_hidden"] * (1 - 2.0**-8)})
    of_row = {
        "labels": (LABEL, -1, x["labels"][MASKED] + 1),
        "temperature": (TEMPERATURE, 1.01 * x["temperature"][TEMPERATURE], np.nan),
        "ids": (ID, (x["ids"][ID] + [0, 1, 0]) % V, 7),
        "hidden": (HIDDEN, x["hidden"][0], np.inf),
    }
    differs = {name: replace_row(x[name], row, value) for name, (row, value, _) in of_row.items()}
    check(rows, {name: replace_row(differs[name], MASKED, masked) for name, (*_, masked) in of_row.items()})
    where = replace_row(x["where"], MASK, False)
    if check_vma:  # types make it one mask, so that the other rows are still the same ones
        check({MASK}, {"where": where})
    else:
        found, (dhidden, _) = run(call, {"where": where})
        for shard in range(N):
            counted = set(range(T)) - {MASKED} - ({MASK} if shard == 2 else set())
            assert all(nan_rows(field[shard]) == counted for field in found), shard
            assert function in (logits, topk) or nan_rows(dhidden[shard]) == counted, shard
    every = set() if function is logits else set(range(T)) - {MASKED}  # the first shard has all the rows that ids name
    whole = {name: np.concatenate([x[name][: V // N]] * N) for name in SPLIT}
    few = {name: np.clip(x[name], -1, V // N - 1) for name in ("labels", "ids")}
    tokens = {name: GIVEN[name] for name in GIVEN if name not in SPLIT} | few
    found, _ = call(tokens, tokens, whole)
    assert all(nan_rows(of_shard) == every for field in found for of_shard in field)
    for weight in (0 * x["weight"], x["weight"][:1].repeat(V, 0)):
        check(set(), {}, **dict.fromkeys(SPLIT, weight))
    if function not in (kl, jsd, topk):  # ids tell that the vocabulary is larger than a part of it
        check(set(), {}, **whole)


def test_tags() -> None:
    """Each bit of each column makes another tag; rows that do not count have one, and another mask has others."""
    compute_tags = jax.jit(_collectives.compute_tags)
    columns = [np.arange(6), np.linspace(0.5, 1.0, 6, dtype=np.float32), np.arange(12).reshape(6, 2)]
    columns.append(np.ones(6, jnp.bfloat16))
    tags = np.asarray(compute_tags(columns))
    for i, value in enumerate((4, 0.8000001, [6, 8], 1 + 2.0**-7)):
        other = np.asarray(compute_tags([*columns[:i], replace_row(columns[i], 3, value), *columns[i + 1 :]]))
        assert np.flatnonzero(other != tags).tolist() == [3]
    where, swapped = (np.arange(6) != row for row in (3, 0))
    masked = np.asarray(compute_tags(columns, where))
    np.testing.assert_array_equal(compute_tags([replace_row(columns[0], 3, 9), *columns[1:]], where), masked)
    assert (np.asarray(compute_tags(columns, swapped)) != masked).all()
    with jax.enable_x64():
        wide = [np.arange(6) * 2**20, np.linspace(0.5, 1.0, 6)]
        assert wide[1].dtype == np.float64
        other = compute_tags([wide[0], replace_row(wide[1], 3, wide[1][3] + 2.0**-50)])
        assert np.flatnonzero(np.asarray(other) != np.asarray(compute_tags(wide))).tolist() == [3]
        assert other.dtype == jnp.int32


@pytest.mark.parametrize("shards", [2, 3, 4096])
def test_differences(shards: int) -> None:
    """Exactly 0 in any order of addition, and nothing else where one shard differs, or several by opposite amounts."""

    @jax.jit
    def find_terms(column: Any, shard: Any) -> Any:
        return _collectives.difference_terms(_collectives.compute_tags([column]), shard, shards)

    parts = [np.asarray(find_terms(np.arange(1000), shard)) for shard in (0, 1)]
    total = parts[0].copy()
    for _ in range(shards - 1):
        total += parts[1]
    assert not total.any()
    near = [np.asarray(find_terms(np.arange(1000) + i, shard)) for i, shard in ((1, 1), (-1, 2))]
    assert (total - parts[1] + near[0]).any(1).all()
    if shards > 2:
        assert (total - 2 * parts[1] + near[0] + near[1]).any(1).all()


@pytest.mark.slow
def test_sketches() -> None:
    """Other tokens are told apart, and roundings of a few bits are not; a narrow or a wide hidden state."""
    for size in (1, 3, 33, 4096):
        hidden = Draws(1).normal(500, size).astype(jnp.bfloat16)
        noise = 1 + 2.0**-7 * jnp.sign(Draws(2).normal(500, size))
        rounded = (hidden * noise).astype(jnp.bfloat16)

        def given(hidden: Any) -> Any:
            probe = jnp.arange(2)[None, :, None]
            return _collectives.ShardSummary(jnp.zeros(500, jnp.int32), _collectives.sketch(hidden)[None], probe)

        def agree(*all_of: Any) -> Any:
            every = jax.tree.map(lambda *x: jnp.stack(x), *map(given, all_of))
            every = every._replace(probes=every.probes + jnp.arange(len(all_of))[:, None, None, None])
            return _collectives.compare_summaries(every, jnp.zeros(500, jnp.int32), 10)

        assert agree(hidden, rounded, hidden).all()
        assert agree(jnp.zeros_like(hidden), jnp.zeros_like(hidden)).all()
        assert jnp.mean(agree(hidden, hidden, hidden[::-1])) < (0.6 if size == 1 else 0.02)
